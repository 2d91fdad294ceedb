"""`dora tap` as people use it: lines, queries, files, and what is said when it is asked for something wrong."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.tap import tap
from schemas.topics import KINDS
from tests.unit.pipeline_parts import write_model
from tests.unit.reward_rows import a_row, complete
from tests.unit.small_run import CONFIG, write_run
from tests.unit.test_tap import _archive, _begun, _keys
from workers.taps import archive


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tap") / "r"
    folder.mkdir()
    write_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """`--follow` puts its own in place, for a process that ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def dora(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tap", *(str(argument) for argument in arguments)])


def test_a_tap_cut_after_any_row_goes_on_from_the_printed_position(run_dir: Path) -> None:
    whole = _keys(list(tap(run_dir, "trajectories")))
    lines = dora(run_dir, "trajectories", "--follow", "--json").stdout.splitlines()
    assert len(lines) == len(whole) == 12
    for count, line in enumerate(lines, 1):
        rest = _keys(list(tap(run_dir, "trajectories", since=json.loads(line)["position"])))
        assert whole[:count] + rest == whole


def test_a_query_takes_topics_for_tables(run_dir: Path) -> None:
    done = dora(run_dir, "--sql", "select version, count(*) as n from trajectories group by 1 order by 1", "--json")
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"version": 0, "n": 6},
        {"version": 1, "n": 4},
        {"version": 2, "n": 2},
    ]
    joined = "select t.version, w.fingerprint from trajectories t join weights w using (version) where t.index = 1"
    assert len(dora(run_dir, "--sql", joined).stdout.splitlines()) == 1 + 6
    assert dora(run_dir, "--sql", "select count(*) as n from dead_letters", "--json").stdout == '{"n": 0}\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trajectories", "--sql", "selec 1"], 'dora: --sql: Parser Error: syntax error at or near "selec"'),
        (["--sql", "select rewrd from trajectories"], "dora: --sql: Binder Error: Referenced column"),
        (["--sql", "select 1"], "dora: --sql: the query names no topic"),
        (["--sql", "copy trajectories to 'stolen.csv'"], "dora: --sql: "),
        (["trajectories", "--where", "group = 3"], 'words of SQL need quotes as columns: "group"'),
        (["trajectories", "--where", "rewrd > 1"], "dora: --where: Binder Error"),
        (["trajectories", "--where", "cast(answer || 'x' as int) = 1"], "dora: --where: Conversion Error"),
        (["trajectory"], "dora: topic 'trajectory' is not known: did you mean trajectories?"),
        (["metrics", "--decode"], "dora: --decode: rows of metrics hold no token ids"),
        (["trajectories", "--since", "soon"], "dora: --since soon: write a duration"),
        (["trajectories", "--arrow", "nowhere/at/all.arrow"], "there is no folder"),
        (["--follow"], "dora: which topic?"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_exit_code_2(run_dir: Path, arguments: list[str], said: str) -> None:
    done = dora(run_dir, *arguments)
    assert (done.exit_code, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("dora:")]) == 1
    assert not Path("stolen.csv").exists()


def test_without_a_topic_all_are_listed_with_their_rows(run_dir: Path) -> None:
    listed = {row["topic"]: row for row in map(json.loads, dora(run_dir, "--json").stdout.splitlines())}
    assert set(listed) == set(KINDS)
    assert (listed["trajectories"]["rows"], listed["evaluations"]["rows"], listed["weights"]["rows"]) == (12, 2, 4)
    assert all(row["what"] for row in listed.values())


def test_decode_adds_what_the_ids_say(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    bus = _begun(folder)
    model = write_model(tmp_path / "model")
    (folder / "config.toml").write_text(CONFIG.replace("a folder", str(model)))
    tokenizer = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    complete(bus, [a_row(0, 0, response_ids=[tokenizer["h"], tokenizer["i"]])])
    _archive(folder, bus)
    (batch,) = tap(folder, "completions", decode=True, where="response_text = 'hi'")
    assert batch.column("response_text").to_pylist() == ["hi"]
    assert "response: hi" not in dora(folder, "completions").stdout
    assert "response_text: hi" in dora(folder, "completions", "--decode").stdout


def test_an_arrow_file_holds_the_rows_in_batches(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    assert dora(run_dir, "trajectories", "--arrow", file).exit_code == 0
    with pa.ipc.open_file(file) as reader:
        assert reader.num_record_batches > 1
        assert reader.read_all().equals(archive.read(run_dir, "trajectories"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]


def test_a_state_file_keeps_the_position_and_is_of_one_tap(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    whole = dora(run_dir, "trajectories", "--json").stdout.splitlines()
    said: list[str] = []
    for _ in range(5):
        said += dora(run_dir, "trajectories", "--json", "--limit", "3", "--state", file).stdout.splitlines()
    assert said == whole
    other = dora(run_dir, "metrics", "--state", file)
    assert (other.exit_code, "it is of topic trajectories" in other.stderr) == (2, True)
    file.write_text("{}")
    assert dora(run_dir, "trajectories", "--state", file).exit_code == 2
