"""The learner's own tensor functions against the same formulas in torch's operations, values and gradients."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from workers.trainer.learners.fast_layers import GatedSilu, RMSNorm
from workers.trainer.learners.token_logprobs import ROWS, logprobs_and_entropy
from workers.trainer.learners.tree_attention import Shape, TreeAttention, near_in_length, shapes_of

CONFIG = SimpleNamespace(
    layernorm_zero_centered_gamma=False,
    sequence_parallel=False,
    activation_func_clamp_value=None,
    glu_linear_offset=0.0,
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Made = tuple[torch.Tensor, list[torch.Tensor]]


def _both(ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[Made]:
    """(value, gradients) of each, for the same inputs and the same random upstream gradient."""
    made = []
    for function in (ours, plain):
        inputs = [x.clone().requires_grad_() for x in given]
        value = function(*inputs)
        upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(2)).to(value.dtype)
        made.append((value.detach(), list(torch.autograd.grad(value, inputs, upstream))))
    return made


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 3])
@DTYPES
def test_log_probs_and_their_gradient_are_those_of_log_softmax(
    dtype: torch.dtype, rows: int, temperature: float
) -> None:
    targets = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(3))
    warmth = torch.full((rows,), temperature)
    warmth[0] = 1.3 if temperature != 1.0 else 1.0

    def plain(logits: torch.Tensor) -> torch.Tensor:
        log_probs = (logits.float() / warmth[:, None]).log_softmax(-1)
        return log_probs.gather(1, targets[:, None])[:, 0]

    # the function overwrites its input, so it is given what nobody else reads
    ours, theirs = _both(
        lambda x: logprobs_and_entropy(x + 0, targets, warmth)[0], plain, 4 * _random(rows, 50, dtype=dtype)
    )
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
    logits = 4 * _random(rows, 50, dtype=dtype)
    probs = (logits.float() / warmth[:, None]).softmax(-1)
    torch.testing.assert_close(logprobs_and_entropy(logits, targets, warmth)[1], -(probs * probs.log()).sum(-1))


def test_logits_without_a_row_have_no_log_probs() -> None:
    logprobs, entropy = logprobs_and_entropy(torch.zeros(0, 50), torch.zeros(0, dtype=torch.int64), torch.ones(0))
    assert logprobs.shape == entropy.shape == (0,)


@DTYPES
def test_norm_is_torchs_and_its_gradient_too(dtype: torch.dtype) -> None:
    def module(kind: str) -> Callable[..., torch.Tensor]:
        norm = RMSNorm(CONFIG, 64, 1e-5) if kind == "ours" else torch.nn.RMSNorm(64, eps=1e-5)
        return lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x)

    given = (_random(7, 1, 64, dtype=dtype), (1 + 0.1 * _random(64, seed=5)).to(dtype))
    ours, theirs = _both(module("ours"), module("torch"), *given)
    torch.testing.assert_close(ours, theirs)


@DTYPES
def test_gated_silu_and_its_gradient_are_those_of_the_formula_bit_for_bit(dtype: torch.dtype) -> None:
    def plain(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    ours, theirs = _both(GatedSilu(CONFIG), plain, _random(9, 1, 64, dtype=dtype))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_rows_shape_is_read_tree_by_tree() -> None:
    shapes = shapes_of([3, 2, 5, 6, 9, 0, 4, 1, 5])
    assert shapes == (Shape(3, (5, 6)), Shape(9, ()), Shape(4, (5,)))
    assert [shape.tokens for shape in shapes] == [14, 9, 9]
    assert shapes[1].kind == shapes[2].kind != shapes[0].kind


# --- trees ------------------------------------------------------------------------------------

PROMPT, RESPONSES = 5, (3, 1, 40, 90, 2, 37)
TOKENS = PROMPT + sum(RESPONSES)


def _tree_attention() -> TreeAttention:
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, num_attention_heads=4, num_query_groups=2)
    return TreeAttention(config, 1)


def _plain_tree(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax over what a token may see: its prompt and its own response so far."""
    of = torch.cat([torch.full((n,), place) for place, n in enumerate((PROMPT, *RESPONSES))])
    sees = ((of[:, None] == of) | (of == 0)) & torch.ones(TOKENS, TOKENS).tril().bool()
    wide_k, wide_v = (x.squeeze(1).repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.squeeze(1), wide_k) / math.sqrt(q.size(-1))
    seen = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", seen, wide_v).reshape(TOKENS, 1, -1)


def test_a_ragged_tree_is_attended_as_by_a_mask_of_the_whole_row() -> None:
    shape = torch.tensor([PROMPT, len(RESPONSES), *RESPONSES])
    attention = _tree_attention()
    given = [_random(TOKENS, 1, heads, 8, seed=heads) for heads in (4, 2)] + [_random(TOKENS, 1, 2, 8, seed=9)]
    ours, plain = _both(lambda q, k, v: attention(q, k, v, shape), _plain_tree, *given)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_no_part_of_a_tree_is_written_into_a_larger_tensor() -> None:
    """Its backward pass would copy the gradient of all for each part."""
    shape = torch.tensor([PROMPT, len(RESPONSES), *RESPONSES])
    q, k, v = (_random(TOKENS, 1, heads, 8).requires_grad_() for heads in (4, 2, 2))
    waiting, seen = [_tree_attention()(q, k, v, shape).grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    names = [node.name() for node in seen]
    assert "SplitWithSizesBackward0" in names
    assert not [name for name in names if "CopySlices" in name or "SliceBackward" in name]


def test_responses_of_a_batch_are_near_in_length_and_none_is_left_out() -> None:
    assert near_in_length(RESPONSES) == [[3], [2, 5], [0, 4, 1]]
    assert near_in_length((400, 12, 310, 299)) == [[0, 2], [3], [1]]
    assert near_in_length((16, 16, 1)) == [[0, 1, 2]]
