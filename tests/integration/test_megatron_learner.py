"""The Megatron learner against transformers and torch: parity, gradient, export, resume. Tiny models, one process."""

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pipelines.models import write_tiny
from tests.integration.helpers_megatron import hf_model, learner_of, samples_of, save, straight_logprobs, straight_step
from tests.unit.trainer_world import World
from workers.runtime.process import Process
from workers.trainer.checkpoint import Progress, Writer, latest_complete, progress_in
from workers.trainer.learners import megatron_cpu
from workers.trainer.learners.base import Sample
from workers.trainer.learners.megatron_learner import MegatronLearner
from workers.trainer.service import serve
from workers.transport.weights.manifest import PROBE_TOKENS, fingerprint, probe_differs, probe_ids
from workers.transport.weights.store import Store

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny(folder)
    return folder


def test_sequence_level_is_the_straight_loops_too(llama: Path) -> None:
    samples = samples_of(2)
    said = learner_of(llama, loss_level="sequence").train(samples)
    loss, norm = straight_step(hf_model(llama), samples, level="sequence", clip=(0.2, 0.28), learning_rate=1e-3)
    assert said["loss"] == pytest.approx(loss, abs=1e-6)
    assert said["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 100, 4096])
def test_micro_batches_of_any_size_make_one_gradient(llama: Path, budget: int) -> None:
    samples = samples_of(4)
    whole = learner_of(llama).train(samples)
    split = learner_of(llama, micro_batch_tokens=budget).train(samples)
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_each_of_several_updates_trains_its_own_whole_groups(llama: Path) -> None:
    samples = samples_of(5, groups=4)
    together = learner_of(llama, updates_per_step=2)
    said = together.train(samples)
    assert said["updates"] == 2.0
    apart = learner_of(llama)
    apart.train(samples[:8])
    apart.train(samples[8:])
    assert fingerprint(together.export()) == fingerprint(apart.export())


def test_groups_that_lost_samples_enter_one_update_each_all_the_same(llama: Path) -> None:
    """Groups of 4, 2, 3 and 4 samples."""
    samples = samples_of(5, groups=4)
    ragged = [*samples[:4], *samples[4:6], *samples[8:11], *samples[12:]]
    together = learner_of(llama, updates_per_step=2)
    assert together.train(ragged)["updates"] == 2.0
    apart = learner_of(llama)
    apart.train(ragged[:6])
    apart.train(ragged[6:])
    assert fingerprint(together.export()) == fingerprint(apart.export())


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(llama: Path) -> None:
    learner = learner_of(llama)
    samples = samples_of(6)
    before = fingerprint(learner.export())
    said = learner.train([dataclasses.replace(samples[0], advantage=math.inf), *samples[1:]])
    assert said["updates_skipped"] == 1.0
    assert fingerprint(learner.export()) == before
    assert learner.train(samples)["updates_skipped"] == 0.0
    assert fingerprint(learner.export()) != before


def test_a_masked_batch_changes_nothing_even_with_momentum(llama: Path) -> None:
    learner = learner_of(llama)
    samples = samples_of(7)
    learner.train(samples)
    before = fingerprint(learner.export())
    learner.train([dataclasses.replace(one, loss_mask=[False] * len(one.response_ids)) for one in samples])
    assert fingerprint(learner.export()) == before


def test_a_bfloat16_learner_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(llama: Path, tmp_path: Path) -> None:
    learner = learner_of(llama, dtype="bfloat16")
    for seed in range(3):
        learner.train(samples_of(seed))
    folder = tmp_path / "saved"
    save(learner, folder)
    expected = [learner.train(samples_of(seed)) for seed in (8, 9)]
    other = learner_of(llama, dtype="bfloat16")
    other.restore(folder)
    assert [other.train(samples_of(seed)) for seed in (8, 9)] == expected
    assert fingerprint(other.export()) == fingerprint(learner.export())


def test_whichever_file_of_a_checkpoint_is_torn_the_one_before_is_taken(llama: Path, tmp_path: Path) -> None:
    """G04, on the files that Megatron writes: each cut, emptied, with one bit changed, gone."""
    learner, writer = learner_of(llama), Writer(tmp_path, 2)
    for step in (1, 2):
        learner.train(samples_of(step))
        said = fingerprint(learner.export())
        progress = Progress(step=step, version=step, positions={}, fingerprint=said)
        assert writer.begin(progress, learner.snapshot) is None
        outcome = writer.wait()
        assert outcome is not None
        assert outcome.error is None
    writer.close()
    files = [path for path in (tmp_path / "step-000002").rglob("*") if path.is_file()]
    assert {"complete.json", "progress.json", "common.pt", ".metadata", "__0_0.distcp"} <= {one.name for one in files}
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    for file in files:
        whole, dice = file.read_bytes(), random.Random(f"{seed}/{file.name}")
        other = bytearray(whole)
        other[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        for torn in (whole[: dice.randrange(len(whole))], b"", bytes(other), None):
            file.unlink() if torn is None else file.write_bytes(torn)
            found = latest_complete(tmp_path)
            assert found is not None
            assert found.step == 1, file
        file.write_bytes(whole)
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 2
    other_learner = learner_of(llama)
    other_learner.restore(found.folder)
    assert fingerprint(other_learner.export()) == progress_in(found.folder).fingerprint == said


def test_small_steps_in_bfloat16_are_not_lost_to_rounding(llama: Path) -> None:
    learner = learner_of(llama, dtype="bfloat16", learning_rate=1e-6)
    first = fingerprint(learner.export())
    for seed in range(20):
        learner.train(samples_of(seed))
    assert fingerprint(learner.export()) != first


def test_the_probe_is_that_of_transformers(llama: Path) -> None:
    ids = probe_ids(512)
    with torch.no_grad():
        logits = hf_model(llama)(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    probed = learner_of(llama).probe(ids)
    assert len(probed) == PROBE_TOKENS - 1
    assert probed == pytest.approx(expected, abs=1e-5)


def test_each_samples_own_temperature_is_applied(llama: Path) -> None:
    cool, warm = samples_of(3, temperature=0.6), samples_of(3, temperature=1.0)
    mixed = [one if place % 2 else other for place, (one, other) in enumerate(zip(cool, warm, strict=True))]
    model, learner = hf_model(llama), learner_of(llama)
    with torch.no_grad():
        for sample, found in zip(mixed, learner.logprobs(mixed), strict=True):
            assert found == pytest.approx(straight_logprobs(model, sample).tolist(), abs=1e-5)


def test_figures_agree_with_the_log_probs(llama: Path) -> None:
    learner = learner_of(llama)
    samples = samples_of(1)
    now = learner.logprobs(samples)
    said = learner.train([dataclasses.replace(one, logprobs=found) for one, found in zip(samples, now, strict=True)])
    assert said["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert said["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert said["ess"] == pytest.approx(1.0, abs=1e-6)
    assert 0.0 < said["entropy"] < math.log(512)


class Crash(Exception):
    """The process is killed here."""


class CrashingLearner(MegatronLearner):
    """Stops its trainer after so many steps, or crashes instead of the step."""

    def watch(self, process: Process, steps: int, crash: bool) -> "CrashingLearner":
        self.process, self.left, self.crash = process, steps, crash
        return self

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        self.left -= 1
        if self.left == 0 and self.crash:
            raise Crash
        if self.left == 0:
            self.process.stopping.set()
        return super().train(samples, step)


def test_a_killed_trainer_trains_later_batches_again_to_the_same_weights(llama: Path, tmp_path: Path) -> None:
    training = {"kind": "megatron", "learning_rate": 1e-3, "checkpoint_every": 2}
    world = World(tmp_path, llama, dtype="bfloat16", training=training)
    for step in range(5):
        world.send_batch(world.batch(step))

    def run(steps: int, crash: bool) -> int:
        process = Process("trainer", world.settings, world.run_dir)
        learner = CrashingLearner(world.settings, llama).watch(process, steps, crash)
        return serve(process, world.bus, learner)

    with pytest.raises(Crash):
        run(4, crash=True)  # versions 0 to 3 are announced, the checkpoint stands on 2
    assert run(3, crash=False) == 0
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2, 3, 4, 5]
    assert [one.lineage for one in said] == [""] * 6
    assert len({one.fingerprint for one in said}) == 6
    folder, manifest = Store(tmp_path / "weights").open(said[-1])
    published = hf_model(folder, "bfloat16")
    ids = torch.tensor([manifest.probe_ids])
    with torch.no_grad():
        logits = published(ids).logits[0, :-1].float()
    probed = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert probe_differs(manifest.probe_logprobs, probed, "bfloat16") is None


def test_the_cpu_shim_is_there_exactly_where_no_gpu_is() -> None:
    assert megatron_cpu.installed() is not torch.cuda.is_available()
