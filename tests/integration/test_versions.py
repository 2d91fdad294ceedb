"""Several versions at once on real parts, for every K; and K = 0 against a synchronous loop that is written here."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from schemas.ids import sampling_seed
from schemas.messages import WeightsRecord
from schemas.settings import Settings
from tests.archive_checker import Run
from tests.integration.helpers_vllm import RemoteEngine, open_host, request, run_all
from tests.integration.killing import learner_of
from tests.integration.whole_run import ROOT, assert_good, dora_run
from workers.trainer.samples import samples_of
from workers.transport.weights.manifest import fingerprint

pytestmark = pytest.mark.integration
THREE = ("engines.count=3", "prefect.enabled=false")
STEPS = 8
SYNC_STEPS = 5
LONG = 200
"""Tokens of every fourth row, the others have 6: decoding them takes longer than a step of the trainer, so that a
version goes on with its long rows while the next one takes the short ones."""


@pytest.mark.parametrize(
    "k", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)], ids="K={}".format
)
def test_versions_overlap_within_the_window(tmp_path: Path, k: int) -> None:
    """Heavy-tailed rows on three engines: two versions or more at once, never more than the window or the engines."""
    with dora_run("tiny", tmp_path, *THREE, f"staleness_max={k}", f"steps={STEPS}", _heavy_tail(tmp_path)) as running:
        ran = running.wait()
        assert_good(ran, running, steps=STEPS)
    made = ran.summary
    at_once, moves = made.versions.hosted_max, made.migrations.count
    print(f"K = {k}: lag {made.lag.histogram}, {at_once} versions at once, {moves} moves")
    assert 2 <= at_once <= min(k + 1, 3)
    assert made.lag.max <= k
    assert sum(made.lag.histogram.values()) == STEPS * 16
    assert made.trajectories.duplicates_ignored == 0
    assert made.weights.fingerprint_first != made.weights.fingerprint_last
    assert made.reward.heldout_before is not None
    assert made.reward.heldout_after is not None
    assert made.faults.engine_lost == 0


def test_without_staleness_the_run_is_a_synchronous_loop(tmp_path: Path) -> None:
    """B02. K = 0: step n trains rows nB .. (n + 1)B, all sampled by version n: the tokens and weights are those of a
    plain loop that samples B prompts on one engine, trains on them, and starts over."""
    kept = (f"steps={SYNC_STEPS}", "scheduling.weights_keep=99")
    with dora_run("tiny", tmp_path, *THREE, "staleness_max=0", "evaluation.samples=0", *kept) as running:
        ran = running.wait()
        assert_good(ran, running, steps=SYNC_STEPS)
    print(f"K = 0: lag {ran.summary.lag.histogram}, {ran.summary.versions.hosted_max} versions at once")
    assert ran.summary.lag.histogram == {0: SYNC_STEPS * 16}
    assert ran.summary.versions.hosted_max == 1
    run = Run(ran.run_dir)
    trained = _rows_by_step(run)
    assert {row["version"] for rows in trained.values() for row in rows} == set(range(SYNC_STEPS))
    made = [run.weights[version]["fingerprint"] for version in range(SYNC_STEPS + 1)]
    assert len(set(made)) == SYNC_STEPS + 1, "each step must change the weights"
    with open_host() as host, contextlib.closing(learner_of(run.settings)) as learner:
        model = Path(run.settings.model)
        engine = RemoteEngine(host, "loop", run.settings, model)
        for step in range(SYNC_STEPS):
            assert fingerprint(learner.export()) == made[step]
            engine.load(WeightsRecord.model_validate({**run.weights[step]}))
            ours, theirs = _sampled(engine, run, step), {(row["group"], row["index"]): row for row in trained[step]}
            assert ours.keys() == theirs.keys()
            for key, (ids, logprobs) in ours.items():
                assert ids == theirs[key]["response_ids"], f"step {step}, group and index {key}"
                assert logprobs == pytest.approx(theirs[key]["logprobs"], abs=1e-4)
                assert theirs[key]["reward"] == pytest.approx(sum(one < 128 for one in ids) / len(ids))
            learner.train(samples_of(trained[step], step, run.settings), step)
        assert fingerprint(learner.export()) == made[SYNC_STEPS]
        engine.close()


def _heavy_tail(folder: Path) -> str:
    """The setting that trains on rows of which every fourth is long, written into `folder`."""
    rows = [{"prompt": f"row {row}", "answer": "", "max_new_tokens": 6 if row % 4 else LONG} for row in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader = "workers.reward.toy_graders:low_share"
    train, heldout = folder / "rows.jsonl", ROOT / "configs" / "data" / "tiny_heldout.jsonl"
    return (
        f'dataset=[{{path = "{train}", grader = "{grader}"}}, '
        f'{{path = "{heldout}", grader = "{grader}", purpose = "eval"}}]'
    )


def _rows_by_step(run: Run) -> dict[int, list[dict[str, Any]]]:
    """The trained rows of each step, in the order in which they were trained."""
    members = [(batch["step"], row) for batch in run.batches for row in batch["members"]]
    found: dict[int, list[dict[str, Any]]] = {}
    for (step, _), (_, _, row) in zip(members, run.members(), strict=True):
        assert row is not None
        found.setdefault(step, []).append(row)
    return found


def _sampled(engine: RemoteEngine, run: Run, step: int) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """What a synchronous loop samples for this step: the next B prompts, G samples each, all in one batch."""
    settings: Settings = run.settings
    first = step * settings.groups_per_batch
    requests = [
        request(
            run.said["prompts"][group]["prompt_ids"],
            version=step,
            group=group,
            index=index,
            max_new_tokens=run.said["prompts"][group]["max_new_tokens"],
            seed=sampling_seed(settings.seed, group, index),
        )
        for group in range(first, first + settings.groups_per_batch)
        for index in range(settings.group_size)
    ]
    return {(key.group, key.index): found for key, found in run_all(engine, requests).items()}
