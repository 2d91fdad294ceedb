"""What every engine does, whatever is inside it. The paced one runs always, vLLM (a tiny model) as `integration`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.messages import RequestRecord, WeightsRecord
from schemas.settings import Engines, Sampling
from tests.integration.helpers_vllm import RemoteEngine, open_host, request, run_all, settings_for
from workers.rollout.engines.base import Engine
from workers.rollout.engines.paced_engine import KV_BYTES_PER_TOKEN, PacedEngine

SEATS = 8
LENGTH_MAX = 512
VLLM_KV_MIB = 1
"""2048 tokens of the tiny model in float32."""
PACED_KV_MIB = 2048 * KV_BYTES_PER_TOKEN >> 20
PROMPT = tuple(range(10, 50))


@dataclass
class Case:
    """An engine and two versions for it. `born`: the version that it served before its first load."""

    engine: Engine
    weights: tuple[WeightsRecord, WeightsRecord]
    born: int | None


def _announced(version: int) -> WeightsRecord:
    fields = {"location": "", "manifest_sha256": "", "fingerprint": f"fingerprint-{version}"}
    return WeightsRecord(run="test", version=version, step=None, groups=(), trajectories=0, created_at=0, **fields)


@pytest.fixture(scope="module", params=["paced", pytest.param("vllm", marks=pytest.mark.integration)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    sampling = Sampling(ignore_eos=True)
    kv_mib = PACED_KV_MIB if request.param == "paced" else VLLM_KV_MIB
    engines = Engines(seats=SEATS, kv_mib=kv_mib, tokens_per_request_max=LENGTH_MAX)
    if request.param == "paced":
        paced = PacedEngine(settings_for(Path("none"), engines=engines, sampling=sampling), pace=0)
        yield Case(paced, (_announced(0), _announced(1)), paced.version)
        paced.close()
        return
    root = tmp_path_factory.mktemp("engine")
    with open_host() as host:
        made = [host.call("publish_tiny", root, one, family="llama", tied=True, dtype="float32") for one in (0, 1)]
        folder = made[0][1]
        remote = RemoteEngine(host, "contract", settings_for(folder, engines=engines, sampling=sampling), folder)
        yield Case(remote, (made[0][0], made[1][0]), remote.version)
        remote.close()


@pytest.fixture
def engine(case: Case) -> Iterator[Engine]:
    """Serving version 0, empty before and after."""
    case.engine.load(case.weights[0])
    yield case.engine
    assert case.engine.load_now().running == case.engine.load_now().waiting == 0
    assert case.engine.load_now().kv_tokens == 0


def wanted(group: int, index: int = 0, *, tokens: int = 12, prompt: tuple[int, ...] = PROMPT) -> RequestRecord:
    return request(prompt, version=0, group=group, index=index, max_new_tokens=tokens)


def test_an_engine_serves_nothing_until_its_first_load(case: Case) -> None:
    assert case.born is None


def test_a_load_serves_the_announced_version_and_fingerprint(case: Case, engine: Engine) -> None:
    for weights in (case.weights[1], case.weights[0]):
        engine.load(weights)
        assert (engine.version, engine.fingerprint) == (weights.version, weights.fingerprint)


def test_a_request_gets_its_tokens_with_a_log_prob_each_and_ends_once(engine: Engine) -> None:
    one = wanted(1)
    engine.add(one)
    parts = [part for _ in range(40) for part in engine.step()]
    assert {part.key for part in parts} == {one.key}
    assert [part.finish for part in parts if part.finish] == ["length"]
    assert parts[-1].finish == "length"
    assert sum(len(part.ids) for part in parts) == 12
    assert all(len(part.ids) == len(part.logprobs) for part in parts)
    assert all(math.isfinite(one) and one <= 1e-6 for part in parts for one in part.logprobs)


def test_an_empty_engine_steps_to_nothing(engine: Engine) -> None:
    assert engine.step() == []


def test_requests_beyond_the_seats_wait_and_all_end(engine: Engine) -> None:
    requests = [wanted(group) for group in range(2 * SEATS)]
    for one in requests:
        engine.add(one)
    ended = 0
    for _ in range(200):
        ended += sum(part.finish is not None for part in engine.step())
        assert engine.load_now().running <= SEATS
        if ended == len(requests):
            return
    raise AssertionError(f"{ended} of {len(requests)} ended")


def test_requests_that_outgrow_the_kv_cache_together_still_all_end(engine: Engine) -> None:
    requests = [wanted(group, tokens=400) for group in range(SEATS)]
    assert SEATS * (len(PROMPT) + 400) > engine.kv_tokens_max
    for one in requests:
        engine.add(one)
    got = dict.fromkeys((one.key for one in requests), 0)
    for _ in range(5000):
        for part in engine.step():
            got[part.key] += len(part.ids)
        assert engine.load_now().kv_tokens <= engine.kv_tokens_max
        if set(got.values()) == {400}:
            return
    raise AssertionError(f"tokens after 5000 steps: {got}")


def test_a_stopped_request_says_nothing_more_and_the_others_go_on(engine: Engine) -> None:
    stopped, stays = wanted(1), wanted(2)
    engine.add(stopped)
    engine.add(stays)
    before = [part for _ in range(3) for part in engine.step()]
    assert {part.key for part in before} == {stopped.key, stays.key}
    engine.stop((stopped.key,))
    after = [part for _ in range(40) for part in engine.step()]
    assert {part.key for part in after} == {stays.key}
    assert after[-1].finish == "length"


def test_a_request_that_waits_can_be_stopped(engine: Engine) -> None:
    requests = [wanted(group) for group in range(SEATS + 1)]
    for one in requests:
        engine.add(one)
    engine.step()
    engine.stop((requests[-1].key,))
    after = {part.key for _ in range(40) for part in engine.step()}
    assert after == {one.key for one in requests[:-1]}


def test_a_stop_of_all_lets_the_engine_swap(case: Case, engine: Engine) -> None:
    requests = [wanted(group) for group in range(3)]
    for one in requests:
        engine.add(one)
    engine.step()
    engine.stop(tuple(one.key for one in requests))
    engine.load(case.weights[1])
    assert engine.version == 1


def test_a_request_that_goes_on_gets_only_what_is_left(engine: Engine) -> None:
    whole = wanted(1)
    ids, logprobs = run_all(engine, [whole])[whole.key]
    so_far = {"response_ids": tuple(ids[:5]), "logprobs": tuple(logprobs[:5]), "loss_mask": (True,) * 5}
    later = whole.model_copy(update={**so_far, "attempt": 1})
    assert len(run_all(engine, [later])[later.key][0]) == 7


def test_a_request_longer_than_the_limit_is_a_value_error_and_takes_no_place(engine: Engine) -> None:
    with pytest.raises(ValueError, match=f"tokens_per_request_max = {LENGTH_MAX}"):
        engine.add(wanted(1, tokens=LENGTH_MAX - len(PROMPT) + 1))
    longest = wanted(2, tokens=4, prompt=tuple(range(10, 10 + 400)) + tuple(range(108)))
    assert len(run_all(engine, [longest])[longest.key][0]) == 4


def test_a_request_with_nothing_left_to_sample_is_a_value_error(engine: Engine) -> None:
    with pytest.raises(ValueError):
        engine.add(wanted(1, tokens=2).model_copy(update={"response_ids": (1, 2)}))
    with pytest.raises(ValueError):
        engine.add(wanted(1, prompt=()))


def test_the_same_request_gets_the_same_tokens_and_each_other_sample_differs(engine: Engine) -> None:
    requests = [wanted(group, index) for group in (1, 2) for index in range(4)]
    first, second = run_all(engine, requests), run_all(engine, requests)
    assert {key: ids for key, (ids, _) in first.items()} == {key: ids for key, (ids, _) in second.items()}
    assert len({tuple(ids) for ids, _ in first.values()}) == len(requests)


def test_kv_is_counted_while_a_request_runs(engine: Engine) -> None:
    one = wanted(1)
    engine.add(one)
    engine.step()
    load = engine.load_now()
    assert (load.running, load.waiting) == (1, 0)
    assert len(PROMPT) <= load.kv_tokens <= engine.kv_tokens_max
    engine.stop((one.key,))
