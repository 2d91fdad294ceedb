"""A whole run whose trainer has several processes, one of which is killed."""

from pathlib import Path

import pytest

from pipelines.models import write_tiny
from tests.integration.killing import assert_survived, until_step
from tests.integration.parts import LIMIT_S, process_of
from tests.integration.whole_run import dora_run
from workers.runtime import clock

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
STEPS = 6


@pytest.mark.full
def test_a_run_of_two_ranks_goes_on_after_one_of_them_was_killed(tmp_path: Path) -> None:
    """Real engines, tensor parallel 2. Rank 0 ends with rank 1; the supervisor starts both from the checkpoint."""
    write_tiny(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    layout = (f"model={tmp_path / 'model'}", "megatron.tensor_model_parallel_size=2", f"steps={STEPS}")
    with dora_run("tiny", tmp_path, "prefect.enabled=false", *layout) as running:
        until_step(running, 2)
        process_of(running, "workers.trainer.learners.rank").kill()
        at = clock.now_us() / 1e6
        ran = running.wait(LIMIT_S)
        assert "rank_ended rank=1 code=-9" in (ran.run_dir / "logs" / "trainer.log").read_text()
        paid = assert_survived(ran, running, STEPS, [at])
    assert paid.restarts == 1
