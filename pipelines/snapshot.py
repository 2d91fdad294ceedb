"""A run at one moment, as people see it: what `status.json` holds and every view is made from.

Rule 1: plain data and light imports: `dora status` must answer at once.
Rule 2: `read` takes what an older or newer `dora` wrote: a missing field has its default, an unknown one is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: the version it hosts, the one it loads, and how full it is."""

    version: int | None = None
    loading: int | None = None
    seats: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_tokens_max: int = 0

    @property
    def label(self) -> str:
        """`v12`, while it loads `v11>v12`, `-` before its first version."""
        hosts = "-" if self.version is None else f"v{self.version}"
        return hosts if self.loading is None else f"{hosts}>v{self.loading}"


@dataclass(frozen=True, slots=True)
class Queues:
    """What waits where, as the orchestrator last said. A live group is open or complete; a chosen one is trained."""

    groups_live: int = 0
    groups_live_max: int = 0
    groups_complete: int = 0
    groups_chosen: int = 0
    groups_evaluating: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    prompts_unread: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`version` is the newest published one, `step_next` the next batch to be chosen, `staleness_max` is K.

    Lags are `lag -> trained trajectories`, and of what is live and complete now `lag if it were chosen next -> groups`.
    `*_share` are shares of the time since the first version (trainer) or of the run's `seconds`, `engine_shares` of all
    engines' time.
    """

    run: str
    step: int = 0
    steps: int | None = None
    step_next: int = 0
    staleness_max: int = 0
    version: int | None = None
    seconds: float = 0.0
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    engines: dict[int, EngineView] = field(default_factory=dict)
    queues: Queues = Queues()
    voided: dict[str, int] = field(default_factory=dict)
    voided_last: str = ""
    lag: dict[int, int] = field(default_factory=dict)
    lag_live: dict[int, int] = field(default_factory=dict)
    lag_complete: dict[int, int] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    tokens_per_second_overall: float = 0.0
    steps_per_minute: float = 0.0
    last_step_s: float | None = None
    trainer_tokens_per_second: float | None = None
    blocked_by_oldest_s: float = 0.0
    blocked_share: float = 0.0
    trainer_train_share: float | None = None
    trainer_publish_share: float | None = None
    engine_shares: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    tokens_prefilled_again: int = 0
    engines_lost: int = 0
    restarts: int = 0
    dead_letters: int = 0

    @property
    def window_from(self) -> int:
        """The oldest version that may still train."""
        return max(0, self.step_next - self.staleness_max)

    @property
    def trainer_wait_share(self) -> float | None:
        """What is neither training nor publishing: waiting for a batch, saving checkpoints."""
        if self.trainer_train_share is None or self.trainer_publish_share is None:
            return None
        return round(max(0.0, 1.0 - self.trainer_train_share - self.trainer_publish_share), 4)

    def at_rest(self) -> "Snapshot":
        """Of a run that is over: no engine hosts, nothing runs."""
        queues = replace(self.queues, requests_running=0, requests_waiting=0)
        return replace(self, engines={}, queues=queues, tokens_per_second=0.0)


def read(said: Mapping[str, Any]) -> Snapshot:
    """A snapshot that was JSON: keys of tables are numbers again."""
    known = _known(Snapshot, said)
    for name in ("lag", "lag_live", "lag_complete"):
        known[name] = {int(lag): count for lag, count in known.get(name, {}).items()}
    engines = known.get("engines", {})
    known["engines"] = {int(number): EngineView(**_known(EngineView, view)) for number, view in engines.items()}
    known["queues"] = Queues(**_known(Queues, known.get("queues", {})))
    known["rewards"] = tuple(known.get("rewards", ()))
    return Snapshot(**known)


def _known(kind: type[Any], said: Mapping[str, Any]) -> dict[str, Any]:
    return {part.name: said[part.name] for part in fields(kind) if part.name in said}
