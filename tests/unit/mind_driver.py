"""A mind with engines that answer when a test says so."""

from collections.abc import Iterable
from typing import Any, TypeVar

from schemas import messages as m
from schemas.ids import Position, RequestKey
from schemas.settings import Settings
from workers.orchestrator import snapshot
from workers.orchestrator.state import Mind

S = 1_000_000
E = TypeVar("E", bound=m.Message)


def settings_of(**changes: Any) -> Settings:
    """Two groups of two per step, two engines of four seats, K = 1; sections are given as dicts."""
    tree: dict[str, Any] = {
        "name": "unit",
        "model": "builtin:tiny",
        "steps": 10,
        "group_size": 2,
        "groups_per_batch": 2,
        "staleness_max": 1,
        "engines": {"count": 2, "seats": 4},
        "dataset": [{"path": "rows.jsonl"}, {"path": "held.jsonl", "purpose": "eval"}],
        **changes,
    }
    if tree.get("epochs"):
        tree["steps"] = 0
    return Settings.model_validate(tree)


class Driver:
    """Says events to a mind and keeps what it said; `out` are requests that an engine has."""

    def __init__(self, settings: Settings | None = None, rows: int = 40, engines: int | None = None) -> None:
        self.settings = settings or settings_of()
        self.mind = Mind(self.settings)
        self.events: list[m.Event] = []
        self.effects: list[m.Effect] = []
        self.out: dict[RequestKey, m.Issue] = {}
        self.now = S
        self.rows = 0
        self.scores = self.kept = 0
        self.tick(0)
        for number in range(self.settings.engines.count if engines is None else engines):
            self.join(number, 1)
        self.publish(0)
        self.host_all()
        self.prompts(rows)

    def say(self, event: m.Event) -> list[m.Effect]:
        self.events.append(event)
        said = self.mind.on(event)
        self.effects += said
        for effect in said:
            if isinstance(effect, m.Issue):
                self.out[RequestKey(effect.group, effect.index, effect.attempt)] = effect
            elif isinstance(effect, m.Stop):
                for key in effect.requests:
                    self.out.pop(key, None)
        return said

    def said(self, kind: type[E], effects: Iterable[m.Effect] | None = None) -> list[E]:
        return [effect for effect in (self.effects if effects is None else effects) if isinstance(effect, kind)]

    def tick(self, seconds: float) -> list[m.Effect]:
        self.now += int(seconds * S)
        return self.say(m.Tick(now=self.now))

    def wait(self, seconds: int) -> list[m.Effect]:
        """As many Ticks, one second apart."""
        return [effect for _ in range(seconds) for effect in self.tick(1)]

    def join(self, engine: int, incarnation: int, kv_tokens: int = 10_000) -> list[m.Effect]:
        limits = {"seats": self.settings.engines.seats, "kv_tokens_max": kv_tokens, "tokens_per_request_max": 1024}
        return self.say(m.Joined(engine=engine, incarnation=incarnation, host="here", **limits))

    def prompts(self, count: int, purpose: m.Purpose = "train", tokens: int = 20) -> None:
        for _ in range(count):
            self.say(m.PromptArrived(row=self.rows, purpose=purpose, prompt_tokens=8, max_new_tokens=tokens - 8))
            self.rows += 1

    def publish(self, version: int, groups: tuple[tuple[int, int], ...] = ()) -> list[m.Effect]:
        return self.say(m.WeightsArrived(version=version, groups=groups, fingerprint=f"f{version}"))

    def train(self) -> list[m.Effect]:
        """The trainer finishes the last batch."""
        batch = self.said(m.BatchRecord)[-1]
        return self.publish(batch.step + 1, batch.groups)

    def host(self, swap: m.Swap, partials: bool = True) -> list[m.Effect]:
        """The engine obeys: it hands back what it runs, loads, and hosts."""
        said: list[m.Effect] = []
        for key in sorted(key for key, issue in self.out.items() if issue.engine == swap.engine):
            issue = self.out.pop(key)
            if partials:
                self.kept += 1
                said += self.partial(issue, at=self.kept)
        where = {"engine": swap.engine, "incarnation": swap.incarnation, "version": swap.version}
        return said + self.say(m.Hosting(**where, fingerprint="f", load_s=1.0))

    def host_all(self) -> list[m.Effect]:
        """Every engine that was told to load has loaded."""
        loading = {e.number: e.loading for e in self.mind.fleet.engines.values()}
        swaps = {swap.engine: swap for swap in self.said(m.Swap) if loading.get(swap.engine) == swap.version}
        return [effect for swap in swaps.values() for effect in self.host(swap)]

    def about(self, issue: m.Issue) -> dict[str, int]:
        names = ("engine", "incarnation", "group", "index", "attempt")
        return {name: getattr(issue, name) for name in names}

    def finish(self, key: RequestKey) -> list[m.Effect]:
        issue = self.out.pop(key)
        return self.say(m.Finished(**self.about(issue), tokens=5, finish_reason="stop"))

    def score(
        self, key: RequestKey, outcome: float | None, version: int, purpose: m.Purpose = "train"
    ) -> list[m.Effect]:
        self.scores += 1
        names = {"group": key.group, "index": key.index, "attempt": key.attempt, "version": version}
        verdict = {"reward": outcome, "outcome": outcome, "error": None if outcome is not None else "no verdict"}
        return self.say(m.Scored(**names, purpose=purpose, **verdict, partition=0, offset=self.scores, row=0))

    def partial(self, issue: m.Issue, at: int, reason: m.StopReason = "moved") -> list[m.Effect]:
        self.out.pop(RequestKey(issue.group, issue.index, issue.attempt), None)
        place = Position("partials", 0, at)
        return self.say(m.PartialArrived(**self.about(issue), version=issue.version, reason=reason, tokens=3, at=place))

    def complete(self, group: int, outcomes: tuple[float, ...] = (0.0, 1.0)) -> list[m.Effect]:
        """All samples of the group that an engine has finish and are scored."""
        keys = sorted(key for key in self.out if key.group == group)
        said: list[m.Effect] = []
        for key, outcome in zip(keys, outcomes, strict=True):
            issue = self.out[key]
            said += self.finish(key)
            said += self.score(key, outcome, issue.version, issue.purpose)
        return said

    def restart(self) -> list[m.Effect]:
        """The orchestrator ends between two events and comes back by its snapshot."""
        image = snapshot.unpack(snapshot.pack(snapshot.take(self.mind)))
        assert image is not None
        self.mind = snapshot.restore(self.settings, image)
        return self.say(m.RunStarted(steps=self.settings.steps or None))

    def running(self) -> list[int]:
        """Groups that engines have."""
        return sorted({key.group for key in self.out})


def played() -> Driver:
    """Three groups complete, a step trained, all engines on the new version."""
    driver = Driver()
    for group in (0, 1, 2):
        driver.complete(group)
    driver.train()
    driver.host_all()
    return driver
