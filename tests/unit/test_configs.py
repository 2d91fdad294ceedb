"""Every file in `configs` is a configuration that can start, and its datasets are what they say."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines import datasets
from pipelines.cli import app
from pipelines.config_file import read_settings
from workers.reward import graders

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_is_valid_and_has_its_rows(config: Path) -> None:
    settings = read_settings(config)
    assert settings.name == "", "a name in a configuration could run only once"
    assert all(table.rows for table in datasets.read_tables(settings))
    for dataset in settings.dataset:
        graders.check_name(dataset.grader)


@pytest.mark.parametrize("name", ["gpu", "cluster"])
def test_a_configuration_for_other_machines_is_checked_without_model_gpu_or_cluster(name: str) -> None:
    done = CliRunner().invoke(app, ["validate", str(CONFIGS / f"{name}.toml"), "--offline", "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert [note for note in said["notes"] if "is not here" in note]
    assert sum(said["rows"].values()) >= 3000
    refused = CliRunner().invoke(
        app, ["validate", str(CONFIGS / f"{name}.toml"), "--offline", "--set", "engines.cont=1"]
    )
    assert (refused.exit_code, "did you mean engines.count?" in refused.stderr) == (2, True)
    strict = CliRunner().invoke(app, ["validate", str(CONFIGS / f"{name}.toml")])
    assert (strict.exit_code, "no Hugging Face folder" in strict.stderr) == (2, True)


def _rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (CONFIGS / "data" / name).read_text().splitlines()]


def test_the_unseen_products_are_in_no_training_row_in_either_order() -> None:
    train = {str(row["id"]) for row in _rows("products_train.jsonl")}
    heldout = _rows("products_heldout.jsonl")
    unseen = {str(row["id"]) for row in heldout if dict(row["metadata"])["unseen"]}  # type: ignore[call-overload]
    assert (len(train), len(heldout), len(unseen)) == (65, 81, 16)
    turned = {"x".join(reversed(name.split("x"))) for name in unseen}
    assert not train & (unseen | turned)
    assert train | unseen == {str(row["id"]) for row in heldout}
    assert {digit for name in unseen for digit in name.split("x")} == set("123456789")


def test_tiny_lengths_have_a_heavy_tail() -> None:
    lengths = sorted(int(str(row["max_new_tokens"])) for row in _rows("tiny_train.jsonl"))
    assert (lengths[0], lengths[-1]) == (4, 96)
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]
