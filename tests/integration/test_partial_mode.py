"""Mode `partial` on real parts: requests go on under each new version, and a row says truly which version made what."""

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.archive_checker import Run
from tests.integration.killing import learner_of
from tests.integration.whole_run import assert_good, dora_run
from workers.trainer.samples import samples_of

pytestmark = [pytest.mark.integration, pytest.mark.full]
STEPS = 8
SETTINGS = ("mode=partial", f"steps={STEPS}", "engines.count=3", "scheduling.weights_keep=99", "prefect.enabled=false")


def test_rows_that_mix_versions_have_the_log_probs_of_each_of_them(tmp_path: Path) -> None:
    """Each stay's tokens have the log-probs that the trainer's model gives them under the published weights of that
    stay's version, and not those of the version before."""
    with dora_run("tiny", tmp_path, *SETTINGS) as running:
        ran = running.wait()
        assert_good(ran, running, steps=STEPS)
    run = Run(ran.run_dir)
    rows = [row for row in run.rows["trajectories"] if len({stay["version"] for stay in row["engine_path"]}) > 1]
    print(f"{len(rows)} of {len(run.rows['trajectories'])} rows mix versions, {ran.summary.migrations.count} moves")
    assert rows, "no trajectory mixes versions: this run says nothing of the mode"
    wrong_by, others = [], []
    for version, parts in sorted(_stays(rows).items()):
        own, next_ = (_differences(run, which, parts) for which in (version, version + 1))
        wrong_by += own
        others += next_
    print(f"|dlogp|: {max(wrong_by):.1e} at most under the stay's version, {_mean(others):.1e} mean under the next one")
    assert max(wrong_by) < 1e-3
    assert _mean(others) > 10 * _mean(wrong_by)


def _stays(rows: list[dict[str, Any]]) -> dict[int, list[tuple[dict[str, Any], int, int]]]:
    """By version: (row, first token, end) of each stay."""
    found = defaultdict(list)
    for row in rows:
        start = 0
        for stay in row["engine_path"]:
            found[stay["version"]].append((row, start, start + stay["tokens"]))
            start += stay["tokens"]
    return found


def _differences(run: Run, version: int, parts: list[tuple[dict[str, Any], int, int]]) -> list[float]:
    """|recorded - the trainer's| log-prob of the parts' tokens under the published weights of `version`."""
    published = run.settings.model_copy(update={"model": run.weights[version]["location"].removeprefix("file://")})
    with contextlib.closing(learner_of(published)) as learner:
        found = learner.logprobs(samples_of([row for row, _, _ in parts], version, run.settings))
    return [
        abs(ours - theirs)
        for (row, start, end), logprobs in zip(parts, found, strict=True)
        for ours, theirs in zip(logprobs[start:end], row["logprobs"][start:end], strict=True)
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
