"""Engine and trainer compute the same log-probs of the same tokens at the sampling temperature (case D01)."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.models import resolve_model
from tests.integration.helpers_megatron import FAMILIES, learner_of, samples_of, write_family
from tests.integration.helpers_vllm import (
    Answer,
    Host,
    RemoteEngine,
    announcement,
    open_host,
    request,
    run_all,
    sample,
    settings_for,
)
from workers.trainer.learners.base import Sample
from workers.transport.weights.manifest import probe_ids
from workers.transport.weights.store import Store

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


@pytest.mark.parametrize("model", ["builtin:tiny", pytest.param("builtin:smollm2", marks=pytest.mark.full)])
def test_first_and_all_tokens_have_one_log_prob_in_engine_and_trainer(model: str, host: Host, tmp_path: Path) -> None:
    folder = resolve_model(model, MODELS_FOLDER if model == "builtin:smollm2" else tmp_path)
    prompts = [[5, 17, 301, 44], [9] * 11, list(range(40, 61))]
    samples = []
    for temperature in (0.7, 1.0):
        samples += as_samples(sample(folder, prompts, 2, temperature, "float32", 12, host=host), temperature)
    found = learner_of(folder).logprobs(samples)
    differences = differences_of(samples, found)
    firsts = [math.exp(values[0] - one.logprobs[0]) for one, values in zip(samples, found, strict=True)]
    assert sum(differences) / len(differences) <= TOLERANCE
    assert firsts == pytest.approx([1.0] * len(firsts), abs=1e-3)


def differences_of(samples: list[Sample], found: list[list[float]]) -> list[float]:
    return [
        abs(ours - theirs)
        for one, values in zip(samples, found, strict=True)
        for ours, theirs in zip(values, one.logprobs, strict=True)
    ]


@pytest.mark.parametrize(
    "family", [name if name == "qwen3-tied" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_an_engine_that_loads_what_training_exported_gives_the_trainers_log_probs(
    family: str, host: Host, tmp_path: Path
) -> None:
    """Of every family: the engine starts on other weights, and the trained ones are far from those of the folder."""
    folder = tmp_path / "model"
    write_family(folder, family)
    learner = learner_of(folder, learning_rate=3e-2)
    before = learner.probe(probe_ids(512))
    learner.train(samples_of(1))
    probe = learner.probe(probe_ids(512))
    assert max(abs(a - b) for a, b in zip(before, probe, strict=True)) > 0.1
    store = Store(tmp_path / "weights")
    made = store.publish(1, learner.export(), model_folder=folder, probe_logprobs=probe, dtype="float32")
    engine = RemoteEngine(host, "loads", settings_for(folder), folder)
    engine.load(announcement(1, made))
    requests = [
        request(range(10 + group, 60 + group), version=1, group=group, index=index, temperature=0.8)
        for group in range(2)
        for index in range(2)
    ]
    answers = run_all(engine, requests)
    engine.close()
    samples = as_samples(
        [(one.prompt_ids, tuple(answers[one.key][0]), tuple(answers[one.key][1])) for one in requests], 0.8
    )
    differences = differences_of(samples, learner.logprobs(samples))
    assert len(differences) > 40
    assert sum(differences) / len(differences) <= TOLERANCE
