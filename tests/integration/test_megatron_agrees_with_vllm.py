"""Engine and trainer compute the same log-probs of the same tokens at the sampling temperature (case D01)."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.models import resolve_model
from tests.integration.helpers_megatron import learner_of
from tests.integration.helpers_vllm import Answer, Host, open_host, sample
from workers.trainer.learners.base import Sample

pytestmark = pytest.mark.integration
MODELS_FOLDER = Path(__file__).parents[2] / ".models"
TOLERANCE = 1e-4
"""Mean |difference| in nats, float32."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with open_host() as opened:
        yield opened


def as_samples(answers: list[Answer], temperature: float) -> list[Sample]:
    return [
        Sample(prompt, response, logprobs, [True] * len(response), temperature, 0.0)
        for prompt, response, logprobs in answers
    ]


@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:smollm2"])
def test_first_and_all_tokens_have_one_log_prob_in_engine_and_trainer(model: str, host: Host, tmp_path: Path) -> None:
    folder = resolve_model(model, MODELS_FOLDER if model == "builtin:smollm2" else tmp_path)
    prompts = [[5, 17, 301, 44], [9] * 11, list(range(40, 61))]
    samples = []
    for temperature in (0.7, 1.0):
        samples += as_samples(sample(folder, prompts, 2, temperature, "float32", 12, host=host), temperature)
    found = learner_of(folder).logprobs(samples)
    differences = [
        abs(ours - theirs)
        for one, values in zip(samples, found, strict=True)
        for ours, theirs in zip(values, one.logprobs, strict=True)
    ]
    firsts = [math.exp(values[0] - one.logprobs[0]) for one, values in zip(samples, found, strict=True)]
    assert sum(differences) / len(differences) <= TOLERANCE
    assert firsts == pytest.approx([1.0] * len(firsts), abs=1e-3)
