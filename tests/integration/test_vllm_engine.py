"""vLLM serves what it says: swaps against cold engines, fingerprints, the probe, seeds, log-probs. Tiny models."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.device import best_dtype
from schemas.messages import RequestRecord, WeightsRecord
from tests.integration.helpers_vllm import Host, RemoteEngine, open_host, request, run_all, sample, settings_for
from workers.runtime.errors import BadInput, ProbeMismatch, WeightsUnavailable
from workers.transport.weights.manifest import MANIFEST, fingerprint, probe_ids
from workers.transport.weights.store import read_tensors

pytestmark = pytest.mark.integration

VOCABULARY = 512
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}
"""Largest |log-prob difference| between a swapped and a cold engine on equal batches."""
PROMPTS = [tuple((7 * place + 31 * row) % VOCABULARY for place in range(100)) for row in range(3)]
"""Longer than three KV blocks, so that the prefix cache holds something that could be stale."""
TIED = [(family, True, dtype) for family in ("llama", "qwen2", "qwen3") for dtype in ("float32", "bfloat16")]
ALL = [*TIED, ("llama", False, "float32"), ("llama", False, "bfloat16")]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with open_host() as opened:
        yield opened


@dataclass
class Pair:
    """Versions 0 and 1 are different random models; `swapped` started on 0, `cold` was loaded from 1 by vLLM itself."""

    host: Host
    root: Path
    dtype: str
    weights: list[WeightsRecord]
    folders: list[Path]
    swapped: RemoteEngine
    cold: RemoteEngine


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, tied, dtype = request.param
    root = tmp_path_factory.mktemp("pair")
    made = [host.call("publish_tiny", root, version, family=family, tied=tied, dtype=dtype) for version in (0, 1)]
    weights, folders = [one[0] for one in made], [one[1] for one in made]
    settings = settings_for(folders[0], dtype=dtype)
    swapped = RemoteEngine(host, "swapped", settings, folders[0])
    cold = RemoteEngine(host, "cold", settings, folders[1], cold=1)
    yield Pair(host, root, dtype, weights, folders, swapped, cold)
    swapped.close()
    cold.close()


only_llama = pytest.mark.parametrize("pair", [("llama", True, "float32")], indirect=True)


def requests_of(version: int, **changes: Any) -> list[RequestRecord]:
    return [
        request(ids, version=version, group=group, index=index, **changes)
        for group, ids in enumerate(PROMPTS)
        for index in range(2)
    ]


def difference(some: dict[Any, Any], others: dict[Any, Any]) -> float:
    """Largest |log-prob difference|, infinite if any id differs."""
    for key, (ids, _) in some.items():
        if ids != others[key][0]:
            return float("inf")
    return max(float(abs(a - b)) for key in some for a, b in zip(some[key][1], others[key][1], strict=True))


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_a_swapped_engine_answers_as_a_cold_one_on_strongly_changed_weights(pair: Pair) -> None:
    pair.swapped.load(pair.weights[0])
    old = run_all(pair.swapped, requests_of(0))
    pair.swapped.load(pair.weights[1])
    new = run_all(pair.swapped, requests_of(1))
    assert difference(new, run_all(pair.cold, requests_of(1))) <= TOLERANCE[pair.dtype]
    assert difference(new, old) > 0.1


@pytest.mark.full
@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_twenty_swaps_later_an_engine_still_answers_as_a_cold_one(pair: Pair) -> None:
    """Every second swap is to what the cold engine serves; half of these are prepared beside requests, half are not."""
    cold, away, first = run_all(pair.cold, requests_of(1)), [], None
    for swap in range(20):
        version = swap % 2
        if swap % 4 >= 2:
            busy = requests_of(1 - version, attempt=1, max_new_tokens=400)
            for one in busy:
                pair.swapped.add(one)
            while not pair.swapped.prepare(pair.weights[version]):
                pair.swapped.step()
            pair.swapped.stop(tuple(one.key for one in busy))
        pair.swapped.load(pair.weights[version])
        found = run_all(pair.swapped, requests_of(version))
        if version:
            away.append(difference(found, cold))
        else:
            first = first or found
            assert difference(found, first) == 0.0, f"swap {swap + 1}: the same version as before"
    print(f"largest difference of log-probs after each swap to version 1: {away}")
    assert max(away) <= TOLERANCE[pair.dtype]


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_after_each_swap_the_served_fingerprint_is_the_new_one_of_the_manifest(pair: Pair) -> None:
    """C02: also where the embeddings are tied."""
    served = []
    for version in (0, 1, 0):
        pair.swapped.load(pair.weights[version])
        served.append(pair.swapped.fingerprint)
        manifest = json.loads((pair.folders[version] / MANIFEST).read_text())
        assert served[-1] == manifest["fingerprint"] == fingerprint(read_tensors(pair.folders[version]))
    assert served[0] == served[2] != served[1]


@pytest.mark.parametrize("pair", TIED, indirect=True)
def test_without_repacking_a_tied_output_layer_is_stale_and_the_probe_sees_it(pair: Pair) -> None:
    """A CPU without instructions for bfloat16 keeps no copy of such a layer: there nothing can be stale."""
    keeps_a_copy = pair.dtype == "float32" or best_dtype() == "bfloat16"
    pair.swapped.load(pair.weights[0])
    pair.host.call("without_repacking", True)
    try:
        with pytest.raises(ProbeMismatch) if keeps_a_copy else contextlib.nullcontext():
            pair.swapped.load(pair.weights[1])
        assert (pair.swapped.version is None) == keeps_a_copy
        pair.host.call("serve_anyway", "swapped", 1)
        served = run_all(pair.swapped, requests_of(1))
    finally:
        pair.host.call("without_repacking", False)
    away = difference(served, run_all(pair.cold, requests_of(1)))
    assert away > 0.1 if keeps_a_copy else away <= TOLERANCE[pair.dtype]


@pytest.mark.parametrize("pair", [("llama", True, "float32"), ("qwen2", True, "bfloat16")], indirect=True)
def test_a_version_is_prepared_while_requests_of_the_old_one_decode_undisturbed(pair: Pair) -> None:
    pair.swapped.load(pair.weights[0])
    alone = run_all(pair.swapped, requests_of(0, max_new_tokens=200))
    pair.swapped.load(pair.weights[0])
    requests = requests_of(0, max_new_tokens=200)
    for one in requests:
        pair.swapped.add(one)
    beside: dict[Any, Any] = {one.key: ([], []) for one in requests}
    prepared_after = None
    for steps in range(200):
        if prepared_after is None and pair.swapped.prepare(pair.weights[1]):
            prepared_after = steps
        for part in pair.swapped.step():
            beside[part.key][0].extend(part.ids)
            beside[part.key][1].extend(part.logprobs)
    assert prepared_after
    assert difference(beside, alone) == 0.0
    pair.swapped.load(pair.weights[1])
    new = run_all(pair.swapped, requests_of(1))
    assert difference(new, run_all(pair.cold, requests_of(1))) <= TOLERANCE[pair.dtype]


@only_llama
def test_an_engine_loads_another_version_than_the_one_it_prepared(pair: Pair) -> None:
    pair.swapped.load(pair.weights[0])
    assert not pair.swapped.prepare(pair.weights[0])
    pair.swapped.load(pair.weights[1])
    assert pair.swapped.fingerprint == pair.weights[1].fingerprint
    assert difference(run_all(pair.swapped, requests_of(1)), run_all(pair.cold, requests_of(1))) <= 1e-5


@only_llama
def test_a_swap_is_whole_after_a_reload_of_vllms_own(pair: Pair) -> None:
    """That leaves wrapped loaders behind, which load nothing by then."""
    pair.swapped.load(pair.weights[0])
    pair.host.call("reload_by_vllm", "swapped", pair.folders[0])
    pair.swapped.load(pair.weights[1])
    assert difference(run_all(pair.swapped, requests_of(1)), run_all(pair.cold, requests_of(1))) <= 1e-5


@only_llama
def test_a_prompt_asked_twice_with_a_swap_between_reads_nothing_of_the_old_version(pair: Pair) -> None:
    """C01: prefix cache on, two versions, the same prompt twice."""

    def first_logprobs(engine: RemoteEngine, version: int) -> list[float]:
        one = request(PROMPTS[0], version=version, max_new_tokens=1)
        return run_all(engine, [one])[one.key][1]

    pair.swapped.load(pair.weights[0])
    first_logprobs(pair.swapped, 0)
    assert first_logprobs(pair.swapped, 0) == pytest.approx(first_logprobs(pair.swapped, 0), abs=1e-6)
    pair.swapped.load(pair.weights[1])
    assert first_logprobs(pair.swapped, 1) == pytest.approx(first_logprobs(pair.cold, 1), abs=1e-3)


@only_llama
def test_an_engine_that_starts_again_serves_the_version_that_it_loads(pair: Pair) -> None:
    """C03: a restart serves what it says."""
    again = RemoteEngine(pair.host, "again", settings_for(pair.folders[0]), pair.folders[0])
    born = again.version
    again.load(pair.weights[1])
    assert born is None
    assert (again.version, again.fingerprint) == (1, pair.weights[1].fingerprint)
    assert difference(run_all(again, requests_of(1)), run_all(pair.cold, requests_of(1))) <= 1e-5
    again.close()


@only_llama
def test_four_samples_of_a_prompt_differ_also_when_it_stands_in_two_rows(pair: Pair) -> None:
    """B07: the seed is the sample's, not the engine's."""
    pair.swapped.load(pair.weights[1])
    requests = [request(PROMPTS[0], version=1, group=group, index=index) for group in (5, 6) for index in range(4)]
    here, there = run_all(pair.swapped, requests), run_all(pair.cold, requests)
    assert len({tuple(ids) for ids, _ in here.values()}) == 8
    assert {key: ids for key, (ids, _) in here.items()} == {key: ids for key, (ids, _) in there.items()}


@only_llama
def test_a_request_that_moved_goes_on_as_the_one_that_stayed_without_its_kv_too(pair: Pair) -> None:
    pair.swapped.load(pair.weights[1])
    whole = request(PROMPTS[0], version=1, max_new_tokens=24)
    ids, logprobs = run_all(pair.cold, [whole])[whole.key]
    so_far = {"response_ids": tuple(ids[:8]), "logprobs": tuple(logprobs[:8]), "loss_mask": (True,) * 8}
    later = whole.model_copy(update={**so_far, "attempt": 1})
    rest, rest_logprobs = run_all(pair.swapped, [later])[later.key]
    assert rest == ids[8:]
    assert rest_logprobs == pytest.approx(logprobs[8:], abs=1e-5)
    all_ids = (*PROMPTS[0], *ids[:8], *rest)
    expected = pair.host.call("hf_logprobs", pair.folders[1], "float32", all_ids, 1.0)
    assert rest_logprobs == pytest.approx(expected[-16:], abs=1e-4)


@only_llama
def test_prompts_that_share_the_token_budget_with_seeds_do_not_kill_the_engine(pair: Pair) -> None:
    pair.swapped.load(pair.weights[1])
    long = tuple(place % VOCABULARY for place in range(450))
    requests = [request((*long, group), version=1, group=group, max_new_tokens=4) for group in range(8)]
    found = run_all(pair.swapped, requests)
    assert {len(ids) for ids, _ in found.values()} == {4}


@only_llama
def test_a_response_ends_at_an_end_token_of_the_generation_config(pair: Pair, tmp_path: Path) -> None:
    one = request(PROMPTS[0], version=1, max_new_tokens=12)
    ids, _ = run_all(pair.cold, [one])[one.key]
    end = next(place for place, token in enumerate(ids) if token not in ids[:place] and place >= 3)
    folder = tmp_path / "model"
    shutil.copytree(pair.folders[1], folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, ids[end]]}))
    ends = RemoteEngine(pair.host, "ends", settings_for(folder), folder, cold=1)
    ends.add(one)
    parts = [part for _ in range(20) for part in ends.step()]
    ends.close()
    assert [token for part in parts for token in part.ids] == ids[: end + 1]
    assert parts[-1].finish == "stop"


@only_llama
def test_weights_that_miss_their_probe_or_their_hash_are_not_served(pair: Pair) -> None:
    engine = pair.swapped
    source = pair.root / "model-1"
    off, _ = pair.host.call("publish_folder", pair.root, 7, source, "float32", probe_shift=0.01)
    with pytest.raises(ProbeMismatch, match="version 7"):
        engine.load(off)
    assert (engine.version, engine.fingerprint) == (None, "")
    said, folder = pair.host.call("publish_folder", pair.root, 8, source, "float32")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(WeightsUnavailable, match=r"model\.safetensors"):
        engine.load(said)
    engine.load(pair.weights[1])
    assert engine.fingerprint == pair.weights[1].fingerprint


@only_llama
def test_a_manifest_with_another_fingerprint_than_the_loaded_tensors_is_not_believed(pair: Pair) -> None:
    said, folder = pair.host.call("publish_folder", pair.root, 9, pair.root / "model-1", "float32")
    other = pair.weights[0].fingerprint
    value = (folder / MANIFEST).read_text().replace(said.fingerprint, other).encode()
    (folder / MANIFEST).write_bytes(value)
    lie = said.model_copy(
        update={"fingerprint": other, "manifest_sha256": hashlib.sha256(value).hexdigest()},
    )
    with pytest.raises(WeightsUnavailable, match=said.fingerprint):
        pair.swapped.load(lie)
    assert pair.swapped.version is None


@only_llama
def test_the_probe_is_the_one_of_another_implementation(pair: Pair) -> None:
    pair.swapped.load(pair.weights[1])
    ids = probe_ids(VOCABULARY)
    expected = pair.host.call("hf_logprobs", pair.folders[1], "float32", ids, 1.0)
    assert pair.host.call("probe", "swapped", ids) == pytest.approx(expected, abs=1e-4)


@only_llama
def test_log_probs_are_those_of_the_distribution_at_its_temperature(pair: Pair) -> None:
    answers = sample(pair.folders[1], [PROMPTS[0][:20]], 2, 0.6, "float32", 8, host=pair.host)
    for prompt_ids, response_ids, logprobs in answers:
        expected = pair.host.call("hf_logprobs", pair.folders[1], "float32", (*prompt_ids, *response_ids), 0.6)
        assert list(logprobs) == pytest.approx(expected[-8:], abs=1e-4)


def test_settings_that_vllm_cannot_keep_are_bad_input(host: Host, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no_such_key"):
        RemoteEngine(host, "none", settings_for(tmp_path, vllm={"no_such_key": 1}), tmp_path)
