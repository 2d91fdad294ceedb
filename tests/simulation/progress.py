"""At the end of a poll nobody is idle who could work, and the run gets on (I8). Knows nothing of the mind's code."""

from collections.abc import Sequence

from schemas.invariants import deadline, feasible, step_bound_s
from tests.simulation.ledger import Books, Ledger, S

TICK_S = 5.0
"""A limit is seen at the next Tick."""
SLOW_WORDS_S = 120.0
STUCK_S = 3_000.0
"""Worlds are small: where nothing happened for so long nothing will, whatever the bound allows."""


class Progress(Ledger):
    """What `checkers.py` asks when the mind has said all that it had to say."""

    def settled(self, now: float) -> None:
        """Nobody is idle who could work, and the run gets on (I8)."""
        if self.ended or self.published < 0:
            return
        hosts = [b for b in self.books.values() if b.loading is None and b.version is not None]
        row = self.rows.get(self.row_next)
        tokens = 0 if row is None else row.prompt_tokens + row.max_new_tokens
        mine = [b for b in hosts if b.version == self.youngest and len(b.booked) < b.seats]
        free = any(sum(b.booked.values()) + tokens <= b.kv_tokens_max for b in mine)
        lives = [*self.live.values(), *self.evaluating.values()]
        asking = [(life, s) for life in lives for s in life.samples if s.place in ("wait", "out")]
        waits = {self._host_of(life.version) for life, s in asking if s.place == "wait"}
        self._check_hosted(waits, {self._host_of(life.version) for life, _ in asking})
        for number, books in self.books.items():
            silence = (self.awake - books.heard_at) / S
            assert silence <= self.settings.engines.timeout_s + 30, f"engine {number} is silent for {silence:.0f} s"
        for books in hosts:
            assert books.booked or books.version not in waits, "an empty engine, and requests of its version wait"
        late = {self._host_of(life.version) for life in lives if any(self._may_wait(sample) for sample in life.samples)}
        rests = self.youngest not in waits | late
        assert not (free and rests and self._could_open()), "a free seat, and nothing was opened"
        old = [b for b in hosts if not b.booked and b.version != self.youngest]
        self._check_given_back(now, bool(old) and not free and rests and self._could_open())
        if self.settings.scheduling.legacy_fill and row is not None:
            old = [b for b in hosts if b.version != self.youngest and b.version not in waits | late]
            self._check_filled([b for b in old if sum(b.booked.values()) + tokens <= b.kv_tokens_max])
        self._check_progress(now)

    def _check_given_back(self, now: float, kept: bool) -> None:
        """Policy `packed`: no engine of an old version is empty for longer than a period if the youngest needs it."""
        other = self.mode in ("one_step", "partial") or self.settings.scheduling.partition != "packed"
        if other or not kept or any(books.loading is not None for books in self.books.values()):
            self.kept_since = None
        elif self.kept_since is None:
            self.kept_since = self.now
        elif now >= self.drawn.quiet_at:
            kept_s = (self.now - self.kept_since) / S
            limit = 2 * (self.settings.scheduling.rebalance_period_s + TICK_S)
            assert kept_s <= limit, f"an engine of an old version is empty for {kept_s:.0f} s, the youngest needs it"

    def _check_filled(self, roomy: Sequence[Books]) -> None:
        """`legacy_fill`: no free seat of an old version that a group of it could have, the oldest one's apart."""
        lives = [life.version for life in self.live.values()]
        for books in roomy if len(lives) < self.settings.live_max else ():
            version = books.version
            assert version is not None
            fits = feasible([*lives, version], self.step_next, self.batch, self.K, self.steps)
            late = version <= self.step_next - self.K or not fits
            assert late or len(books.booked) == books.seats, f"a free seat of version {version}, not filled"

    def _check_hosted(self, waits: set[int], asking: set[int]) -> None:
        """As many versions as there are engines have one, oldest first (while none loads)."""
        if any(books.loading is not None for books in self.books.values()):
            return
        hosted = {books.version for books in self.books.values()}
        count = min(len(self.books), 1 if self.mode == "one_step" else len(asking))
        for version in sorted(asking)[:count]:
            assert version in hosted or version not in waits, f"requests of version {version} wait, no engine has it"

    def _could_open(self) -> bool:
        if self.row_next not in self.rows or len(self.live) + 1 > self.settings.live_max:
            return False
        first_round = sum(life.purpose == "eval" for life in self.groups.values()) >= self.drawn.eval_rows
        last = deadline(self.youngest, self.K, self.steps)
        room = (last - self.step_next + 1) * (self.settings.live_max if self.mode == "oversample" else self.batch)
        return len(self.live) + 1 <= room and (first_round or not self.settings.evaluation.samples)

    def _check_progress(self, now: float) -> None:
        """I8, counted from the last batch, version or void; in the time of faults there is no bound."""
        limits, s = self.settings.engines, self.settings
        if now < self.drawn.quiet_at + 200:
            self.moved_at = max(self.moved_at, self.now)
            return
        bound = step_bound_s(
            requests=s.live_max * self.size + self.drawn.eval_rows * s.evaluation.samples,
            at_once=max(1, min(limits.seats, self.drawn.kv_tokens_max // self.drawn.tokens_per_request_max)),
            versions=self.K + 2,
            tries=s.scheduling.failures_max + 1,
            try_s=2 * (limits.request_timeout_s + TICK_S),
            swap_s=s.scheduling.rebalance_period_s + 2 * self.drawn.load_s + TICK_S,
            lost_s=limits.timeout_s + TICK_S,
            step_s=2 * self.drawn.step_s,
        )
        bound = min(bound, STUCK_S) + SLOW_WORDS_S
        assert self.now - self.moved_at <= bound * S, (
            f"nothing happened for {(self.now - self.moved_at) / S:.0f} s (I8): live {len(self.live)}, "
            f"complete {len(self.complete)}, evaluating {len(self.evaluating)}, step {self.step_next}, "
            f"published {self.published}"
        )

    def _all_rows_opened(self) -> bool:
        return self.rows_end is not None and len(self.rows) >= self.rows_end and self.row_next >= self.rows_end

    def _host_of(self, version: int) -> int:
        """Under which version samples of a group of `version` are to be sampled now."""
        if self.mode != "partial":
            return version
        return min((life.version for life in self.evaluating.values()), default=self.published)
