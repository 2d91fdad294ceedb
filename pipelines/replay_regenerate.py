"""`dora replay RUN --group G --regenerate`: the group's samples drawn again, on the weights that they are of.

    archive -> row, its versions -> the version's files -> the run's engine, the sample's seed -> token by token against
    the row

Rule 1: the engine is the run's: same settings, same seeds; what it loads is checked as in the run (hash, fingerprint,
   probe).
Rule 2: where another token comes, the sample goes on with the recorded one, as a request that moved does. So one
   difference does not hide the rest, and log-probs are compared where the tokens are equal.
Rule 3: in float32 every token must come again. bfloat16 rounds enough that another batch draws another token now and
   then: there the log-probs decide.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelines import versions
from pipelines.config_file import read_resolved
from pipelines.engines import engine_of
from pipelines.processes import set_environment
from pipelines.replay_group import rows_of
from schemas.ids import RequestKey, sampling_seed
from schemas.messages import RequestRecord
from schemas.settings import Settings
from workers.rollout.engines.base import Engine, Tokens
from workers.runtime.errors import BadInput

LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean |difference| of the log-probs of a sample, in nats."""
OTHERS_MAX = 16
"""Tokens of a sample that may come out otherwise until the rest of it is not looked at."""


@dataclass
class Again:
    """A sample: `tokens` of it were recorded, `equal` of them came again, `others` are the places where another one
    came. `mean` and `largest` |difference| of the log-probs of the equal ones, in nats. `whole`: all was looked at.
    `strange`: fingerprints it was sampled on that were never announced."""

    index: int
    attempt: int
    tokens: int
    others: list[int] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    whole: bool = True
    differences: list[float] = field(default_factory=list, repr=False)

    @property
    def mean(self) -> float:
        return fmean(self.differences) if self.differences else 0.0

    def same(self, dtype: str) -> bool:
        """By the rules above."""
        tokens = self.whole and bool(self.differences) and not (self.others and dtype == "float32")
        return tokens and not self.strange and self.mean <= LOGPROB_TOLERANCE[dtype]


@dataclass
class Regenerated:
    """All samples of a group. `fingerprints` by version."""

    dtype: str
    fingerprints: dict[int, str]
    samples: list[Again]

    @property
    def same(self) -> bool:
        return all(one.same(self.dtype) for one in self.samples)


def regenerate(run_dir: Path, group: int) -> Regenerated:
    """Sample it again. BadInput if it has no rows, or a version that it is of is gone (says which are kept and how to
    keep more); WeightsUnavailable, ProbeMismatch."""
    settings = read_resolved(run_dir)
    rows = rows_of(run_dir, group)
    if not rows:
        raise BadInput(f"group {group} of run {settings.name} has no trajectory: nothing was sampled to its end")
    stays = [(_sections(row), Again(row["index"], row["attempt"], len(row["response_ids"]))) for row in rows]
    weights = {version: versions.kept(run_dir, version) for version in sorted({v for one, _ in stays for v, *_ in one})}
    for row, (_, again) in zip(rows, stays, strict=True):
        there = {weights[stay["version"]].fingerprint for stay in row["engine_path"]}
        again.strange = sorted({stay["fingerprint"] for stay in row["engine_path"]} - there)
    set_environment(settings, "rollout")
    engine = engine_of(settings)
    try:
        for version, record in weights.items():
            engine.load(record)
            parts = [
                _Part(settings, row, version, begin, end, again)
                for row, (sections, again) in zip(rows, stays, strict=True)
                for at, begin, end in sections
                if at == version
            ]
            _compare(engine, parts)
    finally:
        engine.close()
    return Regenerated(settings.dtype, {at: one.fingerprint for at, one in weights.items()}, [one for _, one in stays])


def _sections(row: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(version, first token, end) of the response: one, but for mode `partial`."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for stay in row["engine_path"]:
        begin = found.pop()[1] if found and found[-1][0] == stay["version"] else at
        at += stay["tokens"]
        found.append((stay["version"], begin, at))
    return [one for one in found if one[1] < one[2]]


@dataclass
class _Part:
    """Tokens of a row that one version sampled: from `at` on they are still to come."""

    settings: Settings
    row: dict[str, Any]
    version: int
    at: int
    end: int
    again: Again

    def request(self, attempt: int) -> RequestRecord:
        """For what is still to come, with what was recorded before it."""
        row, at = self.row, self.at
        return RequestRecord(
            run=row["run"],
            group=row["group"],
            index=row["index"],
            attempt=attempt,
            version=row["version"],
            engine=0,
            incarnation=0,
            sequence=0,
            purpose=row["purpose"],
            task=row["task"],
            prompt_row=row["prompt_row"],
            prompt_ids=row["prompt_ids"],
            answer=row["answer"],
            seed=sampling_seed(self.settings.seed, row["group"], row["index"]),
            temperature=row["temperature"],
            top_p=row["top_p"],
            top_k=row["top_k"],
            max_new_tokens=self.end,
            queued_at=0,
            response_ids=row["response_ids"][:at],
            logprobs=row["logprobs"][:at],
            loss_mask=row["loss_mask"][:at],
            under=None if self.version == row["version"] else self.version,
        )

    def take(self, part: Tokens) -> bool:
        """Compare what came. True if the engine goes on alone; else `at` is where to go on, `end` if nowhere."""
        for token, logprob in zip(part.ids, part.logprobs, strict=True):
            if token != self.row["response_ids"][self.at]:
                return self._other()
            self.again.differences.append(abs(logprob - self.row["logprobs"][self.at]))
            self.at += 1
        if part.finish is not None and self.at < self.end:
            return self._other()  # it ended where the recorded one went on
        return part.finish is None

    def _other(self) -> bool:
        self.again.others.append(self.at)
        self.at += 1
        if len(self.again.others) >= OTHERS_MAX and self.at < self.end:
            self.again.whole, self.at = False, self.end
        return False


def _compare(engine: Engine, parts: Sequence[_Part]) -> None:
    """All of one version, as many at once as there are seats."""
    waiting, inside, attempts = list(parts), dict[RequestKey, _Part](), itertools.count()
    while waiting or inside:
        while waiting and len(inside) < engine.seats:
            part = waiting.pop(0)
            request = part.request(next(attempts))
            inside[request.key] = part
            engine.add(request)
        for said in engine.step():
            part = inside[said.key]
            if part.take(said):
                continue
            del inside[said.key]
            if said.finish is None:
                engine.stop((said.key,))
            if part.at < part.end:
                waiting.insert(0, part)


def as_dict(said: Regenerated) -> dict[str, Any]:
    """What `--json` prints."""
    samples = [
        {name: value for name, value in asdict(one).items() if name != "differences"}
        | {"equal": len(one.differences), "mean": one.mean, "largest": max(one.differences, default=0.0)}
        | {"same": one.same(said.dtype)}
        for one in said.samples
    ]
    return {"same": said.same, "dtype": said.dtype, "fingerprints": said.fingerprints, "samples": samples}


def as_text(said: Regenerated) -> str:
    """For people."""
    on = ", ".join(f"version {version} ({text[:16]})" for version, text in said.fingerprints.items())
    texts = [f"sampled again on {on}, {said.dtype}:"]
    texts += [_line(one, said.dtype) for one in said.samples]
    allowed = f"mean log-prob differences within {LOGPROB_TOLERANCE[said.dtype]:g}"
    tokens = "all tokens equal, " if said.dtype == "float32" else ""
    texts.append(f"as it was: {tokens}{allowed}" if said.same else f"NOT as it was (asked: {tokens}{allowed})")
    return "\n".join(texts)


def _line(one: Again, dtype: str) -> str:
    text = (
        f"  sample {one.index}, attempt {one.attempt}: {len(one.differences)} of {one.tokens} tokens equal, log-probs "
        f"differ by {one.mean:.2g} on average, {max(one.differences, default=0.0):.2g} at most"
    )
    if one.others:
        text += f"; other tokens at {', '.join(map(str, one.others))}"
    if not one.whole:
        text += ", the rest not looked at"
    if one.strange:
        text += f"; it was sampled on {', '.join(name[:16] for name in one.strange)}, which is no version's"
    return text + ("" if one.same(dtype) else "  DIFFERS")
