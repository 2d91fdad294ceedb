"""What a newcomer gets wrong with graders and rows, and what is said: file, place, and what to write."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines import datasets
from pipelines.cli import app
from schemas.settings import Columns
from tests.unit.pipeline_parts import a_config, some_rows, write_rows
from workers.runtime.errors import BadInput


def dora(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _config(folder: Path, code: str, grader: str = "own_reward:reward", rows: str = "rows.jsonl") -> Path:
    (folder / "own_reward.py").write_text(code)
    return a_config(folder, dataset=[{"path": rows, "grader": grader}])


@pytest.mark.parametrize("command", ["validate", "run"])
@pytest.mark.parametrize(
    ("code", "said", "line"),
    [
        (
            "def helper(item):\n    return item.txt\n\n\ndef reward(item):\n    return helper(item)\n",
            "AttributeError",
            2,
        ),
        ("\ndef reward(item):\n    return 'good'\n", "TypeError: the grader returned str, not a number or Verdict", 2),
        ("import json\n\ndef reward(item):\n    return json.loads('{')\n", "JSONDecodeError", 4),
    ],
)
def test_an_own_grader_that_can_judge_no_answer_is_refused_with_its_line(
    tmp_path: Path, command: str, code: str, said: str, line: int
) -> None:
    config = _config(tmp_path, code)
    done = dora(command, config)
    assert done.exit_code == 2, done.output
    assert "dataset.0.grader: own_reward:reward judged none of 3 reference answer(s) of" in done.stderr
    assert f"{tmp_path / 'rows.jsonl'}, e.g. row 0 (line 1), answer '0': " in done.stderr
    assert said in done.stderr
    assert f"({tmp_path / 'own_reward.py'}:{line})" in done.stderr
    assert done.stderr.startswith(f"dora: {config}: dataset.0.grader: ")
    assert not (tmp_path / "runs").exists()


def test_an_own_grader_may_read_all_that_a_run_gives_it(tmp_path: Path) -> None:
    code = "def reward(item):\n    return item.prompt_ids[0] * 0 + item.response_ids[0] * 0 + item.metadata['level']\n"
    config = _config(tmp_path, code, rows="levels.jsonl")
    write_rows(tmp_path / "levels.jsonl", [row | {"level": 0.5} for row in some_rows(3)])
    done = dora("validate", config, "--json")
    assert done.exit_code == 0, done.stderr
    assert [example["verdict"] for example in json.loads(done.stdout)["examples"]] == [0.5] * 3


def test_answers_that_are_not_for_a_grader_of_ours_stay_a_note(tmp_path: Path) -> None:
    config = _config(tmp_path, "", "last_integer", "words.jsonl")
    write_rows(tmp_path / "words.jsonl", [{"prompt": "a", "answer": "red"}])
    done = dora("validate", config)
    assert done.exit_code == 0, done.stderr
    assert "note: train:words, row 0 (line 1): last_integer cannot judge the reference answer 'red'" in done.stdout


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ("own_rewrad:reward", "Did you mean own_reward:reward?"),
        ("own_reward:rewrad", "did you mean own_reward:reward?"),
        ("last_intger", "did you mean last_integer?"),
    ],
)
def test_an_unknown_grader_is_refused_with_the_configuration_and_the_nearest(
    tmp_path: Path, grader: str, said: str
) -> None:
    config = _config(tmp_path, "def reward(item):\n    return 1\n", grader)
    done = dora("validate", config)
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert done.stderr.startswith(f"dora: {config}: dataset.0.grader: ")


def test_a_dataset_that_is_not_there_names_the_configuration_and_the_nearest_file(tmp_path: Path) -> None:
    config = _config(tmp_path, "", "last_integer", "row.jsonl")
    done = dora("validate", config)
    assert done.exit_code == 2
    there = f"{tmp_path / 'row.jsonl'}: no such file: did you mean rows.jsonl?"
    assert done.stderr.startswith(f"dora: {config}: dataset.0.path: {there}"), done.stderr
    assert there in dora("validate", tmp_path / "row.jsonl").stderr


def test_a_dataset_alone_with_other_columns_is_told_the_options(tmp_path: Path) -> None:
    done = dora("validate", write_rows(tmp_path / "words.jsonl", [{"question": "a", "answer": "1"}]))
    assert (done.exit_code, "Name the right one: --prompt NAME" in done.stderr) == (2, True), done.stderr
    done = dora("validate", write_rows(tmp_path / "words.jsonl", [{"prompt": "a", "label": "1"}]))
    assert (done.exit_code, "Name the right one: --answer NAME" in done.stderr) == (2, True), done.stderr


def test_a_folder_of_jsonl_names_its_files_and_never_those_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r" / "archive"
    run.mkdir(parents=True)
    (run.parent / "config.toml").write_text("")
    for folder in (run, run.parent):
        pq.write_table(pa.table({"prompt": ["a"]}), folder / "metrics.parquet")
    for folder in (tmp_path, tmp_path / "runs", run.parent.parent):
        with pytest.raises(BadInput, match=r"no data files in this folder: write JSONL"):
            datasets.read_rows(folder, Columns())
    write_rows(tmp_path / "words.jsonl", some_rows(1))
    with pytest.raises(
        BadInput, match=r"there are JSONL files in it \(words\.jsonl\): name one, e\.g\. .*/words\.jsonl"
    ):
        datasets.read_rows(tmp_path, Columns())


@pytest.mark.parametrize(
    ("line", "column"), [('{"prompt": "a", "answer": "1"', 30), ('{"prompt": "a" "answer": 1}', 16), ("no json", 1)]
)
def test_a_line_that_is_no_json_is_named_with_the_column_of_the_fault(tmp_path: Path, line: str, column: int) -> None:
    for end in ("\n", "\r\n", ""):
        file = tmp_path / "bad.jsonl"
        file.write_bytes(b'{"prompt": "a", "answer": "1"}\n' + (line + end).encode())
        with pytest.raises(BadInput, match=rf"row 1 \(line 2\): not JSON: .* \(column {column}\)"):
            datasets.read_rows(file, Columns())


ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n}?", "answer": n, "id": n, "level": n, "tags": ["a"], "metadata": {"unseen": n > 0, "level": 9 * n}}
    for n in range(2)
]


def test_columns_of_no_other_use_are_in_the_metadata_and_its_own_keys_win(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for file in (write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "rows.parquet"):
        read = [json.loads(row.metadata) for row in datasets.read_rows(file, Columns())]
        assert read == [{"tags": ["a"], "unseen": n > 0, "level": 9 * n} for n in range(2)], file
    (row, _) = datasets.read_rows(tmp_path / "rows.jsonl", Columns(answer="level"))
    assert json.loads(row.metadata)["answer"] == 0


def test_what_json_cannot_say_is_left_out_of_the_metadata(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": "1", "day": datetime.date(2026, 1, 1), "raw": b"x", "nan": float("nan"), "ok": None}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert datasets.read_rows(tmp_path / "rows.parquet", Columns())[0].metadata == '{"ok": null}'


def test_a_row_with_too_much_metadata_is_refused_with_its_largest_column(tmp_path: Path) -> None:
    rows = [*some_rows(1), some_rows(1)[0] | {"page": "x" * datasets.METADATA_BYTES_MAX, "level": 1}]
    with pytest.raises(
        BadInput, match=r"row 1 \(line 2\): its metadata .* is 65\d+ bytes .* 65536; the largest is 'page'"
    ):
        datasets.read_rows(write_rows(tmp_path / "rows.jsonl", rows), Columns())
