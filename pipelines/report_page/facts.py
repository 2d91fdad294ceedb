"""What the page shows, as plain data, from nothing but a run's archive and its configuration.

Rule 1: the summary's and the case study's figures are theirs; here is only what they do not have: things over time.
Rule 2: seconds are those in which the run was up (`Tally.working_us`), from the orchestrator's first word on.
Rule 3: of rows that came twice, and of attempts of one sample, the first with a verdict counts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from pipelines import archived, case_study, environment, report
from pipelines.tally import Tally
from pipelines.tokens import PromptTokenizer
from schemas.settings import Settings
from schemas.summary import Summary
from workers.runtime.errors import BadInput
from workers.taps import archive, evaluate

SHOWN_MAX = 3
"""So many of the best and of the worst trajectories."""
_COLUMNS = ("group", "index", "version", "reward", "finish_reason", "response_ids", "offset")


@dataclass(frozen=True, slots=True)
class Stay:
    """`engine` served `version` from `began` to `ended` (seconds)."""

    engine: int
    version: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Said:
    """A trajectory with its text."""

    group: int
    index: int
    version: int
    reward: float
    finish_reason: str
    tokens: int
    prompt: str
    response: str


@dataclass(slots=True)
class Lengths:
    """Response tokens of scored training samples: all of them, and those of each version; how many were cut."""

    tokens: list[int] = field(default_factory=list)
    of_version: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    cut: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Facts:
    """Series are {step or version: value}; `published` is when each version was announced (seconds)."""

    settings: Settings
    summary: Summary
    study: Mapping[str, Any]
    rewards: Mapping[int, float]
    heldout: Mapping[int, Mapping[str, evaluate.Accuracy]]
    fingerprints: Mapping[int, str]
    lags: Mapping[int, Mapping[int, int]]
    stays: list[Stay]
    published: Mapping[int, float]
    trainer: Mapping[str, Mapping[int, float]]
    trainer_s: Mapping[str, float]
    seconds: float
    lengths: Lengths
    best: list[Said]
    worst: list[Said]
    starts: list[environment.Start]
    lost: list[tuple[float, str]]
    voided: Mapping[str, int]
    voided_last: str
    letters: list[dict[str, Any]]


def gather(settings: Settings, run_dir: Path, damage: list[str]) -> Facts:
    """All of a run; `damage` hears of what in its archive could not be read."""
    story = Story()
    for record in archived.messages(run_dir, "journal", damage):
        story.take(record)
    tally = story.tally
    points = list(archived.messages(run_dir, "metrics", damage))
    for point in points:
        tally.take_point(point)
    lengths, best, worst = _rows(settings, run_dir, damage)
    return Facts(
        settings=settings,
        summary=report.summarise(settings, run_dir, damage),
        study=case_study.case_study(run_dir, damage),
        rewards={step: tally.rewards[step] for step in sorted(tally.rewards) if step in tally.trained_steps},
        heldout=evaluate.heldout(run_dir, damage),
        fingerprints=evaluate.fingerprints(run_dir, damage),
        lags={step: tally.lag_of(step) for step in sorted(tally.trained_steps)},
        stays=story.ended(),
        published=story.published,
        trainer=_series(points),
        trainer_s=dict(tally.trainer),
        seconds=tally.working_us / 1e6,
        lengths=lengths,
        best=best,
        worst=worst,
        starts=environment.starts(run_dir),
        lost=story.lost,
        voided=dict(Counter(tally.voided.values())),
        voided_last=tally.voided_last,
        letters=list(archived.messages(run_dir, "dead-letters", damage)),
    )


class Story:
    """The journal over time: who hosted what from when to when."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.published: dict[int, float] = {}
        self.lost: list[tuple[float, str]] = []
        self._stays: list[Stay] = []
        self._open: dict[int, tuple[int, float]] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        self.tally.take(record)
        now = self.tally.working_us / 1e6
        if self.tally.version is not None:
            self.published.setdefault(self.tally.version, now)
        for effect in record["effects"]:
            if effect["kind"] == "engine_lost" and not effect["stopped"]:
                self.lost.append((now, f"engine {effect['engine']}: {effect['reason']}"))
        tally = self.tally
        serves = {n: v for n, v in tally.hosting.items() if v is not None and n not in tally.loading}
        for engine, (version, began) in list(self._open.items()):
            if serves.get(engine) != version:
                self._stays.append(Stay(engine, version, began, now))
                del self._open[engine]
        for engine, hosted in serves.items():
            self._open.setdefault(engine, (hosted, now))

    def ended(self) -> list[Stay]:
        now = self.tally.working_us / 1e6
        return self._stays + [Stay(engine, version, began, now) for engine, (version, began) in self._open.items()]


def _series(points: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Each figure of the trainer's by step; of a step that was trained twice the last. Not finite: left out."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for point in points:
        if point["source"] == "trainer" and point["step"] is not None:
            for name, value in point["values"].items():
                if math.isfinite(number := float(value)):  # NaN is a text in JSON
                    found[name][point["step"]] = number
    return {name: dict(sorted(values.items())) for name, values in found.items()}


def _rows(settings: Settings, run_dir: Path, damage: list[str]) -> tuple[Lengths, list[Said], list[Said]]:
    lengths = Lengths()
    seen: set[tuple[int, int]] = set()
    ranked: list[tuple[float, int, int, int, str, int]] = []
    for row in _scored(run_dir, damage):
        group, index, version, reward, finish, tokens = row
        if (group, index) in seen:
            continue
        seen.add((group, index))
        lengths.tokens.append(tokens)
        lengths.of_version[version].append(tokens)
        lengths.cut[version] += finish == "length"
        ranked.append((reward, version, group, index, finish, tokens))
    best = sorted(ranked, key=lambda r: (-r[0], -r[1], r[2], r[3]))[:SHOWN_MAX]
    worst = sorted(ranked, key=lambda r: (r[0], -r[1], r[2], r[3]))[:SHOWN_MAX]
    texts = _texts(settings, run_dir, {(r[2], r[3]) for r in [*best, *worst]}, damage)

    def said(row: tuple[float, int, int, int, str, int]) -> Said:
        reward, version, group, index, finish, tokens = row
        return Said(group, index, version, reward, finish, tokens, *texts.get((group, index), ("", "")))

    return lengths, [said(row) for row in best], [said(row) for row in worst]


def _scored(run_dir: Path, damage: list[str]) -> Iterator[tuple[int, int, int, float, str, int]]:
    """(group, index, version, reward, finish_reason, tokens) of training rows with a verdict."""
    for _, _, table in archive.files(run_dir, "trajectories", _COLUMNS, damage):
        columns = [table.column(name).to_pylist() for name in _COLUMNS[:5]]
        tokens = pc.list_value_length(table.column("response_ids")).to_pylist()
        for group, index, version, reward, finish, count in zip(*columns, tokens, strict=True):
            if reward is not None:
                yield group, index, version, reward, finish, count


def _texts(
    settings: Settings, run_dir: Path, wanted: set[tuple[int, int]], damage: list[str]
) -> dict[tuple[int, int], tuple[str, str]]:
    """Prompt and response; where the model's tokenizer is gone their token ids."""
    try:
        text = PromptTokenizer(Path(settings.model)).text
    except BadInput:
        text = _ids
    names = ("group", "index", "reward", "prompt_ids", "response_ids", "offset")
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for _, _, table in archive.files(run_dir, "trajectories", names, damage) if wanted else ():
        keys = zip(*(table.column(name).to_pylist() for name in names[:3]), strict=True)
        for place, (group, index, reward) in enumerate(keys):
            if (group, index) in wanted and (group, index) not in found and reward is not None:
                said = (table.column(name)[place].as_py() for name in names[3:5])
                prompt, response = (text(ids) for ids in said)
                found[group, index] = prompt, response
    return found


def _ids(ids: Any) -> str:
    return f"token ids {' '.join(map(str, ids))}"
