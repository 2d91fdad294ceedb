"""What every learner must do: the paced one, and Megatron on a tiny model."""

import dataclasses
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.models import write_tiny
from schemas.settings import Settings
from workers.trainer.learners.base import Learner, Sample
from workers.trainer.learners.paced_learner import PacedLearner
from workers.transport.weights.manifest import fingerprint, probe_ids

FIGURES = (
    "loss",
    "grad_norm",
    "ratio_mean",
    "ratio_max",
    "clip_low_share",
    "clip_high_share",
    "mismatch_kl",
    "entropy",
    "ess",
    "tokens",
    "nonfinite",
)


def make_settings(model: Path, kind: str) -> Settings:
    return Settings.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "steps": 1,
            "group_size": 4,
            "training": {"kind": kind, "learning_rate": 1e-3},
            "dataset": [{"path": "rows.jsonl"}],
        }
    )


def make_samples(seed: int = 0) -> list[Sample]:
    chance = random.Random(seed)
    samples = []
    for _ in range(2):
        prompt = [chance.randrange(500) for _ in range(chance.randrange(3, 9))]
        for index in range(4):
            response = [chance.randrange(500) for _ in range(chance.randrange(1, 9))]
            behaviour = [-6.0 - chance.random() / 10 for _ in response]
            samples.append(Sample(prompt, response, behaviour, [True] * len(response), 0.8, index - 1.5))
    return samples


@pytest.fixture(scope="module", params=["paced", pytest.param("megatron", marks=pytest.mark.integration)])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Learner]:
    model = tmp_path_factory.mktemp("model")
    settings = make_settings(model, request.param)
    if request.param == "paced":
        return lambda: PacedLearner(settings, pace=0.0)
    write_tiny(model)
    from workers.trainer.learners.megatron_learner import MegatronLearner

    return lambda: MegatronLearner(settings, model)


def test_two_learners_of_one_model_export_the_same_weights(make: Callable[[], Learner]) -> None:
    tensors = list(make().export())
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert fingerprint(tensors) == fingerprint(make().export())


def test_a_step_changes_the_weights_and_gives_finite_figures(make: Callable[[], Learner]) -> None:
    learner = make()
    before = fingerprint(learner.export())
    samples = make_samples()
    said = learner.train(samples)
    assert fingerprint(learner.export()) != before
    assert set(FIGURES) <= set(said)
    assert all(math.isfinite(value) for value in said.values())
    assert said["tokens"] == sum(len(sample.response_ids) for sample in samples)


def test_the_same_steps_give_the_same_weights(make: Callable[[], Learner]) -> None:
    first, second = make(), make()
    for learner in (first, second):
        for seed in range(2):
            learner.train(make_samples(seed))
    assert fingerprint(first.export()) == fingerprint(second.export())


def test_a_restored_learner_goes_on_as_the_one_that_saved(make: Callable[[], Learner], tmp_path: Path) -> None:
    learner = make()
    learner.train(make_samples(0))
    folder = tmp_path / "saved"
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    snapshot.write()
    snapshot.finish()
    after = learner.train(make_samples(1))
    other = make()
    other.restore(folder)
    assert other.train(make_samples(1)) == after
    assert fingerprint(other.export()) == fingerprint(learner.export())


def test_a_snapshot_that_is_written_while_training_goes_on_is_of_its_own_moment(
    make: Callable[[], Learner], tmp_path: Path
) -> None:
    learner, other = make(), make()
    learner.train(make_samples(0))
    before = fingerprint(learner.export())
    tmp_path.joinpath("saved").mkdir()
    snapshot = learner.snapshot(tmp_path / "saved")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(snapshot.write)
        after = learner.train(make_samples(1))
        writing.result()
    snapshot.finish()
    other.restore(tmp_path / "saved")
    assert fingerprint(other.export()) == before
    assert other.train(make_samples(1)) == after
    assert fingerprint(other.export()) == fingerprint(learner.export()) != before


def test_log_probs_and_probe_have_one_number_per_token(make: Callable[[], Learner]) -> None:
    learner = make()
    samples = make_samples()
    found = learner.logprobs(samples)
    assert [len(values) for values in found] == [len(sample.response_ids) for sample in samples]
    ids = probe_ids(512)
    probed = learner.probe(ids)
    assert len(probed) == len(ids) - 1
    assert all(value <= 0.0 for value in probed)
    assert learner.probe(ids) == probed


def test_a_batch_with_every_token_masked_is_reported_empty(make: Callable[[], Learner]) -> None:
    masked = [dataclasses.replace(sample, loss_mask=[False] * len(sample.response_ids)) for sample in make_samples()]
    said = make().train(masked)
    assert said["tokens"] == 0.0
    assert all(math.isfinite(value) for value in said.values())
