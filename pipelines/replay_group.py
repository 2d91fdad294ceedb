"""`dora replay RUN --group G`: the life of a group from the archive: what was heard and decided, and what was said."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from pipelines.config_file import read_resolved
from pipelines.replay_decisions import journal
from pipelines.tokens import PromptTokenizer
from schemas.arrow import TRAJECTORY, to_rows
from schemas.messages import BatchRecord, JournalRecord, Message
from workers.runtime.errors import BadInput
from workers.taps import archive

_LEFT_OUT = ("kind", "group", "metadata", "response_ids", "logprobs", "loss_mask", "prompt_ids", "text")


@dataclass(frozen=True, slots=True)
class Moment:
    """At `at` (microseconds since 1970) the orchestrator heard or decided `what`."""

    at: int
    what: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine said and a grader thought of it."""

    index: int
    attempt: int
    version: int
    engines: list[str]
    finish_reason: str
    tokens: int
    reward: float | None
    score_error: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Life:
    """One group."""

    run: str
    group: int
    prompt: str
    moments: list[Moment]
    samples: list[Sample]


def life_of(run_dir: Path, group: int) -> Life:
    """BadInput if the run has opened no such group."""
    settings = read_resolved(run_dir)
    moments = [moment for at, record in journal(run_dir) for moment in _moments(at, record, group)]
    if not moments:
        raise BadInput(f"run {settings.name} has opened no group {group} (groups count from 0): see {run_dir}/archive")
    tokenizer = PromptTokenizer(Path(settings.model))
    rows = rows_of(run_dir, group)
    prompt = tokenizer.text(rows[0]["prompt_ids"]) if rows else ""
    return Life(settings.name, group, prompt, moments, [_sample(row, tokenizer) for row in rows])


def rows_of(run_dir: Path, group: int) -> list[dict[str, Any]]:
    """Its scored rows, by index and attempt. BadInput."""
    rows: list[dict[str, Any]] = []
    for kind in ("trajectories", "evaluations"):
        archive.check(run_dir, kind)
        for _, _, table in archive.files(run_dir, kind):
            found = table.filter(pc.equal(table.column("group"), group)).select(TRAJECTORY.names)
            rows += to_rows(found)
    return sorted(rows, key=lambda row: (row["index"], row["attempt"]))


def _moments(at: int, record: JournalRecord, group: int) -> Iterator[Moment]:
    for said in (*record.events, *record.effects):
        if isinstance(said, BatchRecord):
            if group in dict(said.groups):
                yield Moment(at, "chosen", {"step": said.step, "version": dict(said.groups)[group]})
        elif getattr(said, "group", None) == group:
            yield Moment(at, said.kind, _fields(said))


def _fields(said: Message) -> dict[str, Any]:
    values = said.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in _LEFT_OUT and value is not None}


def _sample(row: dict[str, Any], tokenizer: PromptTokenizer) -> Sample:
    return Sample(
        index=row["index"],
        attempt=row["attempt"],
        version=row["version"],
        engines=[f"{stay['engine']} ({stay['tokens']} tokens)" for stay in row["engine_path"]],
        finish_reason=row["finish_reason"],
        tokens=len(row["response_ids"]),
        reward=row["reward"],
        score_error=row["score_error"],
        text=tokenizer.text(row["response_ids"]),
    )


def as_dict(life: Life) -> dict[str, Any]:
    """What `--json` prints."""
    return asdict(life)


def as_text(life: Life) -> str:
    """For people."""
    texts = [f"group {life.group} of run {life.run}", f"prompt: {life.prompt!r}"]
    for moment in life.moments:
        at = datetime.fromtimestamp(moment.at / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in moment.fields.items())
        texts.append(f"  {at}  {moment.what:<12} {fields}".rstrip())
    for one in life.samples:
        verdict = f"reward {one.reward}" if one.score_error is None else f"not scored: {one.score_error}"
        path = " -> ".join(one.engines)
        texts.append(
            f"sample {one.index}, attempt {one.attempt}: version {one.version}, engine {path}, {one.finish_reason}, "
            f"{verdict}"
        )
        texts.append(f"    {one.text!r}")
    return "\n".join(texts)
