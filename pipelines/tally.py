"""One fold of the journal: what a run did so far. The live view and the summary are both made from it.

Rule 1: pure: journal records in (as parsed JSON, in order), figures out; a view may ask at any time.
Rule 2: held-out groups are never counted among groups, lags, rewards.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW_US = 30_000_000
"""Tokens per second are those of this long."""
PAUSE_US_MIN = 15_000_000
"""The orchestrator ticks every half second; a gap longer than this is a run that was stopped."""
_SHARES = ("decode_s", "prefill_s", "idle_s", "load_s", "migrate_s")

SampleKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment, as people see it."""

    run: str
    step: int = 0
    steps: int | None = None
    version: int | None = None
    reward: float | None = None
    tokens_per_second: float = 0.0
    live_groups: int = 0
    queued_groups: int = 0
    voided: int = 0
    engines: dict[int, int | None] = field(default_factory=dict)
    running: int = 0
    lag: dict[int, int] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    engines_lost: int = 0
    restarts: int = 0
    blocked_by_oldest_s: float = 0.0
    message: str = ""


class Tally:
    """`take` every journal record once."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self.voided: dict[int, str] = {}
        self.chosen: dict[int, list[tuple[int, int]]] = {}
        self.members: dict[int, list[dict[str, int]]] = {}
        self.trained_steps: set[int] = set()
        self.exhausted = False
        self.version: int | None = None
        self.fingerprints: dict[int, str] = {}
        self.hosting: dict[int, int | None] = {}
        self.hosted_max = 0
        self.heartbeats: dict[tuple[int, int], dict[str, Any]] = {}
        self.engines_lost = 0
        self.lost: dict[int, int] = {}
        self.first_at: int | None = None
        self.now = 0
        self._paused_us = 0
        self.rewards: dict[int, float] = {}
        self.first_issue_us: int | None = None
        self.last_weights_us: int | None = None
        self._scores: dict[SampleKey, float] = {}
        self._complete: Counter[int] = Counter()
        self._tokens = 0
        self._rate: deque[tuple[int, int]] = deque()

    def take(self, record: Mapping[str, Any]) -> None:
        """A journal record as parsed JSON."""
        for event in record["events"]:
            take = getattr(self, f"_event_{event['kind']}", None)
            if take is not None:
                take(event)
        for effect in record["effects"]:
            take = getattr(self, f"_effect_{effect['kind']}", None)
            if take is not None:
                take(effect)

    # --- events -----------------------------------------------------------------------------

    def _event_tick(self, event: Mapping[str, Any]) -> None:
        if self.first_at is None:
            self.first_at = event["now"]
        elif event["now"] - self.now > PAUSE_US_MIN:
            self._paused_us += event["now"] - self.now
        self.now = event["now"]

    @property
    def working_us(self) -> int:
        """Microseconds since the first tick in which the run was up: what lies between stop and resume is no work."""
        return 0 if self.first_at is None else self.now - self.first_at - self._paused_us

    def _event_weights(self, event: Mapping[str, Any]) -> None:
        version = event["version"]
        self.version = max(version, -1 if self.version is None else self.version)
        self.fingerprints.setdefault(version, event["fingerprint"])
        if version:
            self.trained_steps.add(version - 1)
            self.last_weights_us = self.working_us

    def _event_hosting(self, event: Mapping[str, Any]) -> None:
        self.hosting[event["engine"]] = event["version"]
        self.hosted_max = max(self.hosted_max, len({v for v in self.hosting.values() if v is not None}))

    def _event_joined(self, event: Mapping[str, Any]) -> None:
        self.hosting[event["engine"]] = None

    def _event_heartbeat(self, event: Mapping[str, Any]) -> None:
        key = (event["engine"], event["incarnation"])
        before = self.heartbeats.get(key)
        self.heartbeats[key] = dict(event)
        self._tokens += event["tokens"] - (before["tokens"] if before else 0)
        self._rate.append((self.now, self._tokens))
        while self._rate[0][0] < self.now - RATE_WINDOW_US:
            self._rate.popleft()

    def _event_scored(self, event: Mapping[str, Any]) -> None:
        if event["purpose"] == "train":
            key = (event["group"], event["index"], event["attempt"])
            if event["reward"] is not None and key not in self._scores:
                self._scores[key] = event["reward"]
                self._complete[event["group"]] += 1

    # --- effects ----------------------------------------------------------------------------

    def _effect_issue(self, effect: Mapping[str, Any]) -> None:
        if self.first_issue_us is None:
            self.first_issue_us = self.working_us
        if effect["purpose"] == "train":
            self.opened.setdefault(effect["group"], effect["version"])

    def _effect_void_group(self, effect: Mapping[str, Any]) -> None:
        if effect["group"] in self.opened:
            self.voided.setdefault(effect["group"], effect["reason"])
        self._forget([effect["group"]])

    def _effect_batch(self, effect: Mapping[str, Any]) -> None:
        step = effect["step"]
        self.chosen[step] = [(group, version) for group, version in effect["groups"]]
        self.members[step] = list(effect["members"])
        self.exhausted = self.exhausted or effect["exhausted"]
        scores = [
            self._scores[key]
            for member in effect["members"]
            if (key := (member["group"], member["index"], member["attempt"])) in self._scores
        ]
        if scores:
            self.rewards[step] = sum(scores) / len(scores)
        self._forget([group for group, _ in effect["groups"]])

    def _effect_engine_lost(self, effect: Mapping[str, Any]) -> None:
        self.engines_lost += 1
        self.lost[effect["engine"]] = effect["incarnation"]
        self.hosting.pop(effect["engine"], None)

    def _forget(self, groups: list[int]) -> None:
        ended = set(groups)
        self._complete = Counter({group: n for group, n in self._complete.items() if group not in ended})
        self._scores = {key: score for key, score in self._scores.items() if key[0] not in ended}

    # --- figures ----------------------------------------------------------------------------

    @property
    def trained(self) -> dict[int, int]:
        """Trained groups -> their lag."""
        return {
            group: step - version for step in sorted(self.trained_steps) for group, version in self.chosen.get(step, [])
        }

    @property
    def live(self) -> int:
        """Opened groups that are neither trained nor voided."""
        return len(self.opened) - len(self.voided.keys() - self.trained.keys()) - len(self.trained)

    @property
    def tokens_per_second(self) -> float:
        if len(self._rate) < 2 or self._rate[-1][0] == self._rate[0][0]:
            return 0.0
        (start, first), (end, last) = self._rate[0], self._rate[-1]
        return (last - first) / (end - start) * 1e6

    def lag_histogram(self) -> dict[int, int]:
        """Lag -> trained trajectories."""
        histogram: Counter[int] = Counter()
        for step in self.trained_steps:
            versions = dict(self.chosen.get(step, []))
            histogram.update(step - versions[member["group"]] for member in self.members.get(step, []))
        return dict(sorted(histogram.items()))

    def engine_seconds(self) -> dict[str, float]:
        """Seconds of all engines, by what they did: the last heartbeat of every incarnation, added up."""
        return {name: sum(float(beat[name]) for beat in self.heartbeats.values()) for name in _SHARES}

    def snapshot(self, run: str, group_size: int, steps: int | None, **more: Any) -> Snapshot:
        running = {engine: beat["running"] for (engine, _), beat in sorted(self.heartbeats.items())}
        return Snapshot(
            run=run,
            step=len(self.trained_steps),
            steps=steps,
            version=self.version,
            reward=self.rewards[max(self.rewards)] if self.rewards else None,
            tokens_per_second=round(self.tokens_per_second, 1),
            live_groups=self.live,
            queued_groups=sum(1 for count in self._complete.values() if count >= group_size),
            voided=len(self.voided),
            engines=dict(sorted(self.hosting.items())),
            running=sum(count for engine, count in running.items() if engine in self.hosting),
            lag=self.lag_histogram(),
            rewards=tuple(round(self.rewards[step], 4) for step in sorted(self.rewards)),
            engines_lost=self.engines_lost,
            **more,
        )
