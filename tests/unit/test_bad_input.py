"""What is wrong with a run's archive, or with what is asked of it, is said in words with exit code 2. Commands that
show what there is read the rest first; those that compare stop."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines.archived import messages
from pipelines.cli import app
from pipelines.tap import tap
from tests.unit.pipeline_parts import write_model
from tests.unit.small_run import CONFIG, write_run
from workers.runtime.errors import BadInput
from workers.taps import archive

STRICT = (["replay", "--group", "0"], ["replay", "--decisions"])
SHOWING = (
    ["report"],
    ["report", "--html", "page.html"],
    ["eval"],
    ["tap"],
    ["tap", "trajectories"],
    ["tap", "--sql", "select count(*) from trajectories"],
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "r"
    folder.mkdir()
    write_run(folder)
    model = write_model(folder.parent / "model")
    (folder / "config.toml").write_text(CONFIG.replace("a folder", str(model)))
    return folder


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(whole, tmp_path / "r")


def dora(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments])


def _refused(done: Result, *said: str) -> None:
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("dora:")]) == 1


def _first(run_dir: Path, kind: str) -> Path:
    return min((run_dir / "archive" / kind).glob("*.arrow"))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _rotten(file: Path) -> None:
    """The columns' compressed bytes."""
    raw = bytearray(file.read_bytes())
    magic = bytes.fromhex("28b52ffd")  # of zstd
    places = [at for at in range(len(raw)) if raw[at : at + 4] == magic]
    for at in places:
        raw[at] ^= 0xFF
    assert places
    file.write_bytes(raw)


def _no_arrow(file: Path) -> None:
    file.write_bytes(b"this is no Arrow file")


def _newer(file: Path) -> None:
    table = _table(file)
    archive.write_file(file, table.replace_schema_metadata({"schema": "trajectory/2"}))


def _table(file: Path) -> pa.Table:
    with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all()


@pytest.mark.parametrize("harm", [_cut, _rotten, _no_arrow])
@pytest.mark.parametrize("command", [*SHOWING, *STRICT], ids=" ".join)
def test_of_a_damaged_file_the_rest_is_shown_and_the_file_and_record_named(
    run_dir: Path, command: list[str], harm: Callable[[Path], None]
) -> None:
    file = _first(run_dir, "journal" if command[-1] == "--decisions" else "trajectories")
    before = dora(command[0], str(run_dir), *command[1:]).stdout
    harm(file)
    done = dora(command[0], str(run_dir), *command[1:])
    _refused(done, f"{file} is damaged")
    if command in SHOWING:
        assert "from record 0:0 on" in done.stderr
        assert done.stdout.splitlines()[:1] == before.splitlines()[:1] or command[0] == "tap"
        assert done.stdout
        assert not command[-1].endswith(".html") or Path("page.html").is_file()


def test_a_damaged_batch_costs_only_its_own_rows(tmp_path: Path) -> None:
    count = 2 * archive.ROWS_PER_BATCH_MAX + 10
    rows = [
        {"partition": 0, "offset": n, "timestamp": n, "key": None, "id": None, "value": json.dumps({"kind": "x" * 9})}
        for n in range(count)
    ]
    file = tmp_path / "archive" / "status" / f"0.{0:020d}.arrow"
    archive.write_file(file, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA))
    raw = bytearray(file.read_bytes())
    magic = bytes.fromhex("28b52ffd")
    places = [at for at in range(len(raw)) if raw[at : at + 4] == magic]
    raw[places[len(places) // 2]] ^= 0xFF  # a column of the second of three batches
    file.write_bytes(raw)
    damage: list[str] = []
    offsets = archive.read(tmp_path, "status", damage).column("offset").to_pylist()
    assert offsets == [*range(archive.ROWS_PER_BATCH_MAX), *range(2 * archive.ROWS_PER_BATCH_MAX, count)]
    assert f"{file} is damaged from record 0:{archive.ROWS_PER_BATCH_MAX} on" in damage[0]
    file.write_bytes(file.read_bytes()[:-200])  # its end is gone too
    damage.clear()
    offsets = archive.read(tmp_path, "status", damage).column("offset").to_pylist()
    assert offsets == [*range(archive.ROWS_PER_BATCH_MAX)]
    assert f"from record 0:{archive.ROWS_PER_BATCH_MAX} on" in damage[0]


@pytest.mark.parametrize("command", [*SHOWING, STRICT[0]], ids=" ".join)
def test_an_archive_of_a_later_schema_is_refused(run_dir: Path, command: list[str]) -> None:
    file = _first(run_dir, "trajectories")
    _newer(file)
    done = dora(command[0], str(run_dir), *command[1:])
    _refused(done, f"{file}: it is of schema trajectory/2", "reads trajectory/1")


def test_files_say_their_schema_and_columns_that_came_later_are_left_out(run_dir: Path) -> None:
    file = _first(run_dir, "trajectories")
    table = _table(file)
    assert table.schema.metadata == {b"schema": b"trajectory/1"}
    before = archive.read(run_dir, "trajectories")
    archive.write_file(file, table.append_column("later", pa.array([1] * len(table))))
    assert archive.read(run_dir, "trajectories").equals(before)
    assert dora("tap", str(run_dir), "trajectories").exit_code == 0


@pytest.mark.parametrize(
    ("kind", "field"), [("journal", "effects"), ("batches", "members"), ("metrics", "source"), ("status", "engine")]
)
def test_a_record_that_lacks_a_field_is_named_and_the_rest_is_told(run_dir: Path, kind: str, field: str) -> None:
    file = max((run_dir / "archive" / kind).glob("*.arrow"))
    rows = _table(file).to_pylist()
    place = next(n for n, row in reversed(list(enumerate(rows))) if f'"{field}"' in row["value"])
    said = json.loads(rows[place]["value"])
    del said[field]
    rows[place]["value"] = json.dumps(said)
    archive.write_file(file, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA))
    for arguments in ([], ["--html", "page.html"]):
        done = dora("report", str(run_dir), *arguments)
        _refused(done, f"archive/{kind}: record 0:{rows[place]['offset']} cannot be read", field)
        assert "run r:" in done.stdout
    if kind == "batches":
        done = dora("eval", str(run_dir))
        _refused(done, f"record batches 0:{rows[place]['offset']} cannot be read", field)
        assert "training samples by version" in done.stdout
    damage: list[str] = []
    assert len(list(messages(run_dir, kind, damage))) == len(rows) - 1


def test_an_announcement_that_cannot_be_read_costs_its_own_version(run_dir: Path) -> None:
    file = _first(run_dir, "weights")
    rows = _table(file).to_pylist()
    place = next(n for n, row in enumerate(rows) if json.loads(row["value"])["version"] == 1)
    rows[place]["value"] = rows[place]["value"].replace('"fingerprint"', '"finger"')
    archive.write_file(file, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA))
    unread = f"archive/weights: record {rows[place]['partition']}:{rows[place]['offset']} cannot be read"
    _refused(dora("export", str(run_dir), "out", "--version", "1"), unread, "fingerprint")
    _refused(dora("export", str(run_dir), "out"), unread)
    _refused(dora("export", str(run_dir), "out", "--version", "2"), "the files of version 2 are gone")


def test_what_strangers_wrote_is_no_damage(run_dir: Path) -> None:
    file = _first(run_dir, "metrics")
    rows = _table(file).to_pylist()
    rows.append(rows[-1] | {"offset": rows[-1]["offset"] + 1, "value": '["hello"]'})
    archive.write_file(file, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA))
    assert dora("report", str(run_dir)).exit_code == 0


def test_text_that_is_no_json_any_more_is_shown_as_it_is(run_dir: Path) -> None:
    file = _first(run_dir, "metrics")
    rows = [row | {"value": '{"run": "r", "sou'} for row in _table(file).to_pylist()]
    archive.write_file(file, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA))
    assert '"{\\"run\\": \\"r\\", \\"sou"' in dora("tap", str(run_dir), "metrics").stdout
    _refused(dora("report", str(run_dir)), "archive/metrics: record 0:0 cannot be read", "JSON")


def test_python_code_gets_the_rest_and_then_the_error(run_dir: Path) -> None:
    _cut(_first(run_dir, "trajectories"))
    rows: list[Any] = []
    with pytest.raises(BadInput, match="is damaged from record"):
        rows.extend(batch.num_rows for batch in tap(run_dir, "trajectories"))
    assert sum(rows) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "q"], "no run 'q'"),
        (["replay", "q", "--step", "0"], "no run 'q'"),
        (["tap", "q"], "no run 'q'"),
        (["eval", "q"], "no run 'q'"),
        (["eval", "r", "--every", "2"], "--every: only"),
        (["export", "q", "somewhere"], "no run 'q'"),
        (["status", "q"], "no run 'q'"),
        (["replay", "r", "--step", "7"], "has no trained step 7"),
        (["replay", "r", "--group", "99"], "has opened no group 99"),
        (["tap", "r", "trajectory"], "did you mean trajectories?"),
        (["tap", "r", "--sql", "select nothing from trajectories"], "--sql: "),
        (["report", "r", "--html", "nowhere/page.html"], "--html nowhere/page.html"),
        (["worker", "archive", "--run-dir", "q", "--broker", "127.0.0.1:1"], "q"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("run_dir")
def test_what_is_not_there_is_said(arguments: list[str], said: str) -> None:
    _refused(CliRunner().invoke(app, [*arguments, *([] if arguments[0] == "worker" else ["--runs-dir", "."])]), said)


def test_a_file_that_is_none_of_the_archives_is_said(run_dir: Path) -> None:
    (run_dir / "archive" / "journal" / "notes.arrow").write_bytes(b"")
    _refused(dora("report", str(run_dir)), "notes.arrow is no file of an archive")
