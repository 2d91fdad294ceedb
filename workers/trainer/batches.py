"""From the list of a batch to its samples: exactly the rows that the record names, in its order.

Rule 1: rows are found by (partition, offset, row), never by order of arrival. The stream `trajectories` is read ahead
   into memory; what is no longer (or not yet) there is read from the log by position.
Rule 2: a row that may not be trained is our bug: the mind chose it. So it is an `assert`, and it comes before the
   gradient: valid columns, the member's own row, one version per group, whole groups (or what `group_policy` leaves of
   them), and the lag (I1), looked at here a second time by the same predicate as when the batch was chosen.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.arrow import invalid_reason, to_rows, to_table
from schemas.codec import check_schema
from schemas.ids import Position
from schemas.invariants import lag_allowed, trains_whole
from schemas.messages import BatchRecord, Member
from schemas.settings import Settings
from schemas.topics import SCORE_PARTITIONS, Topics
from workers.transport.records.bus import Bus, Record

BUFFER_BYTES_MAX = 256 << 20
READ_TIMEOUT_S = 60.0
AHEAD_MS_MAX = 20
ROWS_MS_MAX = 200
_POLL_RECORDS = 500

Row = dict[str, Any]


def check(record: BatchRecord, rows: Sequence[Row], settings: Settings, vocabulary: int | None = None) -> None:
    """AssertionError if step `record.step` may not train these rows (one per member, in order)."""
    staleness_max, policy = settings.lag_max, settings.scheduling.group_policy
    versions = dict(record.groups)
    assert len(versions) == len(record.groups), f"step {record.step}: a group stands in the batch twice"
    for (group, version), members in _in_order(record):
        assert lag_allowed(record.step, version, staleness_max), (
            f"step {record.step}: group {group} of version {version} has lag {record.step - version} > {staleness_max}"
        )
        indices = sorted(member.index for member in members)
        whole = trains_whole(indices, settings.group_size, policy)
        assert whole, f"step {record.step}: group {group} has samples {indices}"
    strangers = {member.group for member in record.members} - set(versions)
    assert not strangers, f"step {record.step}: members of no group of the batch: {strangers}"
    for member, row in zip(record.members, rows, strict=True):
        where = f"step {record.step}: row {member.row} at {member.partition}/{member.offset}"
        said: Row = {"group": member.group, "index": member.index, "attempt": member.attempt}
        said |= {"run": record.run, "version": versions[member.group], "purpose": "train"}
        for name, value in said.items():
            assert row[name] == value, f"{where}: {name} is {row[name]!r}, the batch says {value!r}"
        reason = invalid_reason(row, scored=True, mixed=settings.mixes_versions, vocabulary=vocabulary)
        assert reason is None, f"{where}: {reason}"
        assert row["reward"] is not None, f"{where}: not scored ({row['score_error']})"


def _in_order(record: BatchRecord) -> list[tuple[tuple[int, int], list[Member]]]:
    return [(pair, [member for member in record.members if member.group == pair[0]]) for pair in record.groups]


@dataclass(frozen=True, slots=True)
class _Held:
    version: int | None
    record: Record


class Gatherer:
    """Reads `trajectories` ahead and picks the rows of batches."""

    def __init__(
        self, bus: Bus, topics: Topics, positions: Mapping[str, int], bytes_max: int = BUFFER_BYTES_MAX
    ) -> None:
        """`positions` maps `topic/partition` to where to start; earliest where it says nothing."""
        self._bus, self._topic = bus, topics.trajectories
        self._bytes_max = bytes_max
        self._bytes = 0
        self._held: dict[Position, _Held] = {}
        self._reader = bus.reader()
        for partition in range(SCORE_PARTITIONS):
            self._reader.add(self._topic, partition, positions.get(f"{self._topic}/{partition}", "earliest"))
        self.read_by_position = 0

    def read_ahead(self, wait_ms: int = AHEAD_MS_MAX) -> bool:
        """Take in what comes within `wait_ms`; False if nothing did. What does not fit waits to be read by position."""
        if self._bytes >= self._bytes_max:
            return False
        records = self._reader.poll(wait_ms, _POLL_RECORDS)
        for record in records:
            version = int(record.key) if record.key and record.key.isdigit() else None
            self._held[record.position] = _Held(version, record)
            self._bytes += len(record.value)
        return bool(records)

    def rows(self, record: BatchRecord) -> list[Row]:
        """The members' rows, in order. BusUnavailable."""
        wanted = [Position(self._topic, member.partition, member.offset) for member in record.members]
        while self._is_ahead(wanted) and self.read_ahead(ROWS_MS_MAX):
            pass  # what the stream is about to bring need not be looked for one by one
        missing = [position for position in dict.fromkeys(wanted) if position not in self._held]
        read = self._bus.read(missing, READ_TIMEOUT_S) if missing else {}
        self.read_by_position += len(missing)
        tables: dict[Position, list[Row]] = {}
        for position in dict.fromkeys(wanted):
            found = read[position] if position in read else self._held[position].record
            check_schema(found.headers, "trajectory")
            tables[position] = to_rows(to_table(found.value))
        return [tables[position][member.row] for position, member in zip(wanted, record.members, strict=True)]

    def _is_ahead(self, wanted: Sequence[Position]) -> bool:
        starts = {number: self._reader.position(self._topic, number) for number in range(SCORE_PARTITIONS)}
        return any(position.offset >= starts[position.partition] for position in wanted)

    def prune(self, record: BatchRecord, oldest_version: int) -> None:
        """Forget what the batch has used, and whatever is older than every version that may still be trained."""
        used = {Position(self._topic, member.partition, member.offset) for member in record.members}
        for position in [
            position
            for position, held in self._held.items()
            if position in used or (held.version is not None and held.version < oldest_version)
        ]:
            self._bytes -= len(self._held.pop(position).record.value)

    def positions(self) -> dict[str, int]:
        """Where a reader that resumes here may start: nothing held is before it."""
        starts = {f"{self._topic}/{p}": self._reader.position(self._topic, p) for p in range(SCORE_PARTITIONS)}
        for position in self._held:
            name = f"{position.topic}/{position.partition}"
            starts[name] = min(starts[name], position.offset)
        return starts

    def close(self) -> None:
        self._reader.close()


def figures(record: BatchRecord, rows: Sequence[Row], published: Mapping[int, int], *, now_us: int) -> dict[str, float]:
    """Figures of a batch: lag (with counts of trajectories per lag), age, reward, outcome and length means.

    lag = in flight (versions published until the row was scored) + in queue. `published`: when each version was
    announced, microseconds since 1970; now_us likewise.
    """
    lags = [record.step - row["version"] for row in rows]
    at = [published[version] for version in sorted(published)]
    flights = [
        min(lag, max(0, bisect_right(at, row["scored_at"]) - 1 - row["version"]))
        for lag, row in zip(lags, rows, strict=True)
    ]
    queues = [lag - flight for lag, flight in zip(lags, flights, strict=True)]
    count = len(rows)
    said = {
        "trajectories": float(count),
        "groups": float(len(record.groups)),
        "lag_mean": sum(lags) / count,
        "lag_max": float(max(lags)),
        "lag_in_flight_mean": sum(flights) / count,
        "lag_in_queue_mean": sum(queues) / count,
        "queue_s_mean": sum(now_us - row["scored_at"] for row in rows) / count / 1e6,
        "flight_s_mean": sum(row["finished_at"] - row["queued_at"] for row in rows) / count / 1e6,
        "reward_mean": sum(row["reward"] for row in rows) / count,
        "outcome_mean": sum(row["outcome"] for row in rows) / count,
        "response_tokens_mean": sum(len(row["response_ids"]) for row in rows) / count,
        "prompt_tokens_mean": sum(len(row["prompt_ids"]) for row in rows) / count,
        "truncated_share": sum(row["finish_reason"] == "length" for row in rows) / count,
    }
    for name, values in (("lag", lags), ("lag_in_flight", flights), ("lag_in_queue", queues)):
        said |= {f"{name}_{lag}_trajectories": float(number) for lag, number in sorted(Counter(values).items())}
    return said
