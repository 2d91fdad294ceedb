"""What was heard and said so far, as a book of its own: groups, samples, engines, versions. Knows nothing of the mind's
code; `checkers.py` judges by it."""

from collections import Counter
from dataclasses import dataclass, field

from schemas import messages as m
from schemas.ids import Position, RequestKey
from tests.simulation.draw import Drawn

S = 1_000_000
AWAY = 10 * S
"""No poll for longer: the orchestrator was away, and what was said meanwhile is not read yet."""


@dataclass(eq=False)
class Sample:
    """`place`: wait, out (at an engine), done (finished, not scored), scored, lost. `perhaps`: failures that need
    not have been counted: the sample was given up, and then something was heard of it before it was issued again."""

    place: str = "wait"
    attempt: int = -1
    engine: int = -1
    since: int = 0
    failures: int = 0
    perhaps: int = 0
    partial: Position | None = None
    score: m.Scored | None = None
    stray: bool = False


@dataclass(eq=False)
class Life:
    version: int
    purpose: str
    row: int
    samples: list[Sample]
    status: str = "open"
    completed: int = -1


@dataclass(eq=False)
class Books:
    """An engine by its words and the commands to it. `heard_at` counts time in which the orchestrator was awake.
    `gone`: said so after the end of the run: the mind knows, and says so when the run goes on."""

    incarnation: int
    heard_at: int
    seats: int
    kv_tokens_max: int
    version: int | None = None
    loading: int | None = None
    loading_since: int = 0
    issued: int = -1
    gone: bool = False
    booked: dict[RequestKey, int] = field(default_factory=dict)


class Ledger:
    """`heard` before the mind takes an event."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn, self.settings = drawn, drawn.settings
        self.size, self.batch = self.settings.group_size, self.settings.groups_per_batch
        self.K, self.steps, self.mode = self.settings.lag_max, self.settings.steps or None, self.settings.mode
        self.now = self.awake = 0
        self.groups: dict[int, Life] = {}
        self.live: dict[int, Life] = {}
        self.evaluating: dict[int, Life] = {}
        self.complete: dict[int, Life] = {}
        self.books: dict[int, Books] = {}
        self.successors: dict[int, list[Books]] = {}
        """Later incarnations, in order, while the mind has not said that the one before is lost."""
        self.excused: set[tuple[int, int]] = set()
        self.sequences: dict[int, int] = {}
        self.made: list[int] = []
        self.retired: set[int] = set()
        self.deleted: set[int] = set()
        self.kept: tuple[int, ...] | None = None
        self.published = self.youngest = -1
        self.step_next = 0
        self.chosen: list[int] = []
        self.trained_keys: set[tuple[int, int]] = set()
        self.rows: dict[int, m.PromptArrived] = {}
        self.rows_end: int | None = None
        self.row_next = drawn.eval_rows
        self.wanted = 0
        self.completions = 0
        self.end: m.EndRun | None = None
        self.moved_at = 0
        self.kept_since: int | None = None
        self.resumed_at = -1
        """What is said now was perhaps decided before, after the end of the run."""
        self.unsure: set[int] = set()
        """Groups that were complete by such a decision: nobody can say in which order."""
        self.ends: set[int] = set()
        self.voids: Counter[str] = Counter()
        self.voids_in_row = 0

    @property
    def ended(self) -> bool:
        return self.end is not None

    # --- what the mind hears ---------------------------------------------------------------------

    def heard(self, event: m.Event) -> None:
        engine, incarnation = getattr(event, "engine", None), getattr(event, "incarnation", None)
        books = self._last(engine) if engine is not None else None
        if books is not None and books.gone:
            books = None
        if books is not None and books.incarnation == incarnation:
            books.heard_at = self.awake
        match event:
            case m.Tick():
                assert event.now >= self.now
                self.awake += min(event.now - self.now, AWAY) if self.now else 0
                self.now = event.now
            case m.RunStarted():
                self.steps, self.end, self.voids_in_row, self.moved_at = event.steps, None, 0, self.now
                self.resumed_at = self.now
            case m.PromptArrived():
                self.rows.setdefault(event.row, event)
            case m.PromptsEnded():
                self.rows_end = event.rows
            case m.WeightsArrived() if event.version == self.published + 1:
                self._published(event)
            case m.CheckpointSaved():
                self.kept = event.kept
            case m.EngineGone():
                if books is not None and (incarnation is None or incarnation >= books.incarnation):
                    self.excused.add((event.engine, books.incarnation))
                    books.gone = self.ended
            case m.Joined():
                self._joined(event)
            case m.Hosting() if books is not None and books.incarnation == incarnation:
                self._hosting(books, event)
            case m.Finished() | m.Refused() | m.PartialArrived() | m.Failed() | m.Scored():
                self._about_sample(event, books)
            case _:
                pass

    def _published(self, word: m.WeightsArrived) -> None:
        self.published, self.moved_at = word.version, self.now
        if word.version % self.settings.scheduling.open_every == 0:
            self.youngest = word.version
        for number in self.chosen:
            self.groups[number].status = "trained"
        self.chosen = []

    def _last(self, engine: int) -> Books | None:
        """The incarnation that the mind knows; what it decides after the end it says when the run goes on."""
        return self.successors.get(engine, [self.books.get(engine)])[-1]

    def _joined(self, word: m.Joined) -> None:
        books = self._last(word.engine)
        if books is not None and word.incarnation > books.incarnation:
            self.excused.add((word.engine, books.incarnation))
        if books is None or word.incarnation > books.incarnation:
            new = Books(word.incarnation, self.awake, word.seats, word.kv_tokens_max)
            if books is None:
                self.books[word.engine] = new
            else:
                self.successors.setdefault(word.engine, []).append(new)

    def _hosting(self, books: Books, word: m.Hosting) -> None:
        if books.loading != word.version:
            return
        books.version, books.loading = word.version, None
        for key in books.booked:
            sample = self._sample(key.group, key.index, key.attempt)
            if sample is not None and sample.place == "out":
                sample.stray = True
        books.booked.clear()

    def _sample(self, group: int, index: int, attempt: int) -> Sample | None:
        """The sample, if its group is open and this is its last attempt."""
        life = self.groups.get(group)
        if life is None or life.status != "open":
            return None
        sample = life.samples[index]
        return sample if sample.attempt == attempt else None

    def _about_sample(self, word: m.Event, books: Books | None) -> None:
        assert isinstance(word, m.Finished | m.Refused | m.PartialArrived | m.Failed | m.Scored)
        key = RequestKey(word.group, word.index, word.attempt)
        sample = self._sample(word.group, word.index, word.attempt)
        if isinstance(word, m.Scored):
            if sample is not None and sample.place not in ("scored", "lost"):
                self._scored(word, sample)
            return
        snapshot = isinstance(word, m.PartialArrived) and word.reason == "snapshot"
        stale = word.engine is not None and (books is None or books.incarnation != word.incarnation)
        held = False
        if books is not None and not stale and not snapshot:
            held = books.booked.pop(key, None) is not None
        if sample is None or sample.place in ("scored", "lost"):
            return
        sample.perhaps += self._late(sample)
        match word:
            case m.PartialArrived() if sample.place in ("out", "wait"):
                sample.partial = word.at
                sample.place = sample.place if snapshot else "wait"
            case m.Finished() if not stale and sample.place != "done":
                sample.place, sample.since = "done", self.now
            case m.Failed(engine=None) if sample.place in ("out", "done"):
                sample.place, sample.failures = "wait", sample.failures + 1
            case m.Refused() | m.Failed() if held and sample.place == "out":
                sample.place, sample.failures = "wait", sample.failures + isinstance(word, m.Failed)
            case _:
                pass

    def _scored(self, word: m.Scored, sample: Sample) -> None:
        life = self.groups[word.group]
        if word.error is not None and life.purpose == "train":
            if sample.place != "wait":
                sample.place, sample.failures = "wait", sample.failures + 1
            return
        sample.place, sample.score = "scored", word
        self._judge(word.group)

    def _judge(self, number: int) -> None:
        """Nothing of the group is awaited any more?"""
        life = self.groups[number]
        if any(sample.place not in ("scored", "lost") for sample in life.samples):
            return
        if life.purpose == "eval":
            life.status = "evaluated"
            del self.evaluating[number]
        elif self.settings.scheduling.dynamic_sampling and not varies(life):
            life.status = "to void"
        else:
            life.status, life.completed = "complete", self.completions
            self.complete[number] = life
            self.completions += 1
            self.voids_in_row = 0

    def _late(self, sample: Sample) -> bool:
        """It was given up without a word: finished, but not scored in time, or its engine is to stop it anyway."""
        books = self.books.get(sample.engine)
        leaves = sample.place == "out" and books is not None and (books.loading is not None or sample.stray)
        waited = self.now - sample.since
        return (sample.place == "done" or leaves) and waited >= self.settings.engines.request_timeout_s * S

    def _may_wait(self, sample: Sample) -> bool:
        """It may have been given up without a word, or its engine hosts another version and handed nothing back yet."""
        return self._late(sample) or (sample.place == "out" and sample.stray)


def varies(life: Life) -> bool:
    return len({s.score.outcome for s in life.samples if s.score is not None and s.place == "scored"}) > 1
