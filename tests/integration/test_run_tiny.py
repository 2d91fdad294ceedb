"""A whole `dora run` with everything real: vLLM engines, Megatron trainer, Kafka; a random 2-layer model."""

from pathlib import Path

import pytest

from tests.integration.whole_run import assert_good, dora_run

pytestmark = pytest.mark.integration


def test_a_tiny_run_trains_all_steps_and_its_archive_is_right(tmp_path: Path) -> None:
    with dora_run("tiny", tmp_path, "prefect.enabled=false") as running:
        ran = running.wait()
        assert_good(ran, running, steps=6)
    made = ran.summary
    assert made.groups.trained == 24
    assert made.lag.max <= made.staleness_max
    assert made.weights.fingerprint_first != made.weights.fingerprint_last
    assert made.reward.heldout_before is not None
    assert made.reward.heldout_after is not None
    assert made.faults.engine_lost == 0
