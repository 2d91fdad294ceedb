"""A whole `dora run` with paced parts on a real broker and under a real Prefect server."""

from pathlib import Path

import pytest

from tests.integration.whole_run import assert_good, dora_run

pytestmark = pytest.mark.integration


def test_a_paced_run_under_prefect_ends_well_and_leaves_nothing_running(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path) as running:
        ran = running.wait()
        assert_good(ran, running, steps=8)
    assert "Prefect UI http://127.0.0.1:" in ran.said
    assert ran.summary.groups.trained == 32
    assert ran.summary.lag.max <= 2
    assert (ran.run_dir / "metrics.parquet").is_file()
