"""Truncated sampling (case D02): vLLM's log-probs are of what top-p and top-k kept, the mass that they kept comes
along, and both together are the log-probs of transformers and of the trainer over the whole vocabulary. A tiny model,
float32."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.messages import RequestRecord
from schemas.settings import Sampling
from tests.archive_checker import Run
from tests.integration.helpers_megatron import hf_model, learner_of, write_family
from tests.integration.helpers_vllm import Host, RemoteEngine, open_host, request, settings_for
from tests.integration.parts import LIMIT_S
from tests.integration.whole_run import assert_good, dora_run
from workers.rollout.engines.base import Tokens
from workers.trainer.learners.base import Sample

pytestmark = pytest.mark.integration
TEMPERATURE = 0.8
TOLERANCE = 1e-4
CASES = [(0.8, 0), (1.0, 5), (0.7, 20)]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with open_host() as opened:
        yield opened


def drawn(engine: RemoteEngine, requests: list[RequestRecord]) -> list[tuple[Sample, list[float]]]:
    """Samples with log-probs as drawn, and what was kept of each draw."""
    parts: dict[object, list[Tokens]] = {one.key: [] for one in requests}
    for one in requests:
        engine.add(one)
    while any(not of_one or of_one[-1].finish is None for of_one in parts.values()):
        for part in engine.step():
            parts[part.key].append(part)
    made = []
    for one in requests:
        ids = [token for part in parts[one.key] for token in part.ids]
        logprobs = [value for part in parts[one.key] for value in part.logprobs]
        kept = [value for part in parts[one.key] for value in part.kept or ()]
        made.append((Sample(one.prompt_ids, ids, logprobs, [True] * len(ids), TEMPERATURE, 0.0), kept))
    return made


def expected_mass(probs: torch.Tensor, top_p: float, top_k: int) -> float:
    """Of one draw: the k likeliest, and of those the fewest that reach top_p of what they have together."""
    ordered = probs.sort(descending=True).values
    if top_k:
        ordered = ordered[:top_k]
    reached = (ordered / ordered.sum()).cumsum(0)
    count = int((reached < top_p).sum()) + 1
    return float(ordered[:count].sum())


@pytest.mark.parametrize(("top_p", "top_k"), CASES)
def test_log_prob_and_kept_mass_make_the_log_prob_of_the_whole(
    host: Host, tmp_path: Path, top_p: float, top_k: int
) -> None:
    write_family(tmp_path, "llama-tied")
    sampling = Sampling(temperature=TEMPERATURE, top_p=top_p, top_k=top_k)
    engine = RemoteEngine(host, "keeps", settings_for(tmp_path, sampling=sampling), tmp_path, cold=0)
    named = {"version": 0, "temperature": TEMPERATURE, "top_p": top_p, "top_k": top_k, "max_new_tokens": 12}
    requests = [request(range(7 * group, 7 * group + 9), group=group, **named) for group in range(4)]  # type: ignore[arg-type]
    samples = drawn(engine, requests)
    engine.close()
    model, learner, count = hf_model(tmp_path), learner_of(tmp_path), 0
    for one, kept in samples:
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1] / TEMPERATURE
        whole = logits.log_softmax(-1)
        masses = [expected_mass(row.exp(), top_p, top_k) for row in whole]
        assert all(mass < 0.9 for mass in masses), "something was cut of every draw"
        assert torch.tensor(kept).exp().tolist() == pytest.approx(masses, abs=TOLERANCE)
        together = [value + mass for value, mass in zip(one.logprobs, kept, strict=True)]
        of_whole = whole.gather(1, torch.tensor(one.response_ids)[:, None])[:, 0].tolist()
        assert together == pytest.approx(of_whole, abs=TOLERANCE)
        assert together == pytest.approx(learner.logprobs([one])[0], abs=TOLERANCE)
        count += len(kept)
    assert count > 30


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_whole_run_of_truncated_sampling_is_on_policy_where_lag_is_0(tmp_path: Path) -> None:
    """Without the kept mass each token would be log(0.9) away: a k3 of about 0.005."""
    with dora_run("tiny", tmp_path, "prefect.enabled=false", "steps=4", "sampling.top_p=0.9") as running:
        ran = running.wait(LIMIT_S)
        assert_good(ran, running, 4)
    run = Run(ran.run_dir)
    masses = [mass for _, row in run.token_rows(("trajectories",)) for mass in row["kept_logmass"]]
    assert all(math.log(0.9) - 1e-4 <= mass <= 1e-6 for mass in masses)
    assert min(masses) < math.log(0.95)
    apart = [one["metrics"]["lag_0_mismatch_kl"] for one in run.weights.values() if "lag_0_tokens" in one["metrics"]]
    print(f"{len(masses)} tokens; k3 of lag 0 by step: {apart}")
    assert apart[0] < 1e-6
    assert max(apart) < 1e-4
