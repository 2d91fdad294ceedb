"""The only place that names a topic, its partitions and its retention.

A topic is `dora.<run>.<kind>`, for requests `dora.<run>.requests.v000012`.
"""

import re
from dataclasses import dataclass, field

VERSION_DIGITS = 6
SCORE_PARTITIONS = 4
"""Partitions of completions, trajectories and evaluations: as many scorers can share the work."""
EVALUATOR_PARTITION = 1000
"""Of `evaluations`, in the archive alone: what `dora eval --follow` sampled beside the run."""
RECORD_BYTES_MAX = 32 << 20
RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")

_ONE_PARTITION = (
    "prompts",
    "partials",
    "weights",
    "control",
    "status",
    "batches",
    "journal",
    "metrics",
    "tables",
    "dead-letters",
)
_COMPACTED = ("weights", "tables")
_SCORE = ("completions", "trajectories", "evaluations")
KINDS = (*_SCORE, *_ONE_PARTITION, "requests")
"""All kinds of topic; of `requests` there is one per version."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What the broker is asked for."""

    name: str
    partitions: int
    config: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one run."""

    run: str

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ValueError(f"run name {self.run!r}: use 1 to 80 letters, digits, '-' or '_'")

    @property
    def prefix(self) -> str:
        return f"dora.{self.run}."

    def of(self, kind: str) -> str:
        assert kind in _ONE_PARTITION or kind in _SCORE, kind
        return self.prefix + kind

    @property
    def prompts(self) -> str:
        return self.of("prompts")

    @property
    def partials(self) -> str:
        return self.of("partials")

    @property
    def weights(self) -> str:
        return self.of("weights")

    @property
    def control(self) -> str:
        return self.of("control")

    @property
    def status(self) -> str:
        return self.of("status")

    @property
    def batches(self) -> str:
        return self.of("batches")

    @property
    def journal(self) -> str:
        return self.of("journal")

    @property
    def metrics(self) -> str:
        return self.of("metrics")

    @property
    def tables(self) -> str:
        return self.of("tables")

    @property
    def dead_letters(self) -> str:
        return self.of("dead-letters")

    @property
    def completions(self) -> str:
        return self.of("completions")

    @property
    def trajectories(self) -> str:
        return self.of("trajectories")

    @property
    def evaluations(self) -> str:
        return self.of("evaluations")

    def requests(self, version: int) -> str:
        return f"{self.prefix}requests.v{version:0{VERSION_DIGITS}d}"

    @property
    def transactional_id(self) -> str:
        return self.prefix + "orchestrator"

    def group(self, consumer: str) -> str:
        """The consumer group `reward`, `archive`, ... of this run."""
        return self.prefix + consumer

    def specs(self) -> list[TopicSpec]:
        """All topics that exist from the start (requests topics are made per version)."""
        plain = {"max.message.bytes": str(RECORD_BYTES_MAX), "retention.ms": "-1"}
        compacted = {**plain, "cleanup.policy": "compact"}
        ones = [TopicSpec(self.of(kind), 1, compacted if kind in _COMPACTED else plain) for kind in _ONE_PARTITION]
        return ones + [TopicSpec(self.of(kind), SCORE_PARTITIONS, plain) for kind in _SCORE]

    def requests_spec(self, version: int, engines: int) -> TopicSpec:
        """One partition per engine number."""
        config = {"max.message.bytes": str(RECORD_BYTES_MAX), "retention.ms": "-1"}
        return TopicSpec(self.requests(version), engines, config)

    def kind(self, topic: str) -> str:
        """`requests` of `dora.<run>.requests.v000012`. ValueError if it is not this run's."""
        if not topic.startswith(self.prefix):
            raise ValueError(f"{topic} is not a topic of run {self.run}")
        return topic[len(self.prefix) :].split(".", maxsplit=1)[0]


def version_key(version: int) -> bytes:
    """The key of a record that belongs to a version."""
    return str(version).encode()


def score_partition(group: int) -> int:
    """One scorer sees a whole group."""
    return group % SCORE_PARTITIONS
