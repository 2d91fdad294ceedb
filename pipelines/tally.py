"""One fold of the journal: what a run did so far. The live view and the summary are both made from it.

Rule 1: pure: journal records and metric points in (as parsed JSON, in order), figures out; a view may ask at any time.
Rule 2: held-out groups are never counted among groups, lags, rewards.
Rule 3: each figure has one source: what was done is counted here, what is so now (queues, lag of what is live) is what
the orchestrator last said of itself.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from pipelines.snapshot import EngineView, Queues, Snapshot
from schemas.settings import Settings

RATE_WINDOW_US = 30_000_000
"""Tokens per second are those of this long."""
PAUSE_US_MIN = 15_000_000
"""The orchestrator ticks every half second; a gap longer than this is a run that was stopped."""
_SHARES = ("decode_s", "prefill_s", "idle_s", "load_s", "migrate_s")
_TRAINER_S = ("gather_s", "train_s", "publish_s")
_QUEUES = (
    "groups_live",
    "groups_complete",
    "groups_chosen",
    "groups_evaluating",
    "requests_running",
    "requests_waiting",
    "prompts_unread",
)

SampleKey = tuple[int, int, int]


class Tally:
    """`take` every journal record once."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self.voided: dict[int, str] = {}
        self.voided_last = ""
        self.chosen: dict[int, list[tuple[int, int]]] = {}
        self.members: dict[int, list[dict[str, int]]] = {}
        self.trained_steps: set[int] = set()
        self.exhausted = False
        self.version: int | None = None
        self.fingerprints: dict[int, str] = {}
        self.hosting: dict[int, int | None] = {}
        self.loading: dict[int, int] = {}
        self.joined: dict[int, Mapping[str, Any]] = {}
        self.hosted_max = 0
        self.heartbeats: dict[tuple[int, int], dict[str, Any]] = {}
        self.engines_lost = 0
        self.lost: dict[int, int] = {}
        self.first_at: int | None = None
        self.now = 0
        self._paused_us = 0
        self.rewards: dict[int, float] = {}
        self.first_issue_us: int | None = None
        self.first_weights_us: int | None = None
        self.last_weights_us: int | None = None
        self.last_step_us: int | None = None
        self.moves = 0
        self.figures: dict[str, float] = {}
        """The orchestrator's last word on itself."""
        self.trainer: Counter[str] = Counter()
        """Seconds of the trainer, by what it did."""
        self.trainer_tokens_per_second: float | None = None
        self.restarts = 0
        self.dead_letters = 0
        self._lag: Counter[int] = Counter()
        self._scores: dict[SampleKey, float] = {}
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
        served = {v for number, v in self.hosting.items() if v is not None and number not in self.loading}
        self.hosted_max = max(self.hosted_max, len(served))

    def take_point(self, point: Mapping[str, Any]) -> None:
        """A metric point as parsed JSON."""
        values = point["values"]
        self.restarts += int(values.get("restarts", 0))
        match point["source"]:
            case "orchestrator":
                self.figures = dict(values)
            case "trainer":
                self.trainer.update({name: values.get(name, 0.0) for name in _TRAINER_S})
                self.trainer_tokens_per_second = values.get("tokens_per_second")

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
        if self.first_weights_us is None:
            self.first_weights_us = self.working_us
        if version and version - 1 not in self.trained_steps:
            self.trained_steps.add(version - 1)
            self._lag.update(self.lag_of(version - 1))
            before = self.first_weights_us if self.last_weights_us is None else self.last_weights_us
            self.last_step_us = self.working_us - before
            self.last_weights_us = self.working_us

    def lag_of(self, step: int) -> Counter[int]:
        """Lag -> trajectories of a step."""
        versions = dict(self.chosen.get(step, []))
        return Counter(step - versions[member["group"]] for member in self.members.get(step, []))

    def _event_joined(self, event: Mapping[str, Any]) -> None:
        self.joined[event["engine"]] = event
        self.hosting[event["engine"]] = None
        self.loading.pop(event["engine"], None)

    def _event_hosting(self, event: Mapping[str, Any]) -> None:
        self.hosting[event["engine"]] = event["version"]
        self.loading.pop(event["engine"], None)

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

    # --- effects ----------------------------------------------------------------------------

    def _effect_issue(self, effect: Mapping[str, Any]) -> None:
        if self.first_issue_us is None:
            self.first_issue_us = self.working_us
        if effect["purpose"] == "train":
            self.opened.setdefault(effect["group"], effect["version"])
        if effect["partial"] is not None:
            self.moves += 1

    def _effect_swap(self, effect: Mapping[str, Any]) -> None:
        if self._incarnation(effect["engine"]) == effect["incarnation"]:
            self.loading[effect["engine"]] = effect["version"]

    def _effect_void_group(self, effect: Mapping[str, Any]) -> None:
        if effect["group"] in self.opened:
            self.voided.setdefault(effect["group"], effect["reason"])
            self.voided_last = f"{effect['reason']}: {effect['detail']}" if effect["detail"] else effect["reason"]
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
        self.engines_lost += not effect["stopped"]
        self.lost[effect["engine"]] = effect["incarnation"]
        if self._incarnation(effect["engine"]) <= effect["incarnation"]:
            for books in (self.hosting, self.loading, self.joined):
                books.pop(effect["engine"], None)

    def _incarnation(self, engine: int) -> int:
        """Of the engine as it is up now; the effects of a poll may be about one that was before."""
        return int(self.joined.get(engine, {}).get("incarnation", -1))

    def _forget(self, groups: list[int]) -> None:
        ended = set(groups)
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
        """Of the last RATE_WINDOW_US."""
        recent = [(at, tokens) for at, tokens in self._rate if at >= self.now - RATE_WINDOW_US]
        if not recent or recent[0][0] == self.now:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (self.now - recent[0][0]) * 1e6

    @property
    def tokens_per_second_overall(self) -> float:
        """Since the first request was issued."""
        return self._per_second(self._tokens, self.first_issue_us, self.working_us)

    @property
    def steps_per_minute(self) -> float:
        """Since the first version."""
        return 60 * self._per_second(len(self.trained_steps), self.first_weights_us, self.last_weights_us)

    @staticmethod
    def _per_second(count: int, start_us: int | None, end_us: int | None) -> float:
        return 0.0 if start_us is None or end_us is None or end_us <= start_us else count / (end_us - start_us) * 1e6

    def lag_histogram(self) -> dict[int, int]:
        """Lag -> trained trajectories."""
        return dict(sorted(self._lag.items()))

    def lag_now(self, kind: str) -> dict[int, int]:
        """Lag, if it were chosen next -> groups that are `live` or `complete`, as the orchestrator last said."""
        start = f"groups_{kind}/lag_"
        found = {int(name.removeprefix(start)): int(n) for name, n in self.figures.items() if name.startswith(start)}
        return dict(sorted(found.items()))

    def engine_seconds(self) -> dict[str, float]:
        """Seconds of all engines, by what they did: the last heartbeat of every incarnation, added up."""
        return {name: sum(float(beat[name]) for beat in self.heartbeats.values()) for name in _SHARES}

    def engine_moves(self) -> Counter[str]:
        """Figures of all engines' `Moves`, those by reason as `reprefills/REASON`."""
        total: Counter[str] = Counter()
        for beat in self.heartbeats.values():
            figures = dict(beat.get("moves", {}))
            total.update({f"reprefills/{reason}": count for reason, count in figures.pop("reprefills", {}).items()})
            total.update(figures)
        return total

    def engine_shares(self) -> dict[str, float]:
        """Share of all engines' time, by what they did."""
        of = self.engine_seconds()
        whole = sum(of.values())
        return {name.removesuffix("_s"): round(spent / whole, 4) for name, spent in of.items()} if whole else {}

    def engine_views(self) -> dict[int, EngineView]:
        """Every engine that is up."""
        return {number: self._engine_view(number) for number in sorted(self.hosting)}

    def _engine_view(self, number: int) -> EngineView:
        joined = self.joined.get(number, {})
        beat = self.heartbeats.get((number, self._incarnation(number)), {})
        return EngineView(
            version=self.hosting[number],
            loading=self.loading.get(number),
            seats=joined.get("seats", 0),
            kv_tokens_max=joined.get("kv_tokens_max", 0),
            running=beat.get("running", 0),
            waiting=beat.get("waiting", 0),
            kv_tokens=beat.get("kv_tokens", 0),
        )

    def _trainer_share(self, *names: str) -> float | None:
        if self.first_weights_us is None or self.working_us <= self.first_weights_us:
            return None
        spent = sum(self.trainer[name] for name in names)
        return round(min(1.0, spent / (self.working_us - self.first_weights_us) * 1e6), 4)

    def snapshot(self, settings: Settings, steps: int | None) -> Snapshot:
        """The run as it stands now."""
        figures = {name: int(self.figures.get(name, 0)) for name in _QUEUES}
        blocked_s = float(self.figures.get("blocked_by_oldest_s", 0.0))
        seconds = self.working_us / 1e6
        return Snapshot(
            run=settings.name,
            step=len(self.trained_steps),
            steps=steps,
            step_next=len(self.chosen),
            staleness_max=settings.lag_max,
            version=self.version,
            seconds=round(seconds, 1),
            reward=self.rewards[max(self.rewards)] if self.rewards else None,
            rewards=tuple(round(self.rewards[step], 4) for step in sorted(self.rewards)),
            engines=self.engine_views(),
            queues=Queues(groups_live_max=settings.live_max, **figures),
            voided=dict(Counter(self.voided.values())),
            voided_last=self.voided_last,
            lag=self.lag_histogram(),
            lag_live=self.lag_now("live"),
            lag_complete=self.lag_now("complete"),
            tokens_per_second=round(self.tokens_per_second, 1),
            tokens_per_second_overall=round(self.tokens_per_second_overall, 1),
            steps_per_minute=round(self.steps_per_minute, 2),
            last_step_s=None if self.last_step_us is None else round(self.last_step_us / 1e6, 2),
            trainer_tokens_per_second=self.trainer_tokens_per_second,
            blocked_by_oldest_s=blocked_s,
            blocked_share=round(min(1.0, blocked_s / seconds), 4) if seconds else 0.0,
            trainer_train_share=self._trainer_share("gather_s", "train_s"),
            trainer_publish_share=self._trainer_share("publish_s"),
            engine_shares=self.engine_shares(),
            moves=self.moves,
            tokens_prefilled_again=self.engine_moves()["tokens_recomputed"],
            engines_lost=self.engines_lost,
            restarts=self.restarts,
            dead_letters=self.dead_letters,
        )
