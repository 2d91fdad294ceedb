"""The simulator's arithmetic, by hand: lengths, costs, bounds, and one engine."""

import math
import random
from statistics import fmean

import pytest

from pipelines.simulate.cost import CostModel, Split, bound_s, packed_s
from pipelines.simulate.engine import Engine
from pipelines.simulate.lengths import Empirical, Lognormal
from schemas import messages as m
from schemas.ids import RequestKey

COST = CostModel(t0_s=1.0, t1_s=0.5, prefill_tokens_per_s=10.0, kv_tokens_per_s=100.0, train_s=60.0)


def _engine(cost: CostModel = COST) -> Engine:
    return Engine(cost, 0, 0, 0.0, version=0)


def _issue(group: int, index: int = 0) -> m.Issue:
    where = {"attempt": 0, "version": 0, "engine": 0, "incarnation": 0, "sequence": 0}
    return m.Issue(group=group, index=index, **where, purpose="train", prompt_row=group, queued_at=0)


def _add(
    engine: Engine, now: float, group: int, length: int, *, index: int = 0, prompt: int = 20, had: int = 0
) -> None:
    engine.add(now, _issue(group, index), prompt=prompt, length=length, had=had, carried=had > 0)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_token() -> None:
    engine = _engine()
    _add(engine, 0.0, 1, length=4)
    assert engine.due() == pytest.approx(20 / 10 + 4 * 1.5)
    assert engine.done(7.9) == []
    assert [run.issue.group for run in engine.done(8.0)] == [1]
    assert engine.due() is None
    assert (engine.stall_s, engine.decode_s, engine.seat_s) == pytest.approx((2.0, 6.0, 6.0))


def test_a_second_request_slows_the_first_and_its_prefill_stops_it() -> None:
    """At 5 s the first has (5 - 2) / 1.5 = 2 tokens; 1 s of prefill; then both go at 2 s a token."""
    engine = _engine()
    _add(engine, 0.0, 1, length=4)
    _add(engine, 5.0, 2, length=3, prompt=10)
    assert engine.due() == pytest.approx(1 + 2 * 2.0)
    assert [run.issue.group for run in engine.done(10.0)] == [1]
    assert engine.due() == pytest.approx(1.5)
    assert [run.issue.group for run in engine.done(11.5)] == [2]


def test_samples_of_one_group_share_the_prefill_of_their_prompt() -> None:
    engine = _engine()
    _add(engine, 0.0, 1, length=2)
    _add(engine, 0.0, 1, length=2, index=1)
    assert engine.due() == pytest.approx(2.0 + 2 * 2.0)


def test_what_leaves_takes_the_tokens_it_has_and_goes_on_where_its_kv_is_carried_to() -> None:
    engine, other = _engine(), _engine()
    _add(engine, 0.0, 1, length=100)
    run = engine.take_out(2.0 + 10 * 1.5 + 0.7, RequestKey(1, 0, 0))
    assert run is not None
    assert engine.tokens(run) == 10
    assert engine.due() is None
    _add(other, 0.0, 1, length=100, had=10)
    assert other.due() == pytest.approx((20 + 10) / 100 + 90 * 1.5)


def test_without_a_carrier_a_move_is_prefilled_again() -> None:
    engine = _engine(COST.model_copy(update={"kv_tokens_per_s": 0.0}))
    _add(engine, 0.0, 1, length=100, had=10)
    assert engine.due() == pytest.approx((20 + 10) / 10 + 90 * 1.5)


def test_an_engine_that_is_emptied_gives_all_back_and_forgets_prompts() -> None:
    engine = _engine()
    _add(engine, 0.0, 1, length=5)
    _add(engine, 0.0, 2, length=5)
    assert [run.issue.group for run in engine.empty(3.0)] == [1, 2]
    assert (engine.due(), engine.stall, engine.prompts) == (None, 0.0, set())


def test_decoding_has_another_pace_while_the_trainer_trains() -> None:
    engine = _engine(COST.model_copy(update={"t0_busy_s": 3.0}))
    _add(engine, 0.0, 1, length=4)
    engine.settle(2.0 + 2 * 1.5)
    engine.busy = True
    assert engine.due() == pytest.approx(2 * 3.5)


def test_a_trainer_on_a_part_of_the_accelerators_takes_longer_in_proportion() -> None:
    assert Split(7, 16).train_s(COST) == pytest.approx(60 * 16 / 9)
    assert Split(16, 16).train_s(COST) == 60
    assert Split(3).train_s(COST) == 60


def test_the_work_bound_is_the_larger_of_trainer_and_packed_rollout_or_their_sum_in_turn() -> None:
    """4 engines of 10 seats: 6 s a token; 400 tokens are 10 a seat."""
    assert packed_s(COST, 400, engines=4, seats=10) == pytest.approx(60.0)
    assert bound_s(COST, Split(4, 8), 400, 10) == pytest.approx(120.0)
    assert bound_s(COST, Split(4, 16), 800, 10) == pytest.approx(120.0)
    assert bound_s(COST, Split(4, 4), 400, 10) == pytest.approx(120.0)
    assert bound_s(COST, Split(4), 400, 10) == pytest.approx(60.0)


def test_lengths_depend_on_seed_and_group_alone_and_have_the_mean_that_is_said() -> None:
    law = Lognormal(1_300.0, 1.1)
    assert law.draw(1, 2, 4, 30_000) == law.draw(1, 2, 4, 30_000) != law.draw(2, 2, 4, 30_000)
    drawn = [tokens for group in range(2_000) for tokens in law.draw(0, group, 16, 30_000)]
    assert (min(drawn) >= 1, max(drawn)) == (True, 30_000)
    assert fmean(drawn) == pytest.approx(law.mean(30_000), rel=0.02)
    assert Lognormal(50.0, 0.0).draw(0, 0, 3, 40) == [40, 40, 40]
    assert Lognormal(50.0, 0.0).mean(40) == 40


def test_the_mean_under_a_cap_is_the_integral_of_what_is_above() -> None:
    """E[min(X, c)] = the integral of P(X > x) from 0 to c."""
    law, cap = Lognormal(100.0, 0.8), 300
    above = [0.5 * math.erfc(math.log((x + 0.5) / 100.0) / (0.8 * math.sqrt(2))) for x in range(cap)]
    assert law.mean(cap) == pytest.approx(sum(above), rel=1e-3)


def test_a_group_of_an_archive_has_the_lengths_of_one_prompt() -> None:
    law = Empirical(((1, 2), (50, 60)))
    for group in range(20):
        drawn = set(law.draw(0, group, 8, 55))
        assert drawn <= {1, 2} or drawn <= {50, 55}
    assert law.mean(55) == pytest.approx((1.5 + 52.5) / 2)


def test_however_requests_come_an_engine_gives_each_its_tokens_and_no_time_is_lost() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine, now, ended = _engine(), 0.0, 0
    for group in range(200):
        now += rng.random() * 20
        ended += len(engine.done(now))
        _add(engine, now, group, length=rng.randint(1, 30), prompt=rng.randint(1, 40))
    while (due := engine.due()) is not None:
        now = engine.at + due
        ended += len(engine.done(now))
    assert ended == 200
    assert engine.stall_s + engine.decode_s <= now + 1e-6
