"""`summary.json`: what a run did, in one object. Written by `pipelines/report.py` from the archive."""

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Groups(Part):
    opened: int
    trained: int
    voided: dict[str, int]
    live: int


class Trajectories(Part):
    generated: int
    trained: int
    duplicates_ignored: int


class Lag(Part):
    histogram: dict[int, int] = Field(description="lag -> trained trajectories")
    max: int


class Versions(Part):
    published: int
    hosted_max: int = Field(description="Most versions hosted by engines at one time.")


class Migrations(Part):
    """Requests that went on at an engine after a stop, as the engines count them."""

    count: int
    kv_reused: int = Field(description="With their KV.")
    reprefilled: dict[str, int] = Field(description="Without it, by reason.")
    tokens_recomputed: int = Field(0, description="Of all of them; 1 for each with its KV.")
    bytes: int = Field(description="Of KV that was loaded.")
    seconds: float = Field(description="In which engines stopped requests and copied their KV out.")


class TimeShare(Part):
    """Shares of all engines' time (0..1), but `blocked_by_oldest` and `decide`: of the run's time."""

    decode: float
    prefill: float = Field(description="Of steps in which a request got its first token there.")
    reprefill: float = Field(0.0, description="Of `prefill`: for tokens that had been computed before.")
    idle: float
    blocked_by_oldest: float
    load_weights: float
    migrate: float
    decide: float


class RewardSummary(Part):
    """Mean reward of the first and last step; accuracy on held-out rows (all, and those tagged `unseen`)."""

    first: float | None
    last: float | None
    heldout_before: float | None
    heldout_after: float | None
    unseen_before: float | None
    unseen_after: float | None


class WeightsSummary(Part):
    fingerprint_first: str
    fingerprint_last: str


class Faults(Part):
    engine_lost: int
    restarts: int


class Summary(Part):
    run: str
    mode: str
    staleness_max: int
    group_size: int
    groups_per_batch: int
    steps: int
    seconds: float
    tokens_generated: int
    tokens_trained: int
    tokens_per_second: float
    groups: Groups
    trajectories: Trajectories
    lag: Lag
    versions: Versions
    migrations: Migrations
    time_share: TimeShare
    reward: RewardSummary
    weights: WeightsSummary
    faults: Faults
