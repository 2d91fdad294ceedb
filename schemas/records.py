"""Records that carry work: prompts, requests, partials, weights, batches, and what is said about them.

The rules of `schemas/messages.py` hold here too; it re-exports these names, and everybody imports them from there.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from schemas.ids import Position, RequestKey

Purpose = Literal["train", "eval"]
StopReason = Literal["moved", "pressure", "environment", "snapshot"]
KeyField = Annotated[RequestKey, PlainSerializer(lambda key: key._asdict(), return_type=dict[str, int])]
"""Written with the names of its parts."""


class Message(BaseModel):
    """Base of all records: frozen; an unknown field of a later writer is ignored; NaN is the JSON string "NaN"."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Stay(Message):
    """`tokens` consecutive response tokens that one engine added under one version (a struct of `engine_path`)."""

    engine: str
    version: int
    fingerprint: str
    tokens: int
    kv_reused: int = 0
    kv_recomputed: int = 0


class KvHandle(Message):
    """Where the KV cache of the first `tokens` tokens of a stopped request can be had, and of which weights it is. With
    `refused` it cannot be had, and this is why."""

    location: str
    tokens: int
    fingerprint: str
    refused: str = Field("", exclude_if=lambda reason: not reason)


class PromptRecord(Message):
    """A row of a dataset, tokenised once. Its offset in `prompts` is its `prompt_row` everywhere."""

    run: str
    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    task: str
    dataset: str
    purpose: Purpose
    epoch: int
    row: int
    max_new_tokens: int
    metadata: str = "{}"


class RequestRecord(Message):
    """One sample on its way to an engine; with `response_ids` a partial that goes on.

    `version` is its group's. `under`: in mode `partial`, the later version whose weights sample it from here on; None =
    its own.
    """

    run: str
    group: int
    index: int
    attempt: int
    version: int
    engine: int
    incarnation: int
    sequence: int
    purpose: Purpose
    task: str
    prompt_row: int
    prompt_ids: tuple[int, ...]
    answer: str
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    queued_at: int
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kept_logmass: tuple[float, ...] | None = None
    loss_mask: tuple[bool, ...] = ()
    engine_path: tuple[Stay, ...] = ()
    started_at: int | None = None
    kv: KvHandle | None = None
    metadata: str = "{}"
    under: int | None = Field(None, exclude_if=lambda version: version is None)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.group, self.index, self.attempt)

    @property
    def host_version(self) -> int:
        """The version that the engine hosts to take it."""
        return self.version if self.under is None else self.under


class Issue(Message):
    """Send the sample to the engine. `partial`: where the tokens so far lie; None = from the prompt. `under`: the later
    version whose weights sample it (mode `partial`); None = its own."""

    kind: Literal["issue"] = "issue"
    group: int
    index: int
    attempt: int
    version: int
    engine: int
    incarnation: int
    sequence: int
    purpose: Purpose
    prompt_row: int
    queued_at: int
    partial: Position | None = None
    under: int | None = Field(None, exclude_if=lambda version: version is None)

    @property
    def host_version(self) -> int:
        """The version that the engine hosts to take it."""
        return self.version if self.under is None else self.under


class PartialRecord(Message):
    """A request that stopped on one engine to go on elsewhere: everything sampled so far."""

    run: str
    group: int
    index: int
    attempt: int
    version: int
    engine: int
    incarnation: int
    reason: StopReason
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept_logmass: tuple[float, ...] | None = None
    loss_mask: tuple[bool, ...]
    engine_path: tuple[Stay, ...]
    started_at: int
    kv: KvHandle | None = None


class WeightsRecord(Message):
    """Version `version` can be had at `location`: the trainer's one word that step `version - 1` is done.

    `groups` is the batch's list, in its order ((group, version) pairs; empty for version 0).
    """

    run: str
    version: int
    step: int | None
    groups: tuple[tuple[int, int], ...]
    trajectories: int
    kind: Literal["full", "adapter"] = "full"
    base: int | None = None
    location: str
    manifest_sha256: str
    fingerprint: str
    lineage: str = ""
    created_at: int
    metrics: dict[str, float] = Field(default_factory=dict)


class Member(Message):
    """A trajectory of a batch: whose it is and where its row lies in `trajectories`."""

    group: int
    index: int
    attempt: int
    partition: int
    offset: int
    row: int


class BatchRecord(Message):
    """Step `step` trains exactly these rows, in this order."""

    kind: Literal["batch"] = "batch"
    run: str
    step: int
    exhausted: bool
    groups: tuple[tuple[int, int], ...]
    members: tuple[Member, ...]


class SampleLost(Message):
    """The mind gave a sample up, its group goes on without it (`group_policy = "partial"`)."""

    kind: Literal["sample_lost"] = "sample_lost"
    group: int
    index: int
    version: int
    reason: str


class DeadLetter(Message):
    """A record that could not be read, or a row that may not be used, with the reason and the raw bytes (base64).

    Offset -1: a row that was not even written, as JSON.
    """

    run: str
    topic: str
    partition: int
    offset: int
    reason: str
    value_base64: str


class MetricPoint(Message):
    """Figures of one moment. `source` names who measured; `step` is None for what belongs to no step."""

    run: str
    source: str
    at: int
    step: int | None = None
    values: dict[str, float]
