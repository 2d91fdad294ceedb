"""The held-out set on every k-th version of a run, on an engine of its own: the run neither waits nor notices.

    weights (as they are announced) -> pinned -> engine -> graders -> one archive file of `evaluations` per version

Rule 1: a version is pinned as soon as it is heard of: its files are linked (or copied) to `pinned/` of the run's
folder: what the run deletes meanwhile is there until it was sampled. The orchestrator decides of its own files alone.
Rule 2: a version's rows are one file, written whole: killed at any moment and started again, no row is lost or comes
twice. Seeds depend on row and sample only: every version draws with the same ones.
Rule 3: rows are as those of the run's own evaluations, but for their group: -1, -2, ... for the held-out rows in order.
"""

import os
import queue
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines import archived, prompts, tap_source
from pipelines.config_file import read_resolved
from pipelines.engines import engine_of
from pipelines.processes import set_environment
from pipelines.tap_positions import Positions, Since
from pipelines.tap_source import OpenBus, Source
from schemas import arrow
from schemas.ids import RequestKey, sampling_seed
from schemas.messages import RequestRecord, WeightsRecord
from schemas.settings import Settings
from schemas.topics import EVALUATOR_PARTITION
from workers.reward.pool import Graded, Item, Limits, Pool
from workers.reward.service import graders_of
from workers.rollout.engines.base import Engine
from workers.rollout.partials import Place, Running, begin, to_row
from workers.runtime import clock
from workers.runtime.errors import BadInput, WeightsUnavailable
from workers.runtime.log import Log
from workers.taps import archive
from workers.transport.weights.store import Store

PINNED = "pinned"
ENGINE = 1_000_000
"""Number of the evaluator's engine in `engine_path`: no engine of the run."""
COLLECT_S_MAX = 0.05


def rows_of(settings: Settings) -> list[RequestRecord]:
    """A request for each sample of each held-out row, of version 0. BadInput if there are none."""
    loaded = prompts.load(settings, Path(settings.model))
    found: list[RequestRecord] = []
    places = [
        prompts.Place(number, 0, row)
        for number, table in enumerate(loaded.tables)
        if table.settings.purpose == "eval"
        for row in range(len(table.rows))
    ]
    if not places:
        raise BadInput('--every: the run has no [[dataset]] with purpose = "eval"; give --every 0 for the tables alone')
    for row, place in enumerate(places):
        prompt = loaded.record(place)
        for index in range(max(1, settings.evaluation.samples)):
            found.append(_request(settings, prompt.model_dump(), -(row + 1), index, row))
    return found


def _request(settings: Settings, prompt: dict[str, Any], group: int, index: int, row: int) -> RequestRecord:
    names = ("run", "purpose", "task", "prompt_ids", "answer", "max_new_tokens", "metadata")
    return RequestRecord(
        **{name: prompt[name] for name in names},
        group=group,
        index=index,
        attempt=0,
        version=0,
        engine=ENGINE,
        incarnation=0,
        sequence=0,
        prompt_row=row,
        seed=sampling_seed(settings.seed, group, index),
        temperature=settings.evaluation.temperature,
        top_p=settings.sampling.top_p,
        top_k=settings.sampling.top_k,
        queued_at=0,
    )


class Pins(threading.Thread):
    """Hears of every version, pins each `every`-th that was not evaluated yet, and hands it on by `ready`; None is its
    end. `missed`: versions whose files were gone before they were heard of."""

    def __init__(
        self, run_dir: Path, every: int, done: set[int], stopping: threading.Event, open_bus: OpenBus = tap_source.kafka
    ) -> None:
        super().__init__(name="pins", daemon=True)
        self.ready: queue.Queue[WeightsRecord | None] = queue.Queue()
        self.missed: list[int] = []
        self.failed: BaseException | None = None
        self._folder, self._every, self._seen = run_dir / PINNED, every, set(done)
        self._source = Source(
            run_dir, "weights", Since(Positions("weights")), follow=True, stopping=stopping, open_bus=open_bus
        )

    def run(self) -> None:
        try:
            for piece in self._source.pieces():
                for _, weights in archived.records("weights", piece.rows):
                    if isinstance(weights, WeightsRecord):  # what is not: no engine can read it either
                        self._hear(weights)
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self.ready.put(None)

    def _hear(self, weights: WeightsRecord) -> None:
        if weights.version % self._every or weights.version in self._seen:
            return
        self._seen.add(weights.version)
        pinned = pin(weights, self._folder)
        if pinned is None:
            self.missed.append(weights.version)
        else:
            self.ready.put(pinned)


def pin(weights: WeightsRecord, folder: Path) -> WeightsRecord | None:
    """The version with its files in `folder`; None if they are gone."""
    kept = folder / f"v{weights.version:06d}"
    if not kept.is_dir():
        unfinished = kept.with_name(f".{kept.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            source, _ = Store.open(weights)
            shutil.copytree(source, unfinished, copy_function=_link)
        except (WeightsUnavailable, OSError, shutil.Error):
            shutil.rmtree(unfinished, ignore_errors=True)
            return None
        unfinished.rename(kept)
    return weights.model_copy(update={"location": kept.as_uri()})


def _link(source: str, target: str) -> None:
    """Published files never change: two names of one file are as good as a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass
class HeldOut:
    """Evaluates versions of a run as they come. `run` in the thread that shall own the engine."""

    run_dir: Path
    every: int
    stopping: threading.Event
    open_bus: OpenBus = tap_source.kafka

    def __post_init__(self) -> None:
        self.settings = read_resolved(self.run_dir)
        self.requests = rows_of(self.settings)
        self.graders = graders_of(self.settings)
        self.log = Log("evaluator")
        done = evaluated(self.run_dir)
        self.pins = Pins(self.run_dir, self.every, done, self.stopping, self.open_bus)

    def run(self) -> None:
        """Until the run has ended and all that is pinned was evaluated, or it is told to stop."""
        self.pins.start()
        with ExitStack() as stack:
            engine: Engine | None = None
            while not self.stopping.is_set():
                try:
                    weights = self.pins.ready.get(timeout=0.5)
                except queue.Empty:
                    continue
                if weights is None:
                    break
                if engine is None:
                    set_environment(self.settings, "rollout")
                    engine = engine_of(self.settings, number=ENGINE)
                    stack.callback(engine.close)
                    pool = stack.enter_context(_Grading(self.settings, self.graders))
                self._evaluate(engine, pool, weights)
        if self.pins.failed is not None:
            raise self.pins.failed
        if not self.stopping.is_set():
            shutil.rmtree(self.run_dir / PINNED, ignore_errors=True)

    def missing(self) -> list[str]:
        """What the curve lacks, in a sentence."""
        if not self.pins.missed:
            return []
        gone = ", ".join(map(str, sorted(self.pins.missed)))
        advice = f"begin with the run, or have it keep them for good (scheduling.weights_keep_every = {self.every})"
        return [f"versions {gone} were deleted before they were heard of: {advice}"]

    def _evaluate(self, engine: Engine, pool: "_Grading", weights: WeightsRecord) -> None:
        began = clock.monotonic_s()
        engine.load(weights)
        rows = list(sampled(engine, self.requests, weights.version, pool, self.stopping))
        if self.stopping.is_set():
            return
        _write(self.run_dir, rows)
        shutil.rmtree(self.run_dir / PINNED / f"v{weights.version:06d}", ignore_errors=True)
        seconds = round(clock.monotonic_s() - began, 1)
        self.log.info("evaluated", version=weights.version, rows=len(rows), seconds=seconds)


def sampled(
    engine: Engine, requests: list[RequestRecord], version: int, pool: "_Grading", stopping: threading.Event
) -> Iterator[dict[str, Any]]:
    """A scored row for each request, in the order in which they end."""
    waiting = deque(one.model_copy(update={"version": version}) for one in requests)
    running: dict[RequestKey, Running] = {}
    place = Place(ENGINE, 0, engine.fingerprint)
    while (waiting or running) and not stopping.is_set():
        while waiting and len(running) < engine.seats:
            now = clock.now_us()
            one = begin(waiting.popleft().model_copy(update={"queued_at": now}), now)
            engine.add(one.request)
            running[one.key] = one
        for part in engine.step():
            one = running[part.key]
            one.prefill = part.prefill or one.prefill
            one.ids.extend(part.ids)
            one.logprobs.extend(part.logprobs)
            one.kept.extend(part.kept or ())
            if part.finish is not None:
                del running[part.key]
                finish = part.finish if part.finish in ("stop", "length") else "error"
                pool.submit(to_row(one, place, finish, clock.now_us()))
        yield from pool.collect(0.0)
    engine.stop(tuple(running))
    while pool.waiting and not stopping.is_set():
        yield from pool.collect(COLLECT_S_MAX)


class _Grading:
    """The run's graders, in killable subprocesses of ours."""

    def __init__(self, settings: Settings, graders: dict[tuple[str, str], str]) -> None:
        reward = settings.reward
        limits = Limits(reward.timeout_s, reward.memory_mib)
        names = sorted(grader for (_, purpose), grader in graders.items() if purpose == "eval")
        self._pool = Pool(reward.pool, limits, Path(settings.model), names, path=reward.path)
        self._graders = graders
        self.waiting: dict[int, dict[str, Any]] = {}
        self._next = 0

    def __enter__(self) -> "_Grading":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def submit(self, row: dict[str, Any]) -> None:
        key, self._next = self._next, self._next + 1
        self.waiting[key] = row
        grader = self._graders[row["task"], "eval"]
        self._pool.submit(Item(key, grader, row["prompt_ids"], row["response_ids"], row["answer"], row["metadata"]))

    def collect(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        for graded in self._pool.collect(timeout_s) if self.waiting else ():
            yield _judged(self.waiting.pop(graded.key), graded)


def _judged(row: dict[str, Any], graded: Graded) -> dict[str, Any]:
    row["scored_at"] = max(clock.now_us(), row["finished_at"])
    if graded.verdict is None:
        row["score_error"] = graded.error
    else:
        row["reward"], row["outcome"] = graded.verdict.reward, graded.verdict.outcome
        row["reward_parts"] = dict(graded.verdict.parts)
    reason = arrow.invalid_reason(row, scored=True)
    assert reason is None, reason
    return row


# --- what was evaluated ---------------------------------------------------------------------------


def evaluated(run_dir: Path) -> set[int]:
    """Versions that an evaluator of this run is done with. BadInput if its files are damaged."""
    found: set[int] = set()
    for _, partition, table in archive.files(run_dir, "evaluations", ("version", "offset")):
        if partition == EVALUATOR_PARTITION:
            found |= set(table.column("version").to_pylist())
    return found


def _write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Behind what is there, in the order of the held-out rows."""
    first = 0
    for _, partition, table in archive.files(run_dir, "evaluations", ("offset",)):
        if partition == EVALUATOR_PARTITION:
            first = max([first, *(offset + 1 for offset in table.column("offset").to_pylist())])
    rows.sort(key=lambda row: (-row["group"], row["index"]))
    placed = [row | {"partition": EVALUATOR_PARTITION, "offset": first + n} for n, row in enumerate(rows)]
    table = pa.Table.from_pylist(placed, archive.schema_of("evaluations"))
    name = f"{EVALUATOR_PARTITION}.{first:020d}.arrow"
    archive.write_file(run_dir / "archive" / "evaluations" / name, table)
