"""Attention over a row of trees (`packing.py`): each response sees its prompt and itself. Rotary positions are given
here too, in the precision of the attention.

Rule 1: nothing here is bound to a device: attention is torch's own, which picks a kernel.
Rule 2: no tensor of the row's size is made per tree: rows are cut and joined once (a slice's backward pass would fill
   a whole row with zeros), and neighbours of one shape are a batch, without a copy.

Shapes: S = tokens of the row, H = attention heads, G = query groups, D = head size, B = sequences of a batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree: tokens of its prompt and of each response. One response at most: it is one causal sequence."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def kind(self) -> tuple[int, ...]:
        """Neighbours of one kind make a batch."""
        return (self.tokens,) if len(self.responses) <= 1 else (self.prompt, *self.responses)


def shapes_of(row: Sequence[int]) -> tuple[Shape, ...]:
    """Of `Row.shape` as plain numbers: per tree prompt length, number of responses, their lengths."""
    shapes, place = [], 0
    while place < len(row):
        prompt, count = row[place : place + 2]
        shapes.append(Shape(prompt, tuple(row[place + 2 : place + 2 + count])))
        place += 2 + count
    return tuple(shapes)


def near_in_length(lengths: Sequence[int]) -> list[list[int]]:
    """Places of responses, longest first, in batches within which little is padding: a quarter of the longest, or 16
    tokens, where one more call would cost more than they do."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest - lengths[place] <= max(16, longest // 4):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _stacked(tails: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    """[B, longest, heads, D]. Each is filled up by itself: writing into parts of one tensor (`pad_sequence`) copies all
    of its gradient once per part."""
    return torch.stack([F.pad(tail, (0, 0, 0, 0, 0, longest - tail.size(0))) for tail in tails])


class Rotary:
    """Cosines and sines for the tokens of a row, shared by the layers of a model. The last row's are kept."""

    def __init__(self, embedding: Any) -> None:
        """`embedding`: Megatron's RotaryEmbedding."""
        self._embedding = embedding
        self._of: tuple[tuple[Shape, ...], torch.device] | None = None
        self._held: tuple[torch.Tensor, torch.Tensor]

    def of(self, shapes: tuple[Shape, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [S, 1, D / 2], float32. A response goes on where its prompt ended."""
        if self._of != (shapes, device):
            longest = max(shape.prompt + max(shape.responses, default=0) for shape in shapes)
            ranges = []
            for shape in shapes:
                ranges.append(torch.arange(shape.prompt))
                ranges += [torch.arange(shape.prompt, shape.prompt + count) for count in shape.responses]
            angles = self._embedding.get_freqs_non_repeated(longest).to(device)[torch.cat(ranges).to(device), None]
            self._held = angles.cos(), angles.sin()
            self._of = shapes, device
        return self._held


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of a layer. `attention_mask` is `Row.shape`; None = one causal sequence. Its model sets `rotary`;
    without one nothing is rotated."""

    rotary: Rotary | None = None

    def __init__(self, config: Any, layer_number: int, *_args: Any, softmax_scale: Any = None, **_kwargs: Any) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        assert config.attention_dropout == 0.0, "training on sampled log-probs goes without dropout"
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """query [S, 1, H, D], key and value [S, 1, G, D] -> [S, 1, H * D].

        On a CPU in float32: torch's bfloat16 kernel has a backward pass that is about four times slower there.
        """
        shapes = (Shape(query.size(0), ()),) if attention_mask is None else shapes_of(attention_mask.tolist())
        kept = torch.float32 if query.device.type == "cpu" else query.dtype
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1).to(kept)
        if self.rotary is not None:
            cos, sin = self.rotary.of(shapes, query.device)
            q, k = _Rotate.apply(q, cos, sin), _Rotate.apply(k, cos, sin)
        out = self._row(q.to(kept), k.to(kept), v, shapes)
        return out.to(query.dtype).reshape(out.size(0), 1, -1)

    def _row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shapes: Sequence[Shape]) -> torch.Tensor:
        """[S, heads, D] -> [S, H, D]."""
        alike = [list(held) for _, held in itertools.groupby(shapes, key=lambda shape: shape.kind)]
        sizes = [sum(shape.tokens for shape in held) for held in alike]
        cut = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        pieces = [self._alike(q_, k_, v_, held) for (q_, k_, v_), held in zip(cut, alike, strict=True)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _alike(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shapes: list[Shape]) -> torch.Tensor:
        """Neighbours of one kind, [tokens, heads, D]."""
        first, count = shapes[0], len(shapes)
        if len(first.responses) <= 1:
            whole_q, whole_k, whole_v = (x.view(count, first.tokens, *x.shape[1:]) for x in (q, k, v))
            return self._attend(whole_q, whole_k, whole_v, None).flatten(0, 1)
        trees = zip(*(x.split(first.tokens) for x in (q, k, v)), strict=True)
        grown = [self._tree(q_, k_, v_, first) for q_, k_, v_ in trees]
        return torch.cat(grown) if count > 1 else grown[0]

    def _tree(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape) -> torch.Tensor:
        """One tree, [tokens, heads, D]."""
        (trunk_q, *tails_q), (trunk_k, *tails_k), (trunk_v, *tails_v) = (
            x.split([shape.prompt, *shape.responses]) for x in (q, k, v)
        )
        trunk = self._attend(trunk_q[None], trunk_k[None], trunk_v[None], None)[0]
        found: dict[int, torch.Tensor] = {}
        for places in near_in_length(shape.responses):
            held_q, held_k, held_v = ([tails[place] for place in places] for tails in (tails_q, tails_k, tails_v))
            found |= zip(places, self._branches(held_q, (trunk_k, *held_k), (trunk_v, *held_v)), strict=True)
        return torch.cat([trunk, *(found[place] for place in range(len(shape.responses)))])

    def _branches(
        self, tails_q: list[torch.Tensor], k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Responses of about one length; `k` and `v` begin with the trunk's. Padded on the right, which a causal row
        never sees."""
        lengths = [tail.size(0) for tail in tails_q]
        count, longest, prompt = len(lengths), max(lengths), k[0].size(0)
        whole_k, whole_v = (
            torch.cat([x[0].expand(count, -1, -1, -1), _stacked(x[1:], longest)], dim=1) for x in (k, v)
        )
        sees = torch.ones(longest, prompt + longest, dtype=torch.bool, device=k[0].device).tril(prompt)
        rows = self._attend(_stacked(tails_q, longest), whole_k, whole_v, sees).flatten(0, 1)
        sizes = [size for length in lengths for size in (length, longest - length)]
        return list(rows.split(sizes)[::2])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor | None) -> torch.Tensor:
        """[B, tokens, heads, D] -> the same shape."""
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=sees, is_causal=sees is None, scale=self.scale, enable_gqa=self.grouped
        )
        return out.transpose(1, 2)


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    """x [S, heads, D] turned by its angles, in float32; the backward pass turns back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin).to(ctx.dtype), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of D. RoFormer, arXiv 2104.09864, equation 34."""
    a, b = x.float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    turned_a, turned_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=turned_a).sub_(b * sin)
    torch.mul(b, cos, out=turned_b).add_(a * sin)
    return out
