"""The report as a page: every section, nothing from outside, whatever a model said stays text."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.report_page import charts, facts
from pipelines.tokens import PromptTokenizer
from schemas import messages as m
from tests.unit.pipeline_parts import some_settings
from tests.unit.report_run import journal, scored, text_file, write_run
from workers.taps import archive

SECTIONS = (
    "summary", "reward", "heldout", "lag", "lag-over-time", "engines", "time", "lengths", "moves", "mismatch", "ess",
    "training", "case-study", "best", "worst", "faults", "settings", "environment",
)  # fmt: skip
EVIL = '<script>alert(1)</script> & "x" http://evil.example/a.png'


ADDRESSES = ("src", "href", "srcset", "data", "action", "poster")


class Read(HTMLParser):
    """What a browser would find: section ids, tags, what it would fetch or run, the text; unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.said: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.tags.add(tag)
        if tag == "section":
            self.sections.append(of["id"] or "")
        if tag not in ("meta", "line", "rect", "circle", "polyline"):
            self.open.append(tag)
        for name, value in attrs:
            outside = name in ADDRESSES and not (value or "").startswith("#")
            if outside or name.startswith("on") or "url(" in (value or ""):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, f"{tag} closes another tag"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
        if self.sections:
            self.said[self.sections[-1]] = self.said.get(self.sections[-1], "") + data


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "r")


def _written(run: Path, tmp_path: Path) -> tuple[str, Read]:
    file = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(run), "--html", str(file)])
    assert done.exit_code == 0, done.output
    text = file.read_text()
    return text, Read(text)


def test_the_page_has_every_section_and_fetches_nothing(run_dir: Path, tmp_path: Path) -> None:
    write_resolved(some_settings(tmp_path, groups_per_batch=1, kafka={"sasl_plain_password": "hush"}), run_dir)
    text, read = _written(run_dir, tmp_path)
    assert tuple(read.sections) == SECTIONS
    assert read.open == []
    assert (read.fetched, read.tags & {"script", "img", "iframe", "link", "object"}) == ([], set())
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "hush" not in text
    said = read.said
    assert "0.500 at the first step, 1.000 at the last" in said["summary"]
    assert "version 2" in said["heldout"]
    assert "100.0 %" in said["heldout"]
    assert "lag 1" in said["lag"]
    assert "prefilled again: no_handle" in said["moves"]
    assert "engine 0: killed" in said["faults"]
    assert "groups voided: failed" in said["faults"]
    assert "reward 1.000" in said["best"]
    assert "reward 0.000" in said["worst"]
    assert "groups_per_batch = 1" in said["settings"]


def test_what_a_model_said_stays_text(run_dir: Path, tmp_path: Path) -> None:
    settings = some_settings(tmp_path, groups_per_batch=1)
    write_resolved(settings, run_dir)
    ids = PromptTokenizer(Path(settings.model)).ids(EVIL, "plain")
    row = scored(20, 0, 2.0, engine_path=None) | {
        "response_ids": ids,
        "logprobs": [-0.1] * len(ids),
        "loss_mask": [True] * len(ids),
        "engine_path": [],
        "partition": 1,
        "offset": 0,
    }
    table = pa.Table.from_pylist([row], schema=archive.schema_of("trajectories"))
    archive.write_file(run_dir / "archive" / "trajectories" / f"1.{0:020d}.arrow", table)
    letter = m.DeadLetter(run="r", topic="t", partition=0, offset=7, reason=EVIL, value_base64="")
    text_file(run_dir, "dead-letters", [letter])
    text, read = _written(run_dir, tmp_path)
    assert EVIL in read.said["best"]
    assert EVIL in read.said["faults"]
    assert "<script" not in text
    assert read.fetched == []


def test_a_run_whose_model_is_gone_shows_token_ids(run_dir: Path, tmp_path: Path) -> None:
    settings = some_settings(tmp_path, groups_per_batch=1)
    write_resolved(settings.model_copy(update={"model": str(tmp_path / "gone")}), run_dir)
    assert "token ids " in _written(run_dir, tmp_path)[1].said["best"]


def test_a_run_that_never_started_has_a_page_too(tmp_path: Path) -> None:
    run = tmp_path / "none"
    run.mkdir()
    write_resolved(some_settings(tmp_path), run)
    read = _written(run, tmp_path)[1]
    assert tuple(read.sections) == SECTIONS
    assert "Nothing of it in the archive." in read.said["reward"]


def test_engines_are_drawn_from_the_moment_they_serve_to_the_moment_they_are_lost() -> None:
    story = facts.Story()
    for record in journal():
        story.take(json.loads(record.model_dump_json()))
    assert story.ended() == [facts.Stay(engine=0, version=0, began=1.0, ended=7.0)]
    assert story.published == {0: 0.0, 1: 6.0, 2: 12.0}
    assert story.lost == [(7.0, "engine 0: killed")]


def test_a_file_that_cannot_be_written_is_bad_input(run_dir: Path, tmp_path: Path) -> None:
    write_resolved(some_settings(tmp_path, groups_per_batch=1), run_dir)
    done = CliRunner().invoke(app, ["report", str(run_dir), "--html", str(tmp_path / "no" / "report.html")])
    assert (done.exit_code, "give a file in a folder that there is" in done.output) == (2, True)


def test_a_chart_of_many_steps_stays_small_and_keeps_its_ends() -> None:
    drawn = charts.lines("reward", {"reward": {step: step / 5000 for step in range(5000)}}, "step")
    assert drawn.count("<circle") <= charts.POINTS_MAX
    assert "step 0: 0<" in drawn
    assert "step 4999: 0.9998<" in drawn


@pytest.mark.parametrize("values", [{0: 1.0}, {0: 1.0, 1: 1.0}, {3: -2.0, 9: 5.0}])
def test_a_chart_of_few_or_equal_values_has_all_its_points_inside(values: dict[int, float]) -> None:
    drawn = charts.lines("x", {"x": values}, "step")
    assert drawn.count("<circle") == len(values)
    assert "nan" not in drawn
