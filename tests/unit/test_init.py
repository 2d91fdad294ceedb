"""`dora init` writes what `dora validate` passes, with every key explained, and a reward function that a run finds."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.init import config_text
from schemas.settings import parse_settings
from tests.unit.pipeline_parts import a_config, write_model
from tests.unit.test_house import ROOT

KEYS = (ROOT / "tests/golden/settings.txt").read_text().split()
COMMENTED = re.compile(r"^# ([a-z_0-9]+ = .*)$", re.M)


def dora(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _keys(text: str) -> set[str]:
    """Dotted keys of all lines, commented ones too."""
    found, section = set(), ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[+([a-z_.]+)\]+", line):
            section = header[1] + "."
        elif key := re.match(r"(?:# )?([a-z_0-9]+) = ", line):
            found.add(section + key[1])
    return found


def test_the_configuration_has_every_key_with_a_word_on_it() -> None:
    text = config_text()
    assert _keys(text) == {key for key in KEYS if key not in ("vllm", "megatron", "kafka")}
    for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        if re.match(r"(?:# )?[a-z_0-9]+ = ", line):
            assert before.startswith("## "), f"nothing is said of {line}"


def test_what_is_behind_a_comment_sign_is_the_default() -> None:
    text = config_text()
    assert parse_settings(COMMENTED.sub(r"\1", text).replace('task = ""\n', ""), "all.toml") == parse_settings(
        text, "some.toml"
    )


def test_what_init_writes_passes_validate(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    done = dora("init", tmp_path / "first.toml", "--json")
    assert done.exit_code == 0, done.stderr
    assert [Path(path).name for path in json.loads(done.stdout)["written"]] == [
        "first.toml",
        "my_rows.jsonl",
        "my_reward.py",
    ]
    assert len((tmp_path / "my_rows.jsonl").read_text().splitlines()) == 10
    tomllib.loads((tmp_path / "first.toml").read_text())
    paced = ["--set", f"model={model}", "--set", "engines.kind=paced", "--set", "training.kind=paced"]
    checked = dora("validate", tmp_path / "first.toml", *paced, "--json")
    assert checked.exit_code == 0, checked.stderr
    said = json.loads(checked.stdout)
    assert said["rows"] == {"train:my_rows": 10}
    assert [(example["answer"], example["verdict"]) for example in said["examples"]] == [
        ("5", 1.0),
        ("9", 1.0),
        ("6", 1.0),
    ]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("mine = True\n")
    assert dora("init", tmp_path / "first.toml").exit_code == 0
    assert (tmp_path / "my_reward.py").read_text() == "mine = True\n"
    before = (tmp_path / "first.toml").read_text()
    again = dora("init", tmp_path / "first.toml")
    assert (again.exit_code, "first.toml exists" in again.stderr) == (2, True)
    assert (tmp_path / "first.toml").read_text() == before
    assert dora("init", tmp_path / "first.yaml").exit_code == 2
    assert dora("init", tmp_path / "no" / "first.toml").exit_code == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def other(item): return 1.0", "did you mean"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("def reward(item) return 1.0", "SyntaxError"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded_is_refused_by_its_key(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "own_reward.py").write_text(code + "\n")
    config = a_config(tmp_path, dataset=[{"path": "rows.jsonl", "grader": "own_reward:rewards"}])
    done = dora("run", config)
    assert done.exit_code == 2, done.output
    assert "dataset.0.grader: " in done.stderr
    assert said in done.stderr.replace("unknown grader 'own_reward:rewards': write", "did you mean"), done.stderr
    assert str(tmp_path) in done.stderr
    assert not (tmp_path / "runs").exists()


def test_what_a_grader_cannot_judge_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "own_reward.py").write_text(
        "def reward(item):\n    if item.answer == '1': raise ValueError('not today')\n    return 0\n"
    )
    config = a_config(tmp_path, dataset=[{"path": "rows.jsonl", "grader": "own_reward:reward"}])
    done = dora("validate", config)
    assert done.exit_code == 0, done.stderr
    assert "own_reward:reward cannot judge the reference answer '1': ValueError: not today" in done.stdout
    assert "own_reward:reward gives the reference answer '0' nothing" in done.stdout
