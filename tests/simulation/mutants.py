"""Broken minds: one small change of the source each, loaded beside the true modules and never written to disk.

A mutant that no seed notices is a hole in the checkers. `load` runs the changed sources in modules of their own.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tests.simulation.world import Code

ROOM = "workers.orchestrator."
ORDER = ("rows", "groups", "window", "partition", "placement", "hearing", "state", "snapshot", "recovery")


@dataclass(frozen=True)
class Mutant:
    """In `module`, `before` becomes `after`. With `mode` it is looked for in worlds of that mode only."""

    name: str
    module: str
    before: str
    after: str
    mode: str = ""


MUTANTS = (
    Mutant(
        "lag may be K + 1",
        "window",
        "rules.staleness_max, rules.steps)\n    size",
        "rules.staleness_max + 1, rules.steps)\n    size",
    ),
    Mutant(
        "openings are not bounded by deadlines",
        "window",
        "min(rules.live_max, (last - first + 1) * size)",
        "rules.live_max",
    ),
    Mutant(
        "openings are not bounded by live_max",
        "window",
        "min(rules.live_max, (last - first + 1) * size)",
        "(last - first + 1) * size",
    ),
    Mutant(
        "a batch is chosen although I6 breaks",
        "window",
        "return rules.oversample or fits(rules, left.items(), step + 1)",
        "return True",
    ),
    Mutant(
        "a batch is taken in order of completion",
        "window",
        "(deadline(c.version, rules.staleness_max, rules.steps), c.completed)",
        "c.completed",
    ),
    Mutant(
        "the last batch waits for B groups",
        "window",
        "return exhausted and (rules.oversample or live <= rules.batch)",
        "return False",
    ),
    Mutant(
        "a batch may be small before the end",
        "window",
        "(max(min(live, rules.batch), 1) if _is_last(rules, live, exhausted) else rules.batch)",
        "max(1, rules.batch - 1)",
    ),
    Mutant(
        "two batches are untrained at once",
        "state",
        "if self.published < self.step_next or",
        "if self.published < self.step_next - 1 or",
    ),
    Mutant(
        "plain rounding starves old versions",
        "partition",
        "more = max(0, min(left, getattr(demand, limit) - given[demand.version]))",
        "share = engines * demand.requests / sum(d.requests for d in demands)\n"
        "            more = round(share) - 1 if limit == 'keep' else 0",
    ),
    Mutant("the newest version takes all engines", "state", "[*versions, self.youngest]", "[self.youngest]"),
    Mutant(
        "the tick does not rebalance, nor a lost or a hosting engine",
        "state",
        "if self.triggered and self.published >= 0:",
        "if self.triggered and self.published >= 0 and self.step_next > self.published:",
    ),
    Mutant(
        "a loading engine is switched again",
        "placement",
        "nsmallest(over, hosts.serving.values(), key=_weight)",
        "nsmallest(over, (e for e in self.engines.values() if e.version == version), key=_weight)",
    ),
    Mutant("seats are overbooked by one", "placement", "or len(engine.booked) == engine.seats:", "or False:"),
    Mutant(
        "KV is overbooked",
        "placement",
        "return best if -full >= tokens else None",
        "return best",
    ),
    Mutant(
        "a finish frees no seat",
        "hearing",
        "        if self.fleet.release(engine, key):\n            self.changed = True\n            v",
        "        if key in engine.booked:\n            self.changed = True\n            v",
    ),
    Mutant(
        "a swap frees its seats at once",
        "placement",
        "        engine.loading, engine.loading_since = version, since\n",
        "        engine.version, engine.loading_since = version, since\n        engine.booked.clear()\n",
    ),
    Mutant(
        "an older attempt is taken for the last one",
        "groups",
        "return (found, request) if request.attempt == attempt else None",
        "return (found, request)",
    ),
    Mutant(
        "a score counts twice",
        "hearing",
        "if found is None or found[1].place in (Place.SCORED, Place.DROPPED):",
        "if found is None:",
    ),
    Mutant(
        "words of a lost engine are heard",
        "placement",
        "return engine if engine is not None and engine.incarnation == incarnation else None",
        "return engine",
    ),
    Mutant(
        "a lost engine keeps its requests", "hearing", "        for key in engine.booked:\n", "        for key in ():\n"
    ),
    Mutant("silent engines are never given up", "hearing", "if engine.heard + silence < self.patience:", "if False:"),
    Mutant(
        "a mind that was away calls all engines late",
        "hearing",
        "self.patience += min(gap, PATIENCE_STEP_MAX_US)",
        "self.patience += gap",
    ),
    Mutant("a partial is forgotten", "hearing", "        request.partial = word.at\n", ""),
    Mutant(
        "failures have no limit", "hearing", "if request.failures <= self.settings.scheduling.failures_max:", "if True:"
    ),
    Mutant(
        "a hung request is waited for",
        "hearing",
        "while self.issued and self.issued[0][0] + limit < self.patience:",
        "while False:",
    ),
    Mutant(
        "a voided group's requests run on",
        "hearing",
        "        self._drop([request for request in group.requests if",
        "        self._drop([request for request in () if",
    ),
    Mutant(
        "shaped rewards decide on signal",
        "hearing",
        "and not group.outcomes_vary:",
        "and not group.outcomes_vary and group.members[0].score.outcome in (0.0, 1.0):",
    ),
    Mutant(
        "groups without signal are trained",
        "hearing",
        "elif self.settings.scheduling.dynamic_sampling and not group.outcomes_vary:",
        "elif False:",
    ),
    Mutant(
        "versions of live groups are deleted", "state", "if v < oldest and not self._in_use(v)", "if v < self.published"
    ),
    Mutant(
        "checkpoints lose their weights",
        "window",
        "return lowest, [0] if checkpoints is None else list(checkpoints)",
        "return lowest, []",
    ),
    Mutant("what is kept for good is deleted", "state", " and not (every and version % every == 0):", ":"),
    Mutant(
        "the first evaluation waits for the end",
        "state",
        "first = self.published == 0 and self.rows.eval_complete",
        "first = self.published == 0 and self.rows.ended",
    ),
    Mutant("no evaluation of the last version", "state", "if samples and (first or over)", "if samples and first"),
    Mutant(
        "one group opens per event",
        "state",
        "        while not self.ended and (at := self._opening()) is not None:",
        "        if not self.ended and (at := self._opening()) is not None:",
    ),
    Mutant(
        "what is heard after the end is lost",
        "state",
        "        self._take(event)\n        if ended",
        "        if not ended or event.kind == 'run_started':\n            self._take(event)\n        if ended",
    ),
    Mutant(
        "engines switch in an order that memory decides",
        "placement",
        "givers = sorted(self.idle.values(), key=lambda e: e.number)",
        "givers = sorted(self.idle.values(), key=lambda e: id(e) // 16 % 7)",
    ),
    Mutant(
        "a snapshot forgets failures",
        "snapshot",
        "                failures=request.failures,\n                place=request.place.name,",
        "                failures=0,\n                place=request.place.name,",
    ),
    Mutant(
        "a snapshot forgets in which order requests wait",
        "snapshot",
        "for entry in books.queue if",
        "for entry in sorted(books.queue, key=lambda entry: (entry.group, entry.index)) if",
    ),
    Mutant(
        "a snapshot forgets what was not said after the end",
        "snapshot",
        "mind.effects = list(snapshot.effects)",
        "mind.effects = []",
    ),
    Mutant("a lost sample is a member all the same", "state", "in group.members)", "in group.requests)"),
    Mutant("a group goes on with one sample", "hearing", "len(group.members) > MEMBERS_MIN", "len(group.members) > 1"),
    Mutant(
        "a group waits for its lost sample",
        "hearing",
        "        if self.groups.lost(group, request):",
        "        self.groups.lost(group, request)\n        if False:",
    ),
    Mutant(
        "samples are lost although the policy is all",
        "hearing",
        'self.settings.scheduling.group_policy == "partial" and',
        "True and",
    ),
    Mutant(
        "an old version gives up engines that it needs",
        "state",
        "live, min(keep, held), want, held)",
        "live, 0, 1)",
    ),
    Mutant(
        "old versions keep engines that the newest needs", "partition", "left -= max(0, newest.want - floor)", "pass"
    ),
    Mutant(
        "the barrier lets engines through",
        "state",
        'if version == self.youngest and versions and self.settings.mode == "one_step":',
        "if False:",
        "one_step",
    ),
    Mutant(
        "surplus groups live on", "state", "        if self.rules.oversample:\n", "        if False:\n", "oversample"
    ),
    Mutant(
        "surplus groups run on",
        "state",
        '            self._void(group, "surplus"',
        '            self._drop = lambda requests: None\n            self._void(group, "surplus"',
        "oversample",
    ),
    Mutant("what a batch did not take is evaluation too", "state", 'if g.purpose == "train" and', "if", "oversample"),
    Mutant(
        "no more is opened than a batch holds",
        "window",
        "size = rules.live_max if rules.oversample else rules.batch",
        "size = rules.batch",
        "oversample",
    ),
    Mutant(
        "the last prompts' surplus waits for another batch",
        "window",
        "return exhausted and (rules.oversample or live <= rules.batch)",
        "return exhausted and live <= rules.batch",
        "oversample",
    ),
    Mutant("surplus ends the run", "hearing", ' and reason != "surplus"', "", "oversample"),
    Mutant(
        "requests wait for engines of their own version",
        "state",
        "        if not self.settings.mixes_versions:\n            return version\n",
        "        if version >= 0:\n            return version\n",
        "partial",
    ),
    Mutant(
        "an evaluation goes on under later versions",
        "state",
        "return min(evaluated, default=self.published)",
        "return self.published",
        "partial",
    ),
    Mutant(
        "nobody says under which version a request goes on",
        "state",
        "under=None if host == group.version else host",
        "under=None",
        "partial",
    ),
    Mutant(
        "new groups pass older ones that wait",
        "state",
        "books = self.groups.versions.values() if self.settings.mixes_versions else [self.groups.of(version)]",
        "books = [self.groups.of(version)]",
        "partial",
    ),
    Mutant("new groups pass those that wait", "state", "if any(book.waiting for book in books):", "if False:"),
    Mutant(
        "old versions are filled although nobody asked",
        "state",
        "        if self.settings.scheduling.legacy_fill:\n",
        "        if True:\n",
        "dora",
    ),
    Mutant(
        "old versions' seats stay idle",
        "state",
        "        if self.settings.scheduling.legacy_fill:\n",
        "        if False:\n",
        "dora",
    ),
    Mutant(
        "groups are opened under every version",
        "hearing",
        "self.published - self.published % self.settings.scheduling.open_every",
        "self.published",
        "dora",
    ),
    Mutant(
        "what opens groups falls behind what was evaluated",
        "hearing",
        "return max(opens, self.evaluated[-1]) if self.evaluated else opens",
        "return opens",
        "dora",
    ),
    Mutant(
        "engines are given to a version that nothing is opened under",
        "state",
        "for version in [*versions, self.youngest]]",
        "for version in [*versions, self.published]]",
        "dora",
    ),
    Mutant(
        "the oldest of a full window is filled",
        "window",
        "if version <= oldest_live(rules, first) or",
        "if version < oldest_live(rules, first) or",
        "dora",
    ),
    Mutant("old versions are filled over live_max", "window", " or total + 1 > rules.live_max:", ":", "dora"),
    Mutant(
        "old versions are filled although I6 breaks",
        "window",
        "return fits(rules, sorted(counts.items()), first)",
        "return True",
        "dora",
    ),
)


def source(module: str) -> str:
    spec = find_spec(ROOM + module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")


@contextmanager
def _aside(names: list[str]) -> Iterator[None]:
    """The true modules step aside while others of their names are built."""
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(kept)


def load(mutant: Mutant) -> Code:
    """The broken mind. AssertionError if the source has no such place, or more than one."""
    text = source(mutant.module)
    assert text.count(mutant.before) == 1, f"{mutant.name}: {text.count(mutant.before)} places in {mutant.module}.py"
    sources = {name: source(name) for name in ORDER}
    sources[mutant.module] = text.replace(mutant.before, mutant.after)
    built: dict[str, ModuleType] = {}
    with _aside([ROOM + name for name in ORDER]):
        for name in ORDER:
            module = ModuleType(ROOM + name)
            sys.modules[ROOM + name] = built[name] = module
            setattr(sys.modules["workers.orchestrator"], name, module)
            exec(compile(sources[name], f"<mutant {name}>", "exec"), module.__dict__)
    for name in ORDER:
        if ROOM + name in sys.modules:
            setattr(sys.modules["workers.orchestrator"], name, sys.modules[ROOM + name])
    return Code(built["state"], built["recovery"], built["snapshot"])
