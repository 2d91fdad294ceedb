"""The window, walked in any order of openings, fills, voids, completions, choices and publications (hypothesis).

What is shown: I6 holds after every act, lag is within K (I1), and no state is a dead end (`docs/INVARIANTS.md`).
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from schemas.invariants import deadline, feasible, lag_allowed
from workers.orchestrator.window import Candidate, Choice, Rules, choose, fillable, leaves_room, openable

ACTS = st.lists(st.tuples(st.sampled_from("ooffvccbbpp"), st.integers(0, 40)), min_size=20, max_size=100)
"""(what, how many times or which): open, fill, void, complete, batch, publish."""
EVERY = st.integers(1, 4)
"""`open_every`; K is its limit."""


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    batch, k = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    oversample = k == 0 and draw(st.booleans())
    live_max = int(draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])) * batch) if k or oversample else batch
    return Rules(batch, k, live_max, draw(st.none() | st.integers(1, 9)), oversample=oversample)


@dataclass
class Walk:
    """Groups in order of opening: [version, complete]."""

    rules: Rules
    every: int = 1
    newest: int = 0
    first: int = 0
    live: list[list[int]] = field(default_factory=list)
    filled: int = 0

    @property
    def youngest(self) -> int:
        return self.newest - self.newest % max(1, min(self.every, self.rules.staleness_max))

    def counts(self) -> list[tuple[int, int]]:
        versions = [version for version, _ in self.live]
        return [(version, versions.count(version)) for version in sorted(set(versions))]

    def act(self, act: str, which: int) -> None:
        last = self.rules.steps is not None and self.first >= self.rules.steps
        if act == "o":
            for _ in range(min(which % 8 + 1, openable(self.rules, self.youngest, self.first, len(self.live)))):
                self.live.append([self.youngest, 0])
        elif act == "f" and self.youngest and fillable(self.rules, which % self.youngest, self.first, self.counts()):
            self.live.append([which % self.youngest, 0])
            self.filled += 1
        elif act == "v" and self.live:
            self.live.pop(which % len(self.live))
        elif act == "c":
            for place in range(0, len(self.live), which % 3 + 1):
                self.live[place][1] = 1
        elif act == "b" and self.newest == self.first and not last:
            self.take(self.choice())
        elif act == "p" and self.newest < self.first:
            self.newest += 1

    def choice(self) -> Choice:
        found = [Candidate(place, version, place) for place, (version, complete) in enumerate(self.live) if complete]
        return choose(self.rules, self.first, found, self.counts(), exhausted=False)

    def take(self, choice: Choice) -> None:
        if not choice.groups:
            return
        assert len(choice.groups) == self.rules.batch
        for place in choice.groups:
            assert lag_allowed(self.first, self.live[place][0], self.rules.staleness_max)
        left = [group for place, group in enumerate(self.live) if place not in choice.groups]
        self.live = [] if self.rules.oversample else left
        self.first += 1

    def feasible(self) -> bool:
        versions = [version for version, _ in self.live]
        limits = self.rules
        if limits.oversample and self.live:
            return self.newest == self.first and set(versions) == {self.first}
        return feasible(versions, self.first, limits.batch, limits.staleness_max, limits.steps)


@given(rules(), EVERY, ACTS)
def test_i6_holds_and_live_groups_stay_within_their_limit_after_every_act(
    limits: Rules, every: int, acts: list[tuple[str, int]]
) -> None:
    walk = Walk(limits, every)
    for act, which in acts:
        walk.act(act, which)
        assert walk.feasible(), f"after {act}: live {walk.counts()}, next batch {walk.first}"
        assert len(walk.live) <= limits.live_max


@given(rules(), EVERY, ACTS)
def test_no_state_is_a_dead_end(limits: Rules, every: int, acts: list[tuple[str, int]]) -> None:
    """When everything live is complete and the version is out, a batch can be chosen, or a group can be opened."""
    walk = Walk(limits, every)
    for act, which in acts:
        walk.act(act, which)
    while limits.steps is None or walk.first < limits.steps:
        for group in walk.live:
            group[1] = 1
        walk.newest = max(walk.newest, walk.first)
        before = (walk.first, len(walk.live))
        choice = walk.choice()
        if len(walk.live) >= limits.batch:
            assert leaves_room(limits, walk.first, walk.counts(), walk.counts()), "only what is not complete blocks"
        walk.take(choice)
        walk.act("o", 0)
        assert (walk.first, len(walk.live)) != before, f"stuck: live {walk.counts()}, next batch {walk.first}"
        if walk.first > 12:
            break


@given(rules(), ACTS, st.integers(0, 40))
def test_the_oldest_of_a_full_window_is_never_filled(limits: Rules, acts: list[tuple[str, int]], version: int) -> None:
    walk = Walk(limits)
    for act, which in acts:
        walk.act(act, which)
    if fillable(limits, version, walk.first, walk.counts()):
        assert version > walk.first - limits.staleness_max
        assert len(walk.live) < limits.live_max


@given(rules(), st.integers(0, 8), st.integers(0, 8))
def test_whatever_may_be_opened_may_be_trained(limits: Rules, newest: int, ahead: int) -> None:
    """The newest version's groups all have the greatest deadline; as many as may be opened fit the batches up to it."""
    first = newest + ahead % 2
    count = openable(limits, newest, first, 0)
    if count:
        assert deadline(newest, limits.staleness_max, limits.steps) >= first
        assert count <= limits.live_max
