"""Whole runs whose trainer has several processes: one of them is killed; a run is resumed in another layout."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from pipelines.models import write_tiny
from schemas.settings import Settings
from tests.archive_checker import Run
from tests.integration import killing
from tests.integration.helpers_megatron import save
from tests.integration.killing import Death, assert_survived, chosen_rows, in_log, steps_of, until, until_step
from tests.integration.layouts import PIPELINE, TENSOR
from tests.integration.parts import LIMIT_S, TRAINED, process_of
from tests.integration.whole_run import assert_good, dora_run
from workers.runtime import clock
from workers.trainer.samples import samples_of
from workers.transport.weights.manifest import RawTensor, fingerprint
from workers.transport.weights.store import read_tensors

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]
STEPS = 6


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A setting: four heads in two groups."""
    write_tiny(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    return f"model={tmp_path / 'model'}"


def test_a_run_of_two_ranks_goes_on_after_one_of_them_was_killed(model: str, tmp_path: Path) -> None:
    """Real engines, tensor parallel 2. Rank 0 ends with rank 1; the supervisor starts both from the checkpoint."""
    settings = ("prefect.enabled=false", model, f"megatron.{TENSOR}=2", f"steps={STEPS}")
    with dora_run("tiny", tmp_path, *settings) as running:
        until_step(running, 2)
        process_of(running, "workers.trainer.learners.rank").kill()
        at = clock.now_us() / 1e6
        ran = running.wait(LIMIT_S)
        assert "rank_ended rank=1 code=-9" in (ran.run_dir / "logs" / "trainer.log").read_text()
        paid = assert_survived(ran, running, STEPS, [at])
    assert paid.restarts == 1


def test_a_rank_that_dies_while_a_snapshot_is_copied_costs_that_checkpoint_alone(model: str, tmp_path: Path) -> None:
    """Rank 1 copies its part of the second one: the first is complete, and the run goes on from there."""
    deaths = tmp_path / "deaths"
    copy, rank = "workers.trainer.learners.megatron_snapshot:_copy", "workers.trainer.learners.rank"
    death = Death(copy, "before", 4, within=rank)  # a rank copies two buckets for each
    settings = (model, f"megatron.{TENSOR}=2", f"steps={STEPS}")
    with TRAINED.run(tmp_path, *settings, environment=killing.dying(deaths, death)) as running:
        ran = running.wait(LIMIT_S)
        paid = assert_survived(ran, running, STEPS, killing.assert_died(deaths, death))
    log = (ran.run_dir / "logs" / "trainer.log").read_text()
    assert "rank_ended rank=1 code=-9" in log
    assert re.findall(r" trainer resumed step=(\d+) ", log) == ["0", "2"]
    assert paid.restarts == 1


@pytest.mark.parametrize("stop", ["asked", "killed"])
def test_a_run_that_stopped_in_two_tensor_parts_goes_on_in_two_stages(stop: str, model: str, tmp_path: Path) -> None:
    """Every version is, bit for bit, that of training the recorded batches straight in the same layouts; the last is
    that of one process, rounding apart. What a killed run announced after its checkpoint stays announced as it was."""
    with TRAINED.run(tmp_path, model, f"megatron.{TENSOR}=2") as before:
        until(lambda: in_log(before.run_dir, "trainer", " trainer checkpoint step=2"), before, "a checkpoint", LIMIT_S)
        if stop == "asked":
            before.popen.send_signal(signal.SIGINT)
            assert before.wait(LIMIT_S).code == 130
        killing.kill_all(before)
    run_dir, once = before.run_dir, [step for _, step in steps_of(before.run_dir)]
    settings = Run(run_dir).settings
    layout = (f"megatron.{TENSOR}=1", f"megatron.{PIPELINE}=2")
    with TRAINED.run(tmp_path, model, *layout, resume=True) as running:
        assert_good(running.wait(LIMIT_S), running, TRAINED.steps, faults=True)
    assert killing.rows_opened_wrongly(run_dir) == []
    cut = int(re.findall(r" trainer resumed step=(\d+) ", (run_dir / "logs" / "trainer.log").read_text())[-1])
    steps = [step for _, step in steps_of(run_dir)]
    assert steps == [*range(len(once)), *range(cut, TRAINED.steps)]
    assert cut == len(once) if stop == "asked" else 2 <= cut <= len(once)

    run, saved = Run(run_dir), tmp_path / "saved"
    announced = {version: record["fingerprint"] for version, record in run.weights.items()}
    old = _straight(run, settings, range(TRAINED.steps), save_at=(cut, saved))
    new = _straight(run, run.settings, range(cut, TRAINED.steps), restored=saved)
    alone = _straight(run, settings.model_copy(update={"megatron": {}}), range(TRAINED.steps))
    print(f"trained {steps}, in the second layout from {cut} on")
    for version, made in announced.items():
        may = [one.fingerprints[version] for one in (old, new) if version in one.fingerprints]
        assert made in (may[:1] if version <= cut else may if version <= len(once) else may[1:]), f"version {version}"
    last = run_dir / "weights" / f"v{TRAINED.steps:06d}"
    assert len(announced) == TRAINED.steps + 1
    assert announced[TRAINED.steps] == fingerprint(read_tensors(last))
    assert _largest_difference({one.name: _array(one) for one in read_tensors(last)}, alone.weights) < 5e-4


@dataclass(frozen=True)
class _Trained:
    """Fingerprints by version, the first one included, and the last weights."""

    fingerprints: dict[int, str]
    weights: dict[str, numpy.ndarray]


def _straight(
    run: Run, settings: Settings, steps: range, *, restored: Path | None = None, save_at: tuple[int, Path] | None = None
) -> _Trained:
    """Train the archived batches of these steps one after the other, in the settings' layout."""
    learner, rows = killing.learner_of(settings), chosen_rows(run)
    try:
        if restored is not None:
            learner.restore(restored)
        made = {steps.start: fingerprint(learner.export())}
        for step in steps:
            if save_at is not None and save_at[0] == step:
                save(learner, save_at[1])
            learner.train(samples_of(rows[step], step, settings), step)
            made[step + 1] = fingerprint(learner.export())
        return _Trained(made, {one.name: _array(one) for one in learner.export()})
    finally:
        learner.close()


def _array(tensor: RawTensor) -> numpy.ndarray:
    assert tensor.dtype == "F32"
    return numpy.frombuffer(bytes(tensor.data), numpy.float32).reshape(tensor.shape)


def _largest_difference(one: Mapping[str, numpy.ndarray], other: Mapping[str, numpy.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(numpy.abs(one[name] - other[name]).max()) for name in one)
