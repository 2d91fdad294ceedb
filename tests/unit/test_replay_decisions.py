"""`dora replay --decisions` and `--group`: the mind decides again as the journal says; the life of a group."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.replay_decisions import decide_again
from schemas import messages as m
from schemas.settings import Settings
from schemas.topics import Topics
from tests.unit.mind_driver import played, settings_of
from tests.unit.pipeline_parts import write_model
from tests.unit.test_replay import say, trained
from tests.unit.trainer_world import MODEL_CONFIG
from workers.orchestrator.state import Mind
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.taps import archive
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus


def decided(folder: Path, settings: Settings | None = None) -> None:
    """An archived run whose journal has one event in each record."""
    settings = settings or settings_of()
    folder.mkdir(exist_ok=True)
    write_resolved(settings, folder)
    bus, topics, mind = MemoryBus(), Topics(settings.name), Mind(settings)
    bus.make_topics(topics.specs())
    producer = bus.producer()
    for sequence, event in enumerate(played().events):
        record = m.JournalRecord(
            run=settings.name, sequence=sequence, inputs={}, events=(event,), effects=tuple(mind.on(event))
        )
        publish(producer, topics.journal, record)
    process = Process("archive", settings, folder)
    process.stopping.set()
    assert archive.serve(process, bus) == 0


def asked(folder: Path, *more: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["replay", str(folder), *more], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_a_journal_is_decided_again_byte_for_byte(tmp_path: Path) -> None:
    decided(tmp_path)
    said = decide_again(tmp_path)
    assert said.same
    assert said.records == said.records_all == said.events == len(played().events)
    assert said.effects["issue"] >= 8
    assert said.effects["batch"] >= 1
    code, out, _ = asked(tmp_path, "--decisions")
    assert code == 0
    assert "decided again as written, byte for byte" in out


def test_the_first_decision_that_differs_is_shown_and_ends_with_1(tmp_path: Path) -> None:
    decided(tmp_path)
    changed: list[int] = []

    def change(said: dict[str, Any]) -> None:
        for effect in said["effects"]:
            if effect["kind"] == "batch" and not changed:
                effect["exhausted"] = True
                changed.append(said["sequence"])

    say(tmp_path, "journal", change)
    code, out, _ = asked(tmp_path, "--decisions", "--json")
    assert code == 1
    said = json.loads(out)
    assert said["difference"]["record"] == changed[0]
    assert '"exhausted":true' in said["difference"]["written"]
    assert '"exhausted":false' in said["difference"]["decided"]
    assert said["records"] == changed[0]


def test_up_to_an_event_it_says_what_was_decided_on_it_and_how_things_stood(tmp_path: Path) -> None:
    decided(tmp_path)
    mind, events = Mind(settings_of()), played().events
    for place, event in enumerate(events[:40], 1):
        effects = [effect.model_dump_json() for effect in mind.on(event)]
        if place in (1, 40) or effects:
            stood = decide_again(tmp_path, until=place).stood
            assert stood is not None
            assert (stood.event, stood.decided, stood.figures) == (event.model_dump_json(), effects, mind.figures())
    code, out, _ = asked(tmp_path, "--decisions", "--until", "40")
    assert code == 0
    assert f"event 40  {events[39].model_dump_json()}" in out
    assert re.search(rf"groups_live +{mind.figures()['groups_live']:g}\n", out)
    for wrong in ("0", "-1", "12x", str(len(events) + 1)):
        code, _, said = asked(tmp_path, "--decisions", "--until", wrong)
        assert (code, f"--until {wrong}" in said) == (2, True)


def test_what_if_says_the_first_decision_that_a_setting_changes(tmp_path: Path) -> None:
    decided(tmp_path)
    code, out, _ = asked(tmp_path, "--what-if", "scheduling.live_factor=1.0")
    assert code == 0
    assert "is the first that differs" in out
    assert "with scheduling.live_factor=1.0" in out
    assert decide_again(tmp_path, ["engines.request_timeout_s=599.0"]).same


@pytest.mark.parametrize(
    ("what_if", "said"),
    [
        ("scheduling.live_facto=1.0", "live_factor"),
        ("staleness_max=many", "staleness_max"),
        ("staleness_max=1", "the run had that already"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(tmp_path: Path, what_if: str, said: str) -> None:
    decided(tmp_path)
    code, _, err = asked(tmp_path, "--what-if", what_if)
    assert code == 2
    assert said in err


def _without_the_middle(folder: Path) -> None:
    def change(said: dict[str, Any]) -> None:
        said["sequence"] += said["sequence"] > 3

    say(folder, "journal", change)


def _without_a_journal(folder: Path) -> None:
    for file in (folder / "archive" / "journal").glob("*.arrow"):
        file.unlink()


def _no_records(folder: Path) -> None:
    say(folder, "journal", lambda said: said.pop("inputs"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_without_the_middle, "record 4 is missing"),
        (_without_a_journal, "there is no journal"),
        (_no_records, "is no journal record"),
    ],
)
def test_a_journal_that_is_damaged_is_refused(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    decided(tmp_path)
    harm(tmp_path)
    with pytest.raises(BadInput, match=said):
        decide_again(tmp_path)


def test_the_life_of_a_group_is_told_with_its_text(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (write_model(model) / "config.json").write_text(MODEL_CONFIG)
    world = trained(tmp_path / "run", model=model)
    producer = world.bus.producer()
    issue = m.Issue(
        group=2,
        index=0,
        attempt=0,
        version=0,
        engine=1,
        incarnation=1,
        sequence=1,
        purpose="train",
        prompt_row=2,
        queued_at=1,
    )
    record = m.JournalRecord(run="r", sequence=0, inputs={}, events=(), effects=(issue,))
    publish(producer, world.topics.journal, record)
    process = Process("archive", world.settings, tmp_path / "run")
    process.stopping.set()
    assert archive.serve(process, world.bus) == 0
    code, out, _ = asked(tmp_path / "run", "--group", "2")
    assert code == 0
    assert "issue        index=0 attempt=0 version=0 engine=1" in out
    assert out.count("sample ") == 2
    said = json.loads(asked(tmp_path / "run", "--group", "2", "--json")[1])
    assert [one["reward"] for one in said["samples"]] == [0.0, 1.0]
    code, _, err = asked(tmp_path / "run", "--group", "77")
    assert code == 2
    assert "no group 77" in err
