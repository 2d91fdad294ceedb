"""What training holds: bytes per parameter as `pipelines/needs.py` and docs/ALGORITHM.md say; an allocation that fails
names the setting to lower."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import needs
from tests.integration.helpers_megatron import learner_of, samples_of, write_family
from workers.trainer.learners.base import Sample
from workers.trainer.learners.megatron_learner import MegatronLearner

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of all of them, a storage that several share once."""
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(held.values())


def state_of(learner: MegatronLearner) -> list[torch.Tensor]:
    """Weights, gradient, masters and moments."""
    optimizer = learner._optimizer.optimizer
    moments = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    masters = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [buffer.grad_data for buffer in learner._ddp.buffers]
    return [*learner._model.parameters(), *gradients, *masters, *moments]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_takes_the_bytes_that_a_run_counts_with(tmp_path: Path, dtype: str) -> None:
    write_family(tmp_path, "llama-tied")
    learner = learner_of(tmp_path, dtype=dtype)
    learner.train(samples_of(1))
    parameters = sum(one.numel() for one in learner._model.parameters())
    held = bytes_of(state_of(learner)) / parameters
    assert held == pytest.approx(needs.TRAINER_BYTES_PER_PARAMETER[dtype], rel=0.01), "padding of buffers apart"


def long_samples(words: int, count: int, tokens: int) -> list[Sample]:
    """`count` answers of so many tokens to one prompt."""
    prompt = [3 * place % words for place in range(tokens // 4)]
    ids = [[(7 * place + 31 * number) % words for place in range(tokens)] for number in range(count)]
    return [Sample(prompt, one, [-5.0] * tokens, [True] * tokens, 1.0, 1.0 - number) for number, one in enumerate(ids)]


_STARVED = """
import resource, sys
from pathlib import Path
from tests.integration.helpers_megatron import learner_of
from tests.integration.test_megatron_memory import long_samples
learner = learner_of(Path(sys.argv[1]), micro_batch_tokens=int(sys.argv[2]))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (48 << 20), size + (48 << 20)))
learner.train(long_samples(512, int(sys.argv[3]), int(sys.argv[4])))
"""


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (("60000", "60", "600"), "lower training.micro_batch_tokens = 60000 (at least 750, the longest sample"),
        pytest.param(
            ("64", "1", "36000"),
            "one sample has 45000 tokens, training.micro_batch_tokens = 64 cannot split it: lower",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_batch_that_memory_does_not_hold_says_which_setting_to_lower(
    tmp_path: Path, numbers: tuple[str, ...], said: str
) -> None:
    write_family(tmp_path, "llama-tied", max_position_embeddings=65536)
    arguments: list[Any] = [sys.executable, "-c", _STARVED, tmp_path, *numbers]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert f"BadInput: memory ran out in training: {said}" in done.stderr, done.stderr[-2000:]
