"""Everything the processes say to each other, token rows apart (those are Arrow: `schemas/arrow.py`).

Rule 1: frozen records; no behaviour beyond a key, no I/O, no clock.
Rule 2: times are microseconds since 1970-01-01 UTC (`*_at`), durations are seconds (`*_s`).
Rule 3: adding a field with a default is free; renaming or removing one is a new schema number (`schemas/codec.py`).
Rule 4: a union is told apart by `kind`. What the orchestrator's mind hears and says are such unions too, so its
journal is a list of these records.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from schemas.ids import Position
from schemas.records import (
    BatchRecord,
    DeadLetter,
    Issue,
    KeyField,
    KvHandle,
    Member,
    Message,
    MetricPoint,
    PartialRecord,
    PromptRecord,
    Purpose,
    RequestRecord,
    SampleLost,
    Stay,
    StopReason,
    WeightsRecord,
)

__all__ = [
    "BatchRecord",
    "DeadLetter",
    "Issue",
    "KvHandle",
    "Member",
    "Message",
    "MetricPoint",
    "PartialRecord",
    "PromptRecord",
    "Purpose",
    "RequestRecord",
    "SampleLost",
    "Stay",
    "StopReason",
    "WeightsRecord",
]

VoidReason = Literal["no_signal", "failed", "surplus", "cancelled"]
EndOutcome = Literal["done", "failed", "cancelled"]


# --- control: orchestrator -> engines and prompts ---------------------------------------------


class Swap(Message):
    """Engine: read your requests up to `after_sequence`, stop what belongs to another version (each becomes a
    partial with reason `moved`), load `version`, answer `Hosting`."""

    kind: Literal["swap"] = "swap"
    engine: int
    incarnation: int
    version: int
    after_sequence: int


class Stop(Message):
    """Engine: stop these requests; with `keep` each becomes a partial, else it is dropped and its seat is free."""

    kind: Literal["stop"] = "stop"
    engine: int
    incarnation: int
    requests: tuple[KeyField, ...]
    keep: bool
    reason: StopReason = "moved"


class WantPrompts(Message):
    """Prompts: there must be rows up to this offset of `prompts` (exclusive), or `PromptsEnded`."""

    kind: Literal["want_prompts"] = "want_prompts"
    rows: int


class EndRun(Message):
    """The run is over. The orchestrator's last word."""

    kind: Literal["end_run"] = "end_run"
    outcome: EndOutcome
    reason: str


# --- status: all -> orchestrator --------------------------------------------------------------


class Joined(Message):
    """An engine is up. It hosts nothing until a `Swap`. `kv_tokens_max` is its KV capacity in tokens."""

    kind: Literal["joined"] = "joined"
    engine: int
    incarnation: int
    host: str
    seats: int
    kv_tokens_max: int
    tokens_per_request_max: int


class Hosting(Message):
    """The engine serves `version`: its own hash of what it loaded is `fingerprint`, and its probe matched."""

    kind: Literal["hosting"] = "hosting"
    engine: int
    incarnation: int
    version: int
    fingerprint: str
    load_s: float


class Moves(Message):
    """Requests taken up after a stop elsewhere, cumulative: `carried` with their KV (`size` bytes), or in `reprefills`
    by `Reason` (transport/kv); these spent `reprefill_s` on tokens that had been computed before. Tokens are of all."""

    taken: int = 0
    carried: int = 0
    tokens_carried: int = 0
    tokens_recomputed: int = 0
    size: int = 0
    reprefill_s: float = 0.0
    reprefills: dict[str, int] = Field(default_factory=dict)


class Heartbeat(Message):
    """An engine lives. `*_s` are cumulative seconds of this incarnation, `tokens` cumulative sampled tokens."""

    kind: Literal["heartbeat"] = "heartbeat"
    engine: int
    incarnation: int
    version: int | None
    running: int
    waiting: int
    kv_tokens: int
    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    idle_s: float = 0.0
    load_s: float = 0.0
    migrate_s: float = 0.0
    moves: Moves = Field(Moves(), exclude_if=lambda moves: not moves.taken)


class Started(Message):
    """The engine has taken up these requests."""

    kind: Literal["started"] = "started"
    engine: int
    incarnation: int
    requests: tuple[KeyField, ...]


class Finished(Message):
    """A request ended on its engine: its seat is free and its row is in `completions`."""

    kind: Literal["finished"] = "finished"
    engine: int
    incarnation: int
    group: int
    index: int
    attempt: int
    tokens: int
    finish_reason: Literal["stop", "length"]


class Refused(Message):
    """The engine does not host the request's version: the request was not run."""

    kind: Literal["refused"] = "refused"
    engine: int
    incarnation: int
    group: int
    index: int
    attempt: int
    reason: str


class Failed(Message):
    """A request that will not become a trajectory: it counts against `failures_max` and is issued again. `engine` is
    None when its row was bad (said by reward): the seat was freed by `Finished` already."""

    kind: Literal["failed"] = "failed"
    engine: int | None
    incarnation: int | None
    group: int
    index: int
    attempt: int
    reason: str


class Scored(Message):
    """A trajectory is scored; its row lies in `trajectories` (or `evaluations`). `error`: no verdict, no reward."""

    kind: Literal["scored"] = "scored"
    group: int
    index: int
    attempt: int
    version: int
    purpose: Purpose
    reward: float | None
    outcome: float | None
    error: str | None
    partition: int
    offset: int
    row: int


class EngineGone(Message):
    """Supervisor: this engine's process ended (any incarnation up to this one); `stopped`: with the whole run."""

    kind: Literal["engine_gone"] = "engine_gone"
    engine: int
    incarnation: int | None
    reason: str
    stopped: bool = False


class PromptsEnded(Message):
    """Prompts: the datasets are exhausted; `rows` rows lie in `prompts`."""

    kind: Literal["prompts_ended"] = "prompts_ended"
    rows: int


class CheckpointSaved(Message):
    """Trainer: a complete checkpoint needs version `version`; `kept` are all versions that checkpoints need now."""

    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    version: int
    kept: tuple[int, ...]


class StopRun(Message):
    """People: end the run now (what is live is voided `cancelled` only if `forever`)."""

    kind: Literal["stop_run"] = "stop_run"
    reason: str


# --- the mind's own words ---------------------------------------------------------------------


class Tick(Message):
    """Time passed. The first event of every poll."""

    kind: Literal["tick"] = "tick"
    now: int


class RunStarted(Message):
    """An orchestrator begins or goes on: what it was told to do then. An end said before is taken back. `steps` is
    None with `epochs`; it may have grown since the last start, so it stands in the journal."""

    kind: Literal["run_started"] = "run_started"
    steps: int | None


class PromptArrived(Message):
    """What the mind needs to know of a prompt: no tokens, only how many."""

    kind: Literal["prompt"] = "prompt"
    row: int
    purpose: Purpose
    prompt_tokens: int
    max_new_tokens: int


class PromptSkipped(Message):
    """Row `row` of `prompts` could not be read; it is a dead letter."""

    kind: Literal["prompt_skipped"] = "prompt_skipped"
    row: int


class PartialArrived(Message):
    """What the mind needs to know of a partial: where it lies and how long it is."""

    kind: Literal["partial"] = "partial"
    group: int
    index: int
    attempt: int
    version: int
    engine: int
    incarnation: int
    reason: StopReason
    tokens: int
    at: Position


class WeightsArrived(Message):
    """Version `version` was announced; it trained `groups`."""

    kind: Literal["weights"] = "weights"
    version: int
    groups: tuple[tuple[int, int], ...]
    fingerprint: str


class MakeVersion(Message):
    """Make and touch the requests topic of `version`."""

    kind: Literal["make_version"] = "make_version"
    version: int


class RetireVersion(Message):
    """No request of `version` will be issued again: its topic may go once archived."""

    kind: Literal["retire_version"] = "retire_version"
    version: int


class DeleteWeights(Message):
    """Nothing needs the files of `version` any more."""

    kind: Literal["delete_weights"] = "delete_weights"
    version: int


class VoidGroup(Message):
    """The group ended without training."""

    kind: Literal["void_group"] = "void_group"
    group: int
    version: int
    reason: VoidReason
    detail: str = ""


class EngineLost(Message):
    """The mind gave an engine up; its requests go elsewhere."""

    kind: Literal["engine_lost"] = "engine_lost"
    engine: int
    incarnation: int
    reason: str
    stopped: bool = False


Control = Annotated[Swap | Stop | WantPrompts | EndRun, Field(discriminator="kind")]
Status = Annotated[
    Joined
    | Hosting
    | Heartbeat
    | Started
    | Finished
    | Refused
    | Failed
    | Scored
    | EngineGone
    | PromptsEnded
    | CheckpointSaved
    | StopRun,
    Field(discriminator="kind"),
]
Event = Annotated[
    Tick | RunStarted | PromptArrived | PromptSkipped | PartialArrived | WeightsArrived | Status,
    Field(discriminator="kind"),
]
Effect = Annotated[
    MakeVersion
    | RetireVersion
    | DeleteWeights
    | Issue
    | VoidGroup
    | SampleLost
    | EngineLost
    | BatchRecord
    | Swap
    | Stop
    | WantPrompts
    | EndRun,
    Field(discriminator="kind"),
]

CONTROL: TypeAdapter[Control] = TypeAdapter(Control)
STATUS: TypeAdapter[Status] = TypeAdapter(Status)


class JournalRecord(Message):
    """One poll of the orchestrator: what it had read, what it took for events, what it did. In one transaction with
    the records that carry the effects out. `inputs` maps `topic/partition` to the next offset to read. Some carry
    nothing but a `snapshot` of the mind at that point: `workers/orchestrator/snapshot.py` alone can read it."""

    run: str
    sequence: int
    inputs: dict[str, int]
    events: tuple[Event, ...]
    effects: tuple[Effect, ...]
    snapshot: str | None = Field(None, exclude_if=lambda text: text is None)
