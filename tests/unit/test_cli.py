"""The command as people use it: what it prints, what it refuses, its exit codes."""

import json
import shlex
import socket
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines import children, local_services, services
from pipelines.cli import app
from pipelines.config_file import read_resolved, read_settings, write_resolved
from tests.unit.pipeline_parts import a_config, some_settings, write_rows
from workers.runtime.errors import BadInput


def dora(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_valid_configuration_says_its_rows(tmp_path: Path) -> None:
    done = dora("validate", a_config(tmp_path), "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    examples = said.pop("examples")
    assert said | {"source": ""} == {
        "valid": True,
        "source": "",
        "rows": {"train:rows": 7},
        "notes": [],
        "prompt_tokens_max": 7,
    }
    assert examples[1] == {
        "dataset": "train:rows",
        "row": "row 1 (line 2)",
        "text": "<u>row 1<a>",
        "tokens": 7,
        "answer": "1",
        "grader": "last_integer",
        "verdict": 1.0,
        "error": "",
    }


def test_a_misspelt_key_is_answered_with_the_nearest_one_and_exit_code_2(tmp_path: Path) -> None:
    done = dora("run", a_config(tmp_path), "--set", "engines.cont=3")
    assert done.exit_code == 2
    assert "unknown key engines.cont: did you mean engines.count?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("steps=-1", "steps"),
        ("model=nowhere", "model: nowhere is no Hugging Face folder"),
        ("model=builtin:huge", "model: builtin:huge is not known"),
        ("dataset=[{path='gone.jsonl'}]", "gone.jsonl: no such file"),
        ("dataset=[{path='rows.jsonl', grader='last_intger'}]", "did you mean last_integer?"),
        ("dataset=[{path='rows.jsonl', columns={prompt='question'}}]", "no column 'question'"),
        ("sampling.max_new_tokens=2000", "7 row(s) do not fit"),
        ("engines.tokens_per_request_max=5000", "knows 4096 positions"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, setting: str, said: str) -> None:
    done = dora("run", a_config(tmp_path), "--set", setting)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_or_no_toml_is_exit_code_2(tmp_path: Path) -> None:
    assert dora("run", tmp_path / "gone.toml").exit_code == 2
    (tmp_path / "bad.toml").write_text("steps = ")
    done = dora("validate", tmp_path / "bad.toml")
    assert (done.exit_code, "not TOML" in done.stderr) == (2, True)


def test_a_name_that_exists_is_refused_without_resume(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    done = dora("run", a_config(tmp_path), "--set", "name=first")
    assert done.exit_code == 2
    assert "run first exists already" in done.stderr
    assert "--resume" in done.stderr


def test_a_resume_may_only_grow_steps(tmp_path: Path) -> None:
    settings = some_settings(tmp_path)
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    write_resolved(settings, run_dir)
    config = a_config(tmp_path)
    assert "which run?" in dora("run", config, "--resume").stderr
    fewer = dora("run", config, "--resume", "--set", "name=r", "--set", "steps=1")
    assert (fewer.exit_code, "steps may only grow" in fewer.stderr) == (2, True)
    other = dora("run", config, "--resume", "--set", "name=r", "--set", "group_size=4")
    assert (other.exit_code, "group_size: 2 -> 4" in other.stderr) == (2, True)
    deep = dora("run", config, "--resume", "--set", "name=r", "--set", "sampling.temperature=0.5", "--set", "vllm.x=1")
    assert deep.exit_code == 2
    assert "2 key(s) differ" in deep.stderr
    assert "  sampling.temperature: 1.0 -> 0.5\n  vllm.x: not set -> 1\n" in deep.stderr
    data = dora("run", config, "--resume", "--set", "name=r", "--set", "dataset=[{path='rows.jsonl', weight=2}]")
    assert "  dataset.0.weight: 1.0 -> 2.0\n" in data.stderr
    gone = dora("run", config, "--resume", "--set", "name=nobody")
    assert (gone.exit_code, "no run here" in gone.stderr) == (2, True)


def test_the_resolved_configuration_reads_back_as_it_was(tmp_path: Path) -> None:
    settings = some_settings(tmp_path, vllm={"max_num_batched_tokens": 512})
    write_resolved(settings, tmp_path)
    assert read_resolved(tmp_path) == settings
    assert Path(settings.dataset[0].path) == tmp_path / "rows.jsonl"
    with pytest.raises(BadInput, match="no such configuration file"):
        read_settings(tmp_path / "gone.toml")


def test_a_dataset_alone_can_be_checked_with_other_columns(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "d.jsonl", [{"question": "1+1?", "answer": "2"}])
    assert dora("validate", file).exit_code == 2
    done = dora("validate", file, "--prompt", "question")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, f"{file} is valid ({file}: 1 rows)")


def test_every_misspelt_key_is_named_at_once(tmp_path: Path) -> None:
    done = dora("validate", a_config(tmp_path), "--set", "engines.cont=3", "--set", "stpes=4", "--set", "seed=1")
    assert done.exit_code == 2
    assert "unknown key engines.cont: did you mean engines.count?" in done.stderr
    assert "unknown key stpes: did you mean steps?" in done.stderr
    assert done.stderr.count("unknown key") == 2


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Kafka broker answers at 127.0.0.1:1"),
        ("nobody.invalid:9092", "no Kafka broker answers at nobody.invalid:9092"),
        ("127.0.0.1", "'127.0.0.1' is no host:port"),
        ("127.0.0.1:port", "'127.0.0.1:port' is no host:port"),
        (":9092", "':9092' is no host:port"),
    ],
)
def test_a_wrong_broker_is_refused_soon_by_its_key_and_leaves_nothing(
    tmp_path: Path, address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert services.BROKER_CONNECT_S_MAX <= 5.0, "all is said within 10 s"
    monkeypatch.setattr(services, "BROKER_CONNECT_S_MAX", 0.5)
    monkeypatch.delenv("DORA_BROKER", raising=False)
    config = a_config(tmp_path)
    done = dora("run", config, "--set", f"broker.address={address}")
    assert done.exit_code == 2, done.output
    assert f"broker.address: {said}" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.setenv("DORA_BROKER", address)
    assert "DORA_BROKER (over broker.address): " in dora("run", config).stderr


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "BROKER_CONNECT_S_MAX", 0.5)
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    write_resolved(some_settings(tmp_path), run_dir)
    (run_dir / "archive").mkdir()
    done = dora("run", run_dir / "config.toml", "--resume", "--set", "broker.address=127.0.0.1:1")
    assert (done.exit_code, "broker.address: no Kafka" in done.stderr) == (2, True), done.stderr
    assert (run_dir / "archive").is_dir()
    assert not (run_dir / children.LOCK).exists()


def test_unknown_runs_topics_and_workers_are_bad_input(tmp_path: Path) -> None:
    assert "no run 'nobody'" in dora("status", "nobody").stderr
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    write_resolved(some_settings(tmp_path), run_dir)
    assert "topic 'trajectory' is not known" in dora("tap", run_dir, "trajectory").stderr
    done = dora("worker", "roll", "--run-dir", run_dir, "--broker", "127.0.0.1:9")
    assert (done.exit_code, "worker 'roll' is not known" in done.stderr) == (2, True)
    done = dora("export", run_dir, tmp_path / "out", "--version", "3")
    assert (done.exit_code, "announced no version 3" in done.stderr) == (2, True)


def test_doctor_names_every_check() -> None:
    done = dora("doctor", "--json")
    said = json.loads(done.stdout)
    assert {check["name"] for check in said["checks"]} >= {"python", "memory", "disk", "vllm", "kafka", "java"}
    assert done.exit_code == (0 if said["ok"] else 1)


COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_is_one(command: str) -> None:
    said = " ".join(dora(command, "--help").stdout.split())
    example = said.partition("Example: ")[2]
    assert example.startswith(f"dora {command} "), said
    for part in example.replace("&&", ";").split("; "):
        _, name, *words = shlex.split(part)
        options = [word for word in words if word.startswith("--")]
        assert name in COMMANDS
        assert all(option in dora(name, "--help").stdout for option in options), part


def test_a_port_that_is_taken_is_not_asked_for(tmp_path: Path) -> None:
    """The embedded broker's ports of last time are someone else's now: it takes others."""
    lock = (tmp_path / "kafka.lock").open("a+")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lock.write(json.dumps({"pid": 1, "address": "", "ports": [port, port]}))
        lock.flush()
        ports = local_services._ports(lock, 2)
        assert port not in ports
        assert len(set(ports)) == 2
        assert set(ports) <= set(local_services.FRESH_PORTS), "no client is given them while the broker starts"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("staleness_max=-1", "staleness_max: Input should be greater than or equal to 0"),
        ("groups_per_batch=0", "groups_per_batch: Input should be greater than or equal to 1"),
        ("group_size=0", "group_size: Input should be greater than or equal to 1"),
        ("group_size=1", "group_size = 1 gives a group-relative advantage (grpo) nothing to compare"),
        ("engines.count=0", "engines.count: Input should be greater than or equal to 1"),
        ("engines.kind=none", 'engines.kind: "none" is none of vllm, paced: write kind = "vllm"'),
        ("epochs=3", "set exactly one of `steps` and `epochs`"),
        ("dataset=[{path='empty.jsonl'}]", "empty.jsonl: there are no rows in it"),
        ("dataset=[{path='null.jsonl'}]", "row 0 (line 1): prompt is null: a text is needed"),
        ("dataset=[{path='latin.jsonl'}]", "row 0 (line 1): not UTF-8 (byte 12 of the line)"),
        ("dataset=[{path='twice.jsonl'}]", "row 1 (line 2): id 7 is already that of row 0 (line 1)"),
        ("dataset=[{path='bad.parquet'}]", "bad.parquet: cannot be read as Parquet"),
        ("dataset=[{path='model'}]", "model: no data files in this folder"),
    ],
)
def test_bad_input_of_every_kind_is_exit_code_2_with_its_place(tmp_path: Path, setting: str, said: str) -> None:
    config = a_config(tmp_path)
    for name, content in {
        "empty.jsonl": b"",
        "null.jsonl": b'{"prompt": null, "answer": "1"}\n',
        "latin.jsonl": b'{"prompt": "\xe9", "answer": "1"}\n',
        "twice.jsonl": b'{"prompt": "a", "answer": "1", "id": 7}\n{"prompt": "b", "answer": "1", "id": 7}\n',
        "bad.parquet": b"PAR1",
    }.items():
        (tmp_path / name).write_bytes(content)
    for command in ("run", "validate"):
        done = dora(command, config, "--set", setting)
        assert done.exit_code == 2, done.output
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
