"""Models that are not whole, and machines that are too small, are refused before anything starts."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines import model_folder, needs
from pipelines.cli import app
from pipelines.model_folder import ModelFolder
from schemas.settings import Settings
from tests.unit.pipeline_parts import a_config, some_settings
from workers.runtime.errors import BadInput

REAL: dict[str, Any] = {"engines": {"kind": "vllm", "count": 2, "seats": 4}, "training": {"kind": "megatron"}}


def _write_tensors(file: Path, shape: tuple[int, ...] = (3, 5)) -> None:
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def _real(folder: Path) -> tuple[Settings, Path]:
    settings = some_settings(folder, **REAL)
    _write_tensors(folder / "model" / "model.safetensors")
    return settings, folder / "model"


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    settings, model = _real(tmp_path)
    assert model_folder.look(model, settings).parameters == 15
    (model / "model.safetensors").rename(model / "one.safetensors")
    _write_tensors(model / "two.safetensors", (2, 2))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_folder.look(model, settings).parameters == 19


def _cut(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-7])


def _other_family(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


def _other_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0}
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))


def _only_a_bin(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "no whole safetensors file: it has no header"),
        (lambda model: (model / "model.safetensors").write_text("version https"), "no whole safetensors file"),
        (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda model: (model / "tokenizer.json").unlink(), "knows no"),
        (lambda model: (model / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not JSON"),
        (_cut, "its header speaks of"),
        (_only_a_bin, "it has pytorch_model.bin: save it again as safetensors"),
        (_other_rope, "config.json: rope_scaling: rope_type 'yarn' cannot be trained; known are default, and llama3"),
        (_other_family, "model_type 'gpt2' cannot be trained; known are llama, mistral, qwen2, qwen3"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(tmp_path: Path, breaks: Callable[[Path], object], said: str) -> None:
    config = a_config(tmp_path, **REAL)
    _write_tensors(tmp_path / "model" / "model.safetensors")
    breaks(tmp_path / "model")
    if said == "knows no":
        (tmp_path / "model" / "tokenizer_config.json").unlink()
        said = "has no tokenizer"
    done = CliRunner().invoke(app, ["run", str(config)])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.startswith("dora: model: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


SMOLLM2 = ModelFolder(Path(), {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}, 134_515_008)


def test_the_quickstart_is_estimated_near_what_was_measured(tmp_path: Path) -> None:
    """Measured: about 11 GiB, the trainer 5.2 (and 1.8 more while a checkpoint is written), each engine 1.8
    (and its weights once more while a version is prepared)."""
    engines = {"kind": "vllm", "count": 2, "kv_mib": 128}
    training = {"kind": "megatron", "micro_batch_tokens": 1024}
    settings = some_settings(tmp_path, engines=engines, training=training, dtype="float32", prefect={"enabled": True})
    memory = needs.memory_of(settings, SMOLLM2)
    assert 6.0 < memory.trainer < 8.5
    assert 1.8 < memory.engine < 2.6
    assert 10.0 < memory.total < 15.0


def _settings(tmp_path: Path, engines: int) -> Settings:
    return some_settings(
        tmp_path,
        engines={"kind": "vllm", "count": engines, "seats": 4},
        training={"kind": "megatron"},
        dtype="bfloat16",
    )


def test_more_engines_than_memory_holds_are_refused_with_the_number_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "GPU_DEVICE", tmp_path / "none")
    monkeypatch.setattr(needs, "memory", lambda: (16.0, 16.0))
    assert needs.check(_settings(tmp_path, 2), SMOLLM2) == []
    with pytest.raises(
        BadInput, match=r"40 engines with 2\.2 GiB each.*16\.0 GiB: lower engines\.count to [1-9]"
    ) as no:
        needs.check(_settings(tmp_path, 40), SMOLLM2)
    fits = int(str(no.value).split("engines.count to ")[1].split(",")[0])
    assert needs.check(_settings(tmp_path, fits), SMOLLM2) == []
    with pytest.raises(BadInput):
        needs.check(_settings(tmp_path, fits + 1), SMOLLM2)
    monkeypatch.setattr(needs, "memory", lambda: (16.0, 3.0))
    (note,) = needs.check(_settings(tmp_path, 2), SMOLLM2)
    assert "3.0 GiB are free now" in note
    monkeypatch.setattr(needs, "memory", lambda: (2.0, 2.0))
    with pytest.raises(BadInput, match=r"lower training\.micro_batch_tokens"):
        needs.check(_settings(tmp_path, 1), SMOLLM2)


def test_a_sample_longer_than_a_micro_batch_is_counted_and_its_key_is_the_one_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes through the model alone, whatever the budget of a micro-batch."""

    def lower(micro_batch_tokens: int, longest: int) -> tuple[float, str]:
        settings = some_settings(
            tmp_path,
            engines={"kind": "vllm", "count": 1, "tokens_per_request_max": longest},
            training={"kind": "megatron", "micro_batch_tokens": micro_batch_tokens},
            dtype="bfloat16",
        )
        with pytest.raises(BadInput) as caught:
            needs.check(settings, SMOLLM2)
        return needs.memory_of(settings, SMOLLM2).trainer, str(caught.value).split(": ")[-1]

    monkeypatch.setattr(needs, "GPU_DEVICE", tmp_path / "none")
    monkeypatch.setattr(needs, "memory", lambda: (2.0, 2.0))
    small, large = lower(512, 512), lower(4096, 512)
    alone = lower(512, 4096)
    assert alone[0] == large[0] > small[0] + 1.0
    assert small[1].startswith("lower training.micro_batch_tokens or")
    assert alone[1].startswith("lower engines.tokens_per_request_max or")


def test_an_engine_has_room_for_a_version_beside_the_one_it_serves(tmp_path: Path) -> None:
    def engine(dtype: str) -> float:
        settings = some_settings(tmp_path, engines={"kind": "vllm", "kv_mib": 64}, dtype=dtype)
        return needs.memory_of(settings, SMOLLM2).engine

    assert engine("float32") - engine("bfloat16") == pytest.approx(2 * 2 * SMOLLM2.parameters / needs.GIB)


def test_a_reference_model_and_float32_are_counted(tmp_path: Path) -> None:
    def trainer(dtype: str, **training: Any) -> float:
        settings = some_settings(tmp_path, training={"kind": "megatron", **training}, dtype=dtype)
        return needs.memory_of(settings, SMOLLM2).trainer

    billions = SMOLLM2.parameters / needs.GIB
    plain, short = trainer("bfloat16"), trainer("float32")
    tokens = 4096 * SMOLLM2.config["hidden_size"] * SMOLLM2.config["num_hidden_layers"] / needs.GIB
    assert plain - short == pytest.approx(2 * billions - 34 * tokens)
    assert trainer("bfloat16", kl_coef=0.1) - plain == pytest.approx(2 * billions)
    assert trainer("float32", kl_coef=0.1) - short == pytest.approx(4 * billions)


def test_a_disk_that_is_too_small_is_refused_with_the_keys_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "memory", lambda: (64.0, 64.0))
    usage = type("Usage", (), {"free": 3 * 2**30})()
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda _: usage)
    settings = _settings(tmp_path, 1)
    with pytest.raises(BadInput, match=r"of disk.*3\.0 GiB free: lower training\.checkpoints_keep or scheduling\.weig"):
        needs.check(settings, SMOLLM2)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    assert needs.check(settings, SMOLLM2) == [], "what a resumed run needs is there already"


def test_the_command_refuses_with_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "GPU_DEVICE", tmp_path / "none")
    monkeypatch.setattr(needs, "memory", lambda: (1.0, 1.0))
    config = a_config(tmp_path)
    for command in ("run", "validate"):
        done = CliRunner().invoke(app, [command, str(config)])
        assert (done.exit_code, "GiB of memory" in done.stderr) == (2, True), done.output
    assert CliRunner().invoke(app, ["validate", str(config), "--offline"]).exit_code == 0
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_here_can_be_left_out_but_nothing_else(tmp_path: Path) -> None:
    config = a_config(tmp_path, model="models/not-here")
    assert "is no Hugging Face folder" in CliRunner().invoke(app, ["validate", str(config)]).stderr
    done = CliRunner().invoke(app, ["validate", str(config), "--offline"])
    assert done.exit_code == 0, done.stderr
    assert "note: model models/not-here is not here" in done.stdout
    wrong = CliRunner().invoke(app, ["validate", str(config), "--offline", "--set", "dataset=[{path='gone.jsonl'}]"])
    assert wrong.exit_code == 2
