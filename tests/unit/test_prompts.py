"""Datasets and the order of prompts: what is refused, and that an offset of `prompts` means one row for ever."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import datasets, prompts
from pipelines.tokens import PromptTokenizer
from schemas.codec import decode
from schemas.messages import STATUS, PromptRecord, PromptsEnded, WantPrompts
from schemas.settings import Columns, Settings
from schemas.topics import Topics
from tests.unit.pipeline_parts import some_rows, some_settings, write_model, write_rows
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

LIMIT_S = 30.0


def _read(file: Path) -> tuple[datasets.Row, ...]:
    return datasets.read_rows(file, Columns())


def test_a_file_with_question_and_answer_only_names_the_missing_column_and_the_option(tmp_path: Path) -> None:
    """H04."""
    file = write_rows(tmp_path / "q.jsonl", [{"question": "1+1?", "answer": "2"}])
    said = r"q\.jsonl: there is no column 'prompt'.*answer, question.*\[dataset\.columns\]"
    with pytest.raises(BadInput, match=said):
        _read(file)
    assert datasets.read_rows(file, Columns(prompt="question"))[0].prompt == "1+1?"


def test_one_row_without_its_column_is_named_and_not_the_mapping(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"question": "b", "answer": "2"}, {"prompt": "c", "answer": "3"}, {"x": 1}]
    with pytest.raises(BadInput) as refused:
        _read(write_rows(tmp_path / "one.jsonl", rows))
    said = str(refused.value)
    assert "2 bad row(s)" in said
    assert "row 1 (line 2): no 'prompt'; it has answer, question" in said
    assert "row 3 (line 4): no 'prompt' and no 'answer'; it has x" in said
    assert "dataset.columns" not in said


def test_a_column_that_no_row_has_is_a_mistake_of_the_mapping_whatever_else_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text('{"prompt": "a", "solution": "1"}\n{"prompt": null, "solution": "2"}\nno json\n')
    with pytest.raises(BadInput, match=r"no column 'answer' for the answer; the columns are: prompt, solution\."):
        _read(file)


def test_every_bad_row_is_named_by_its_row_and_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    lines = [
        b'{"prompt": "a", "answer": "1", "id": 7}',
        b'{"prompt": null, "answer": "1"}',
        b"",
        b'{"prompt": "b", "answer": ',
        b'{"prompt": "\xff", "answer": "1"}',
        b'{"prompt": "c", "answer": ["1"]}',
        b'{"prompt": "d", "answer": 1, "max_new_tokens": 0}',
        b'{"prompt": "e", "answer": 1, "id": 7}',
        b"[1]",
    ]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput) as refused:
        _read(file)
    said = str(refused.value)
    for part in (
        "7 bad row(s)",
        "row 1 (line 2): prompt is null",
        "row 2 (line 4): not JSON",
        "row 3 (line 5): not UTF-8",
        "row 4 (line 6): answer is",
        "row 5 (line 7): max_new_tokens is 0",
        "row 6 (line 8): id 7 is already that of row 0 (line 1)",
        "row 7 (line 9): a JSON object is needed",
    ):
        assert part in said, f"{part!r} is not in:\n{said}"


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(BadInput, match="no rows"):
        _read(empty)
    with pytest.raises(BadInput, match="no such file"):
        _read(tmp_path / "gone.jsonl")


def test_a_row_too_long_for_an_engine_is_refused_with_its_number(tmp_path: Path) -> None:
    rows = [*some_rows(2), {"prompt": "x" * 31, "answer": "1"}, {"prompt": "y", "answer": "1", "max_new_tokens": 60}]
    settings = some_settings(tmp_path, engines={"kind": "paced", "seats": 8, "tokens_per_request_max": 40})
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(BadInput, match=r"(?s)2 row\(s\) do not fit.*= 40.*row 2.*33 prompt tokens \+ 8.*row 3.*\+ 60"):
        prompts.load(settings, Path(settings.model))


def test_numbers_are_answers_and_metadata_stays_json(tmp_path: Path) -> None:
    row = {"prompt": "7 * 8?", "answer": 56, "metadata": {"unseen": True}}
    (read,) = _read(write_rows(tmp_path / "n.jsonl", [row]))
    assert (read.answer, json.loads(read.metadata)) == ("56", {"unseen": True})


def test_chat_and_plain_templates_give_the_ids_of_their_text(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(write_model(tmp_path / "model"))
    assert tokenizer._fast.decode(tokenizer.ids("hi", "chat"), skip_special_tokens=False) == "<u>hi<a>"
    assert tokenizer._fast.decode(tokenizer.ids("hi", "plain")) == "hi"


def test_a_folder_without_chat_template_says_how_to_do_without(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    assert PromptTokenizer(folder).ids("hi", "plain")
    with pytest.raises(BadInput, match='template = "plain"'):
        PromptTokenizer(folder).ids("hi", "chat")


def _two_datasets(tmp_path: Path, **changes: object) -> Settings:
    some_settings(tmp_path)  # writes the model
    write_rows(tmp_path / "many.jsonl", some_rows(9, "many"))
    write_rows(tmp_path / "held.jsonl", some_rows(4, "held"))
    dataset = [
        {"path": "rows.jsonl", "weight": 1.0},
        {"path": "many.jsonl", "weight": 3.0},
        {"path": "held.jsonl", "purpose": "eval"},
    ]
    return some_settings(tmp_path, dataset=dataset, evaluation={"samples": 2}, **changes)


def test_held_out_rows_come_first_and_training_rows_by_weight(tmp_path: Path) -> None:
    settings = _two_datasets(tmp_path)
    tables = tuple(datasets.read_tables(settings))
    places = list(islice(prompts.order(settings, tables), 4 + 400))
    assert [(place.table, place.row) for place in places[:4]] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert Counter(place.table for place in places[4:]) == {0: 100, 1: 300}


def test_every_epoch_has_every_row_once_in_another_order(tmp_path: Path) -> None:
    settings = some_settings(tmp_path)
    tables = tuple(datasets.read_tables(settings))
    places = list(islice(prompts.order(settings, tables), 21))
    epochs = [[place.row for place in places[start : start + 7]] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [place.epoch for place in places] == [0] * 7 + [1] * 7 + [2] * 7


def test_with_epochs_every_row_comes_exactly_that_often(tmp_path: Path) -> None:
    settings = _two_datasets(tmp_path, steps=0, epochs=2)
    tables = tuple(datasets.read_tables(settings))
    places = list(prompts.order(settings, tables))
    assert len(places) == prompts.rows_in_all(settings, tables) == 4 + 2 * (7 + 9)
    assert set(Counter((place.table, place.row) for place in places if place.table != 2).values()) == {2}


@contextmanager
def _serving(bus: MemoryBus, settings: Settings) -> Iterator[Process]:
    process = Process("prompts", settings, Path(settings.runs_dir))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(prompts.serve(process, bus)), daemon=True)
    thread.start()
    yield process
    process.stopping.set()
    thread.join(LIMIT_S)
    assert codes == [0]


def _records(bus: MemoryBus, topic: str, count: int) -> list[PromptRecord]:
    reader = bus.reader()
    reader.add(topic, 0, "earliest")
    found: list[PromptRecord] = []
    limit = clock.monotonic_s() + LIMIT_S
    while len(found) < count:
        assert clock.monotonic_s() < limit, f"{len(found)} of {count} prompts within {LIMIT_S} s"
        found += [decode(PromptRecord, record.value, record.headers) for record in reader.poll(200)]
    return found


def test_prompts_go_on_after_a_restart_as_if_nothing_had_happened(tmp_path: Path) -> None:
    settings = _two_datasets(tmp_path)
    topics = Topics(settings.name)
    whole, broken = MemoryBus(), MemoryBus()
    for bus in (whole, broken):
        bus.make_topics(topics.specs())
    publish(whole.producer(), topics.control, WantPrompts(rows=30))
    publish(broken.producer(), topics.control, WantPrompts(rows=11))
    with _serving(whole, settings):
        expected = _records(whole, topics.prompts, 30)
    with _serving(broken, settings):
        _records(broken, topics.prompts, 11)
    publish(broken.producer(), topics.control, WantPrompts(rows=30))
    with _serving(broken, settings):
        assert _records(broken, topics.prompts, 30) == expected
    assert expected[0].purpose == "eval"
    assert expected[0].max_new_tokens == 8
    assert {record.task for record in expected} == {"held", "rows", "many"}


def test_the_end_of_the_last_epoch_is_said_with_the_number_of_rows(tmp_path: Path) -> None:
    settings = some_settings(tmp_path, steps=0, epochs=1)
    topics = Topics(settings.name)
    bus = MemoryBus()
    bus.make_topics(topics.specs())
    publish(bus.producer(), topics.control, WantPrompts(rows=100))
    reader = bus.reader()
    reader.add(topics.status, 0, "earliest")
    with _serving(bus, settings):
        (record,) = reader.poll(int(LIMIT_S * 1000))
        assert decode(STATUS, record.value, record.headers) == PromptsEnded(rows=7)
    assert bus.end_offsets(topics.prompts) == {0: 7}


def _parquet(file: Path, rows: list[dict[str, object]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def _saved(folder: Path, parts: list[list[dict[str, object]]]) -> Path:
    """As `datasets.Dataset.save_to_disk` writes: Arrow streams, and `state.json` that says their order."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_files_folders_and_saved_datasets_give_the_rows_of_jsonl(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": f"{n}?", "answer": n, "id": n, "metadata": {"unseen": n > 2}, "max_new_tokens": 5}
        for n in range(5)
    ]
    columns = Columns(prompt="question")
    write_rows(tmp_path / "rows.jsonl", rows)
    wanted = [
        (r.prompt, r.answer, r.metadata, r.max_new_tokens) for r in datasets.read_rows(tmp_path / "rows.jsonl", columns)
    ]
    _parquet(tmp_path / "folder" / "a.parquet", rows[:3])
    _parquet(tmp_path / "folder" / "b.parquet", rows[3:])
    for path in (
        _parquet(tmp_path / "rows.parquet", rows),
        tmp_path / "folder",
        _saved(tmp_path / "saved", [rows[:1], rows[1:]]),
    ):
        read = datasets.read_rows(path, columns)
        assert [(r.prompt, r.answer, r.metadata, r.max_new_tokens) for r in read] == wanted, path
        assert [r.place for r in read] == [f"row {n}" for n in range(5)]
    assert len(datasets.read_rows(tmp_path / "folder", columns, rows_max=4)) == 4


def test_metadata_may_be_json_text_where_files_have_no_objects(tmp_path: Path) -> None:
    file = _parquet(tmp_path / "a.parquet", [{"prompt": "a", "answer": "1", "metadata": '{"unseen": true}'}])
    assert _read(file)[0].metadata == '{"unseen": true}'
    with pytest.raises(BadInput, match=r'row 0: metadata is "no object": an object is needed'):
        _read(_parquet(tmp_path / "b.parquet", [{"prompt": "a", "answer": "1", "metadata": "no object"}]))


def test_bad_rows_of_a_parquet_file_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "a", "answer": "1", "id": 1},
        {"prompt": None, "answer": "2", "id": 2},
        {"prompt": "c", "answer": None, "id": 1},
    ]
    with pytest.raises(BadInput, match=r"(?s)2 bad row\(s\).*row 1: prompt is null.*row 2: answer is null"):
        _read(_parquet(tmp_path / "a.parquet", rows))
    with pytest.raises(BadInput, match=r"row 1: id 1 is already that of row 0"):
        _read(_parquet(tmp_path / "b.parquet", [rows[0], {**rows[0], "prompt": "b"}]))
    with pytest.raises(BadInput, match=r"no column 'prompt'.*columns are: answer, question"):
        _read(_parquet(tmp_path / "c.parquet", [{"question": "a", "answer": "1"}]))


def test_folders_and_files_that_are_no_dataset_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no data files in this folder: write JSONL, Parquet"):
        _read(tmp_path / "empty")
    _parquet(tmp_path / "hub" / "data" / "train.parquet", [{"prompt": "a", "answer": "1"}])
    with pytest.raises(BadInput, match="there are Parquet files in data: name that folder"):
        _read(tmp_path / "hub")
    _saved(tmp_path / "splits" / "train", [[{"prompt": "a", "answer": "1"}]])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(BadInput, match=r"several splits \(train\)"):
        _read(tmp_path / "splits")
    (tmp_path / "splits" / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(BadInput, match=r"data-00000-of-00001\.arrow: no such file, but .*state\.json names it"):
        _read(tmp_path / "splits" / "train")
    (tmp_path / "bad.parquet").write_text('{"prompt": "a", "answer": "1"}')
    with pytest.raises(BadInput, match=r"bad\.parquet: cannot be read as Parquet"):
        _read(tmp_path / "bad.parquet")
    none = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    pq.write_table(none, tmp_path / "none.parquet")
    with pytest.raises(BadInput, match="no rows"):
        _read(tmp_path / "none.parquet")


def test_a_dataset_of_parquet_trains_beside_one_of_jsonl(tmp_path: Path) -> None:
    some_settings(tmp_path)
    _parquet(tmp_path / "more.parquet", [{"question": "7", "answer": "7"}] * 2)
    dataset = [{"path": "rows.jsonl"}, {"path": "more.parquet", "weight": 2.0, "columns": {"prompt": "question"}}]
    settings = some_settings(tmp_path, dataset=dataset)
    tables = tuple(datasets.read_tables(settings))
    assert Counter(place.table for place in islice(prompts.order(settings, tables), 30)) == {0: 10, 1: 20}
