"""The scorer: completions in, graded rows out. Any number of these processes share the work (one consumer group).

    completions -> valid? -> pool of graders -> trajectories (or evaluations), then `Scored` on status
                     no  -> dead-letters, then `Failed` on status if the row says whose it is

Rule 1: offsets are committed only when everything polled so far is written. After a crash rows come twice, with the
same id: whoever reads drops the second.
Rule 2: a row is announced (`Scored`) after it lies on the log, with its position there.
Rule 3: no verdict is no reward: `score_error` says why, `reward` and `outcome` are null.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import arrow
from schemas.codec import BadRecord, arrow_headers, check_schema
from schemas.messages import Failed, MetricPoint, Scored
from schemas.settings import Settings
from schemas.topics import score_partition, version_key
from workers.reward.graders import check_name
from workers.reward.pool import Graded, Item, Limits, Pool
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.transport.records.bus import Bus, Delivery, Record, publish
from workers.transport.records.letters import dead_letter

POLL_MS_MAX = 500
BUSY_POLL_MS = 5
RECORDS_PER_POLL_MAX = 64
ROWS_WAITING_MAX = 512
COLLECT_S_MAX = 0.05
COMMIT_PERIOD_S = 30.0
STOP_LIMIT_S = 5.0
METRICS_PERIOD_S = 10.0
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with its verdict, on its way to the log."""

    row: Row
    delivery: Delivery


def graders_of(settings: Settings) -> dict[tuple[str, str], str]:
    """(task, purpose) of a row -> its grader. BadInput if a name has no form of a grader."""
    found: dict[tuple[str, str], str] = {}
    for name, dataset in zip(settings.dataset_names(), settings.dataset, strict=True):
        try:
            check_name(dataset.grader)
        except ValueError as error:
            raise BadInput(f"dataset {name}: {error}") from error
        found[name, dataset.purpose] = dataset.grader
    return found


def serve(process: Process, bus: Bus, number: int) -> int:
    """Score until `process.stopping`. BadInput, GradersUnavailable, BusUnavailable."""
    scorer = Scorer(process, bus, number)
    try:
        while not process.stopping.is_set():
            scorer.turn()
        scorer.finish()
    finally:
        scorer.close()
    return 0


class Scorer:
    """One scorer. `waiting`: rows given to the pool, by key."""

    def __init__(self, process: Process, bus: Bus, number: int) -> None:
        settings = process.settings
        self._process = process
        self._source = f"reward-{number}"
        self._graders = graders_of(settings)
        self._timeout_s = settings.broker.timeout_s
        limits = Limits(settings.reward.timeout_s, settings.reward.memory_mib)
        names = sorted(set(self._graders.values()))
        self._pool = Pool(settings.reward.pool, limits, Path(settings.model), names, path=settings.reward.path)
        self._reader = bus.subscribe(process.topics.group("reward"), [process.topics.completions])
        self._producer = bus.producer()
        self._waiting: dict[int, Row] = {}
        self._next_key = 0
        self._uncommitted = False
        self._committed_at = self._measured_at = clock.monotonic_s()
        self._counts = {"scored": 0.0, "score_errors": 0.0, "dead_letters": 0.0}

    def turn(self) -> None:
        """Take in what came, write what is graded, commit when nothing is under way."""
        overdue = self._uncommitted and clock.monotonic_s() - self._committed_at > COMMIT_PERIOD_S
        if not overdue and len(self._waiting) < ROWS_WAITING_MAX:
            wait_ms = BUSY_POLL_MS if self._waiting else POLL_MS_MAX
            self._take(self._reader.poll(wait_ms, RECORDS_PER_POLL_MAX))
        self._write(self._pool.collect(COLLECT_S_MAX if self._waiting else 0.0))
        if not self._waiting:
            self._commit()
        self._measure()

    def finish(self) -> None:
        """Wait a moment for what is being graded. What is not done by then is redelivered to the next scorer."""
        end = clock.monotonic_s() + STOP_LIMIT_S
        while self._waiting and clock.monotonic_s() < end:
            self._write(self._pool.collect(COLLECT_S_MAX))
        if self._waiting:
            self._process.log.info("left_uncommitted", rows=len(self._waiting))
        else:
            self._commit()

    def close(self) -> None:
        self._pool.close()
        self._reader.close()
        self._producer.close()

    def _take(self, records: list[Record]) -> None:
        for record in records:
            self._uncommitted = True
            try:
                check_schema(record.headers, "trajectory")
                rows = arrow.to_rows(arrow.to_table(record.value))
            except (BadRecord, ValueError) as error:
                self._bury(record, str(error), [_key_in(record)])
                continue
            bad = [(row, reason) for row in rows if (reason := self._refusal(row)) is not None]
            if bad:
                reasons = "; ".join(f"row {rows.index(row)}: {reason}" for row, reason in bad)
                self._bury(record, reasons, [_key_of(row) for row, _ in bad])
            for row in rows:
                if all(row is not other for other, _ in bad):
                    self._submit(row)
        if records:
            self._producer.flush(self._timeout_s)

    def _refusal(self, row: Row) -> str | None:
        if row["run"] is not None and row["run"] != self._process.run:
            return f"it belongs to run {row['run']!r}"
        return self._invalid(row, scored=False)

    def _invalid(self, row: Row, *, scored: bool) -> str | None:
        mixed, vocabulary = self._process.settings.mixes_versions, self._process.vocabulary
        return arrow.invalid_reason(row, scored=scored, mixed=mixed, vocabulary=vocabulary)

    def _submit(self, row: Row) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        self._waiting[key] = row
        grader = self._graders.get((row["task"], row["purpose"]))
        if grader is None:
            error = f"the configuration has no dataset {row['task']!r} with purpose {row['purpose']!r}"
            self._write([Graded(key, None, error)])
            return
        self._pool.submit(Item(key, grader, row["prompt_ids"], row["response_ids"], row["answer"], row["metadata"]))

    def _write(self, graded: list[Graded]) -> None:
        """Rows to the log, then where they lie to status."""
        if not graded:
            return
        judged = [self._send(self._waiting.pop(one.key), one) for one in graded]
        self._producer.flush(self._timeout_s)
        for one in judged:
            publish(self._producer, self._process.topics.status, self._scored(one))
        self._producer.flush(self._timeout_s)

    def _send(self, row: Row, graded: Graded) -> Judged:
        row["scored_at"] = max(clock.now_us(), row["finished_at"])
        if graded.verdict is None:
            row["score_error"] = graded.error
            self._counts["score_errors"] += 1
            about = {name: row[name] for name in ("group", "index", "attempt", "version")}
            self._process.log.warning("not_scored", **about, reason=graded.error)
        else:
            row["reward"], row["outcome"] = graded.verdict.reward, graded.verdict.outcome
            row["reward_parts"] = dict(graded.verdict.parts)
        self._counts["scored"] += 1
        reason = self._invalid(row, scored=True)
        assert reason is None, reason
        topics = self._process.topics
        delivery = self._producer.send(
            topics.evaluations if row["purpose"] == "eval" else topics.trajectories,
            arrow.to_bytes([row]),
            arrow_headers(row["group"], row["index"], row["attempt"]),
            partition=score_partition(row["group"]),
            key=version_key(row["version"]),
        )
        return Judged(row, delivery)

    def _scored(self, judged: Judged) -> Scored:
        row = judged.row
        return Scored(
            group=row["group"],
            index=row["index"],
            attempt=row["attempt"],
            version=row["version"],
            purpose=row["purpose"],
            reward=row["reward"],
            outcome=row["outcome"],
            error=row["score_error"],
            partition=score_partition(row["group"]),
            offset=judged.delivery.offset(self._timeout_s),
            row=0,
        )

    def _bury(self, record: Record, reason: str, keys: list[tuple[int, int, int] | None]) -> None:
        """To the dead letters, and a failure for every request that it can be told from."""
        topics = self._process.topics
        self._counts["dead_letters"] += 1
        self._process.log.warning(
            "dead_letter", topic=record.topic, partition=record.partition, offset=record.offset, reason=reason
        )
        letter = dead_letter(self._process.run, record, reason)
        publish(self._producer, topics.dead_letters, letter)
        for key in keys:
            if key is not None:
                group, index, attempt = key
                failed = Failed(
                    engine=None,
                    incarnation=None,
                    group=group,
                    index=index,
                    attempt=attempt,
                    reason=f"bad row: {reason}",
                )
                publish(self._producer, topics.status, failed)

    def _commit(self) -> None:
        self._committed_at = clock.monotonic_s()
        if self._uncommitted:
            self._reader.commit()
            self._uncommitted = False

    def _measure(self) -> None:
        now = clock.monotonic_s()
        if now - self._measured_at < METRICS_PERIOD_S:
            return
        self._measured_at = now
        values = {**self._counts, "waiting": float(len(self._waiting))}
        point = MetricPoint(run=self._process.run, source=self._source, at=clock.now_us(), values=values)
        publish(self._producer, self._process.topics.metrics, point)
        self._process.figures.show(values)


def _key_of(row: Row) -> tuple[int, int, int] | None:
    key = (row["group"], row["index"], row["attempt"])
    return None if None in key else key


def _key_in(record: Record) -> tuple[int, int, int] | None:
    """Whose row it is by the record's `id` header, `trajectory/group.index.attempt`."""
    kind, _, parts = record.headers.get("id", "").partition("/")
    numbers = parts.split(".")
    if kind != "trajectory" or len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    group, index, attempt = (int(number) for number in numbers)
    return group, index, attempt
