"""The prompts process: dataset rows, tokenised once, onto the topic `prompts` as far as the orchestrator wants them.

Rule 1: record i of `prompts` is a pure function of (settings, i): after a restart it goes on at the topic's end.
Rule 2: all held-out rows come first, once, in their order; then training rows, epoch after epoch, each epoch of a
dataset shuffled by (seed, dataset, epoch), several datasets interleaved by weight.
Rule 3: with `epochs` every row comes exactly that often and then `PromptsEnded` is said; with `steps` they never end.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pipelines.datasets import Row, Table, read_tables
from pipelines.tokens import PromptTokenizer
from schemas.messages import CONTROL, PromptRecord, PromptsEnded, WantPrompts
from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.transport.records.bus import Bus, Producer, publish
from workers.transport.records.letters import read_or_bury

POLL_MS_MAX = 500
BATCH_ROWS_MAX = 256
FAULTS_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Which row of which table comes at some offset of `prompts`."""

    table: int
    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """All rows of a run, tokenised: `ids[table][row]`."""

    settings: Settings
    tables: tuple[Table, ...]
    ids: tuple[tuple[tuple[int, ...], ...], ...]

    def record(self, place: Place) -> PromptRecord:
        table = self.tables[place.table]
        row = table.rows[place.row]
        return PromptRecord(
            run=self.settings.name,
            prompt=row.prompt,
            prompt_ids=self.ids[place.table][place.row],
            answer=row.answer,
            task=table.name,
            dataset=table.name,
            purpose=table.settings.purpose,
            epoch=place.epoch,
            row=place.row,
            max_new_tokens=_limit(self.settings, row),
            metadata=row.metadata,
        )


def load(settings: Settings, model: Path) -> Prompts:
    """Read, tokenise and check every row. BadInput with file and rows."""
    tables = read_tables(settings)
    tokenizer = PromptTokenizer(model)
    ids = []
    for table in tables:
        tokens = tuple(tuple(tokenizer.ids(row.prompt, table.settings.template)) for row in table.rows)
        _refuse_long_rows(settings, table, tokens)
        ids.append(tokens)
    return Prompts(settings, tuple(tables), tuple(ids))


def order(settings: Settings, tables: tuple[Table, ...]) -> Iterator[Place]:
    """What comes at offset 0, 1, 2, ... of `prompts`; endless unless `settings.epochs` is set."""
    if settings.evaluation.samples:
        for number, table in enumerate(tables):
            if table.settings.purpose == "eval":
                yield from (Place(number, 0, row) for row in range(len(table.rows)))
    training = [number for number, table in enumerate(tables) if table.settings.purpose == "train"]
    streams = {number: _epochs(settings, number, tables[number]) for number in training}
    taken = dict.fromkeys(training, 0)
    while streams:
        # The dataset that is furthest behind its weight is next.
        number = min(streams, key=lambda n: ((taken[n] + 1) / tables[n].settings.weight, n))
        place = next(streams[number], None)
        if place is None:
            del streams[number]
            continue
        taken[number] += 1
        yield place


def rows_in_all(settings: Settings, tables: tuple[Table, ...]) -> int | None:
    """How many rows `order` gives; None = endless."""
    if not settings.epochs:
        return None
    of = {"train": 0, "eval": 0}
    for table in tables:
        of[table.settings.purpose] += len(table.rows)
    return of["train"] * settings.epochs + (of["eval"] if settings.evaluation.samples else 0)


def serve(process: Process, bus: Bus) -> int:
    """Keep `prompts` filled up to the last `WantPrompts`."""
    settings, topics = process.settings, process.topics
    prompts = load(settings, Path(settings.model))
    written = bus.end_offsets(topics.prompts)[0]
    total = rows_in_all(settings, prompts.tables)
    places = islice(order(settings, prompts.tables), written, None)
    reader, producer = bus.reader(), bus.producer()
    reader.add(topics.control, 0, "earliest")
    process.log.info("reading", rows=sum(len(table.rows) for table in prompts.tables), written=written)
    wanted, said_end = 0, False
    try:
        while not process.stopping.is_set():
            for record in reader.poll(POLL_MS_MAX):
                said = read_or_bury(process, producer, CONTROL, record)
                if isinstance(said, WantPrompts):
                    wanted = max(wanted, said.rows)
            limit = wanted if total is None else min(wanted, total)
            while written < limit and not process.stopping.is_set():
                batch = list(islice(places, min(BATCH_ROWS_MAX, limit - written)))
                _write(producer, topics.prompts, [prompts.record(place) for place in batch], settings)
                written += len(batch)
            if total is not None and written >= total and not said_end:
                publish(producer, topics.status, PromptsEnded(rows=total))
                producer.flush(settings.broker.timeout_s)
                process.log.info("ended_rows", rows=total)
                said_end = True
    finally:
        reader.close()
        producer.close()
    return 0


def _write(producer: Producer, topic: str, records: list[PromptRecord], settings: Settings) -> None:
    for record in records:
        publish(producer, topic, record)
    producer.flush(settings.broker.timeout_s)


def _epochs(settings: Settings, number: int, table: Table) -> Iterator[Place]:
    epoch = 0
    while not settings.epochs or epoch < settings.epochs:
        rows = list(range(len(table.rows)))
        random.Random(f"{settings.seed}/{table.name}/{epoch}").shuffle(rows)
        yield from (Place(number, epoch, row) for row in rows)
        epoch += 1


def _limit(settings: Settings, row: Row) -> int:
    return row.max_new_tokens or settings.sampling.max_new_tokens


def _refuse_long_rows(settings: Settings, table: Table, tokens: tuple[tuple[int, ...], ...]) -> None:
    most = settings.engines.tokens_per_request_max
    faults = [
        f"{row.place}: {len(ids)} prompt tokens + {_limit(settings, row)} new = {len(ids) + _limit(settings, row)}"
        for row, ids in zip(table.rows, tokens, strict=True)
        if len(ids) + _limit(settings, row) > most
    ]
    if faults:
        shown = "\n  ".join(faults[:FAULTS_SHOWN_MAX])
        raise BadInput(
            f"{table.source}: {len(faults)} row(s) do not fit engines.tokens_per_request_max = {most}:\n  {shown}\n"
            "Shorten them, lower max_new_tokens, or raise engines.tokens_per_request_max."
        )
