"""The mind as plain data and back: nothing is forgotten, and what it says afterwards is the same (I9)."""

import base64
import dataclasses
import zlib
from collections import deque
from enum import Enum
from typing import Any

import pytest

from schemas import messages as m
from tests.simulation.world import World
from tests.unit.mind_driver import Driver, played
from workers.orchestrator import snapshot as s
from workers.orchestrator.groups import Group, Groups, Place, Request, VersionBooks
from workers.orchestrator.placement import Engine, Fleet, Hosts
from workers.orchestrator.recovery import JournalDiffers, newest, recover, replay
from workers.orchestrator.rows import Rows
from workers.orchestrator.state import Mind

EVERY = 7
SEEDS = (1, 3, 4, 9, 11, 13, 16, 23)


def copy(mind: Mind) -> Mind:
    """Through the journal's text."""
    image = s.unpack(s.pack(s.take(mind)))
    assert image is not None
    return s.restore(mind.settings, image)


def attributes(thing: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(thing):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    return dict(vars(thing))


def tree(thing: object) -> Any:
    """All attributes of a mind, deep, dicts with their order. What has no effect any more is left out."""
    if isinstance(thing, dict):
        return [(key, tree(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [tree(value) for value in thing]
    if isinstance(thing, Enum) or not type(thing).__module__.startswith("workers.orchestrator"):
        return thing
    held = attributes(thing)
    match thing:
        case Mind():
            del held["settings"], held["late_from"]
            true = [e for e in thing.issued if thing.groups.find(e[1].group, e[1].index, e[2]) and e[0] == e[1].since]
            held["issued"] = true
        case VersionBooks():
            held["queue"] = [entry for entry in thing.queue if entry.place not in (Place.SCORED, Place.DROPPED)]
        case Groups():
            held["complete"] = sorted(thing.complete.items())
        case Fleet():
            held["hosts"] = sorted((v, tree(hosts), thing.pick(v, 0, ())) for v, hosts in thing.hosts.items())
            held["hosts"] = [one for one in held["hosts"] if thing.in_use(one[0])]
            held["idle"], held["limits"] = sorted(thing.idle), sorted(thing.limits.items())
        case Hosts():
            del held["heap"]
            held["serving"], held["roomy"] = sorted(thing.serving), sorted(thing.roomy)
    return {name: tree(value) for name, value in held.items()}


class Looking(World):
    """Every few events the mind is compared with one made of its snapshot, attribute by attribute."""

    looked = 0

    def think(self, event: m.Event) -> list[m.Effect]:
        said = super().think(event)
        self.looked += 1
        if self.looked % EVERY == 0:
            assert tree(copy(self.mind)) == tree(self.mind)
        return said


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restored_mind_has_every_attribute_of_the_one_it_was_taken_from(seed: int) -> None:
    print(f"seed {seed}")
    world = Looking(seed)
    world.run()
    assert world.looked > EVERY


KNOWN: tuple[tuple[type[Any], type[s._Part], set[str], set[str]], ...] = (
    (Mind, s.Snapshot, {"settings", "rules", "late_from"}, {"form", "steps"}),
    (Groups, s.GroupsPart, {"table", "complete", "live", "evaluating"}, {"groups"}),
    (VersionBooks, s.VersionPart, {"live", "complete", "evaluating", "unsampled", "waiting", "tokens"}, {"version"}),
    (Group, s.GroupPart, {"unscored"}, {"tokens_max"}),
    (Request, s.RequestPart, {"group", "index", "version", "tokens_max"}, set()),
    (Fleet, s.FleetPart, {"hosts", "idle", "limits", "seats", "booked"}, set()),
    (Engine, s.EnginePart, {"tokens"}, set()),
    (Rows, s.RowsPart, {"ahead"}, set()),
)
"""Class, its part of a snapshot, attributes that are given or counted again, fields of the part that are none."""


@pytest.mark.parametrize(("kind", "part", "counted", "added"), KNOWN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_new_attribute_is_stored_or_said_to_be_counted_again(
    kind: type[Any], part: type[s._Part], counted: set[str], added: set[str]
) -> None:
    mind = Driver().mind
    made: dict[type[Any], object] = {Mind: mind, Groups: mind.groups, Fleet: mind.fleet, Rows: mind.rows}
    names = {field.name for field in dataclasses.fields(kind)} if kind not in made else set(vars(made[kind]))
    assert names - counted == set(part.model_fields) - added
    assert counted <= names


def test_partials_that_are_awaited_are_not_forgotten() -> None:
    driver = Driver()
    for group in (0, 1):
        driver.complete(group)
    (swap,) = driver.said(m.Swap, driver.train())
    driver.host(swap, partials=False)
    assert driver.mind.strays
    other = copy(driver.mind)
    driver.now += 3_000_000
    said = driver.mind.on(m.Tick(now=driver.now))
    assert driver.said(m.Issue, said)
    assert other.on(m.Tick(now=driver.now)) == said


def test_words_heard_after_the_end_are_said_when_the_run_goes_on() -> None:
    driver = Driver()
    for group in (0, 1):
        driver.complete(group)
    driver.say(m.StopRun(reason="enough"))
    driver.train()
    other = copy(driver.mind)
    said = driver.mind.on(m.RunStarted(steps=10))
    assert driver.said(m.MakeVersion, said)
    assert other.on(m.RunStarted(steps=10)) == said


def test_seconds_are_restored_to_the_last_bit() -> None:
    mind = Driver().mind
    for value in (0.1 + 0.2, 1e-7, 123456789.123456789, 2.0**53 + 2):
        mind.blocked_by_oldest_s = value
        assert copy(mind).blocked_by_oldest_s == value


def test_a_snapshot_of_another_form_or_none_at_all_is_not_read() -> None:
    text = s.take(Driver().mind).model_dump_json()

    def packed(words: str) -> str:
        return base64.b64encode(zlib.compress(words.encode())).decode()

    assert s.unpack(packed(text)) is not None
    assert text.startswith('{"form":1,')
    for other in (text.replace('"form":1', '"form":2', 1), text.replace('{"form"', '{"new":0,"form"', 1), "{}", ""):
        assert s.unpack(packed(other)) is None
    for broken in ("", "not base64!", base64.b64encode(b"not zlib").decode()):
        assert s.unpack(broken) is None


def journal(driver: Driver, every: int) -> list[m.JournalRecord]:
    """One record per event, a snapshot behind each `every`th."""
    mind = Mind(driver.settings)
    records: list[m.JournalRecord] = []

    def write(events: tuple[m.Event, ...], effects: list[m.Effect], text: str | None = None) -> None:
        names: dict[str, Any] = {"run": "unit", "sequence": len(records), "inputs": {}, "snapshot": text}
        records.append(m.JournalRecord(events=events, effects=tuple(effects), **names))

    for number, event in enumerate(driver.events, 1):
        write((event,), mind.on(event))
        if number % every == 0:
            write((), [], s.pack(s.take(mind)))
    return records


def test_the_newest_snapshot_and_what_follows_make_the_mind_of_the_whole_journal() -> None:
    driver = played()
    records = journal(driver, every=10)
    place, image = newest(records)
    assert image is not None
    assert records[place - 1].snapshot is not None
    assert all(record.snapshot is None for record in records[place:])
    mind, events = recover(driver.settings, records[place - 1 :])
    assert events == len(records) - place == len(driver.events) % 10
    assert tree(mind) == tree(replay(driver.settings, records)) == tree(driver.mind)


def test_a_snapshot_that_cannot_be_read_is_passed_over_for_an_older_one_or_the_beginning() -> None:
    driver = played()
    records = journal(driver, every=10)
    place, _ = newest(records)
    spoilt = [*records]
    spoilt[place - 1] = records[place - 1].model_copy(update={"snapshot": "spoilt"})
    assert 0 < newest(spoilt)[0] < place
    assert tree(recover(driver.settings, spoilt)[0]) == tree(driver.mind)
    none = [record.model_copy(update={"snapshot": record.snapshot and "spoilt"}) for record in records]
    mind, events = recover(driver.settings, none)
    assert tree(mind) == tree(driver.mind)
    assert events == len(driver.events)
    with pytest.raises(AssertionError, match="beginning is missing"):
        recover(driver.settings, none[1:])


def test_what_follows_a_snapshot_must_be_decided_again_as_it_was_written() -> None:
    driver = played()
    mind = Mind(driver.settings)
    last = max(place for place, event in enumerate(driver.events) if mind.on(event))
    records = journal(driver, every=last)
    place = newest(records)[0]
    assert records[place].effects
    records[place] = records[place].model_copy(update={"effects": ()})
    with pytest.raises(JournalDiffers):
        recover(driver.settings, records)
