"""A learner of several processes: this one is rank 0, and the others do what it does (ranks.py).

Rule 1: a call is told to all ranks, then made here; so all make the same calls in the same order.
Rule 2: a call that fails here may have left the others inside: the ranks are out of step, and nothing more is asked of
   them. The trainer ends and starts again from its checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from schemas.settings import Settings
from workers.runtime.errors import BadInput, DoraError
from workers.trainer.learners.base import Learner, Sample, Snapshot
from workers.trainer.learners.layout import layout_of
from workers.trainer.learners.ranks import Ranks
from workers.transport.weights.manifest import RawTensor

_FIELDS = tuple(field.name for field in fields(Sample))
_Given = TypeVar("_Given")


class RanksOutOfStep(DoraError):
    """A call failed on one rank, while others may still be in it."""


def megatron_learner_of(settings: Settings, model_folder: Path) -> Learner:
    """The Megatron learner in the settings' layout. BadInput if it cannot be."""
    if layout_of(settings).ranks > 1:
        return RankedLearner(settings, model_folder)
    from workers.trainer.learners.megatron_learner import MegatronLearner

    return MegatronLearner(settings, model_folder)


class RankedLearner:
    """Rank 0 of the settings' layout, and the processes of all others."""

    def __init__(self, settings: Settings, model_folder: Path) -> None:
        ranks = layout_of(settings).ranks
        self._ranks = Ranks(ranks)
        self._broken = False
        try:
            from workers.trainer.learners import megatron_learner, megatron_world

            store = megatron_world.open_store(ranks)
            told = {"settings": settings.model_dump(mode="json"), "model": str(model_folder)}
            self._ranks.tell("join", **told, ranks=ranks, port=store.port)
            place = megatron_world.Place(0, store)
            self._mine = megatron_learner.MegatronLearner(settings, model_folder, place)
        except BaseException:
            self._ranks.close(at_once=True)
            raise
        self._leave = megatron_world.leave

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        return self._all("train", lambda: self._mine.train(samples, step), samples=_plain(samples), step=step)

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._all("logprobs", lambda: self._mine.logprobs(samples), samples=_plain(samples))

    def probe(self, ids: Sequence[int]) -> list[float]:
        return self._all("probe", lambda: self._mine.probe(ids), ids=list(ids))

    def export(self) -> Iterator[RawTensor]:
        """To be gone through to the end before the next call: the other ranks give their parts meanwhile."""
        with self._together("export"):
            yield from self._mine.export()

    def snapshot(self, folder: Path) -> Snapshot:
        mine = self._all("snapshot", lambda: self._mine.snapshot(folder), folder=str(folder))
        return _Snapshot(mine, self._ranks, lambda: self._all("finish", mine.finish))

    def restore(self, folder: Path) -> None:
        self._all("restore", lambda: self._mine.restore(folder), folder=str(folder))

    def close(self) -> None:
        self._ranks.close(at_once=self._broken)
        if not self._broken:
            self._leave()

    def _all(self, call: str, mine: Callable[[], _Given], **arguments: object) -> _Given:
        with self._together(call, **arguments):
            return mine()

    @contextmanager
    def _together(self, call: str, **arguments: object) -> Iterator[None]:
        if self._broken:
            raise RanksOutOfStep(f"{call}: an earlier call was not made to its end on all ranks")
        self._broken = True
        self._ranks.tell(call, **arguments)
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            raise RanksOutOfStep(f"{call}: {type(error).__name__}: {error}") from error
        self._broken = False


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Of all ranks: each writes its part."""

    mine: Snapshot
    ranks: Ranks
    finish: Callable[[], None]

    def write(self) -> None:
        try:
            self.mine.write()
        finally:
            self.ranks.wait_until_written()


def _plain(samples: Sequence[Sample]) -> list[list[object]]:
    """Fields of each, in their order; as JSON writes them."""
    return [[_listed(getattr(sample, name)) for name in _FIELDS] for sample in samples]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, Sequence) else value
