"""Micro-batches: which tokens go through the model together. Plain numbers, no tensor.

Rule 1: a function of the batch's order alone: the same batch makes the same micro-batches.
Rule 2: packed, nothing is padded. Samples of one prompt are a tree: the prompt's tokens once, then one branch per
   response. A branch sees its prompt and itself only, so it is computed as if it stood alone.
Rule 3: padded, every sample stands alone, filled up on its right to the longest of its micro-batch: what most trainers
   do. The result is the same; it is there to be compared with (`training.packing = false`).
Rule 4: a micro-batch holds at most `tokens_max` tokens, filling counted, unless one sample alone is longer.

    packed:  | prompt A        | response 0 | response 1 | response 2 | prompt B  | response 3 | ...
    rope:    | 0 .. P-1        | P ..       | P ..       | P ..       | 0 .. P-1  | P ..       |
    padded:  | prompt A | response 0 | filling | prompt A | response 1    | prompt B | response 3 | filling | ...
    rope:    | 0 ..                            | 0 ..                     | 0 ..                            |
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """`members` (indices of samples) share `prompt` tokens and have `responses` tokens each."""

    prompt: int
    responses: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: trees side by side in one row of `tokens` tokens. `width` > 0: each of one sample, padded to
    `width` tokens."""

    trees: tuple[Tree, ...]
    width: int = 0

    @property
    def tokens(self) -> int:
        return sum(max(tree.tokens, self.width) for tree in self.trees)

    @property
    def members(self) -> tuple[int, ...]:
        """Samples in the order of their tokens."""
        return tuple(member for tree in self.trees for member in tree.members)


def pack(prompts: Sequence[Sequence[int]], responses: Sequence[int], tokens_max: int) -> list[MicroBatch]:
    """Micro-batches of samples with these prompt ids and response lengths (tokens).

    Trees are sorted by size, largest first, and put into the first micro-batch with room.
    """
    trees = [part for members in _by_prompt(prompts) for part in _trees(prompts, responses, members, tokens_max)]
    trees.sort(key=lambda tree: (-tree.tokens, tree.members))
    bins: list[list[Tree]] = []
    sizes: list[int] = []
    for tree in trees:
        place = next((place for place, size in enumerate(sizes) if size + tree.tokens <= tokens_max), None)
        if place is None:
            bins.append([])
            sizes.append(0)
            place = len(bins) - 1
        bins[place].append(tree)
        sizes[place] += tree.tokens
    return [MicroBatch(tuple(held)) for held in bins]


def pad(prompts: Sequence[Sequence[int]], responses: Sequence[int], tokens_max: int) -> list[MicroBatch]:
    """As `pack`, but padded: samples sorted by length, longest first, as many together as the filled row allows."""
    trees = [_tree(len(prompt), responses, [place]) for place, prompt in enumerate(prompts)]
    trees.sort(key=lambda tree: (-tree.tokens, tree.members))
    batches: list[MicroBatch] = []
    held: list[Tree] = []
    for tree in trees:
        if held and held[0].tokens * (len(held) + 1) > tokens_max:
            batches.append(MicroBatch(tuple(held), held[0].tokens))
            held = []
        held.append(tree)
    return [*batches, MicroBatch(tuple(held), held[0].tokens)] if held else batches


def _by_prompt(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    same: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        same.setdefault(tuple(prompt), []).append(place)
    return list(same.values())


def _trees(
    prompts: Sequence[Sequence[int]], responses: Sequence[int], members: Sequence[int], tokens_max: int
) -> list[Tree]:
    """Trees of samples with one prompt: of similar length, each within `tokens_max` where that can be."""
    prompt = len(prompts[members[0]])
    trees: list[Tree] = []
    held: list[int] = []
    size = prompt
    for member in sorted(members, key=lambda member: (-responses[member], member)):
        if held and size + responses[member] > tokens_max:
            trees.append(_tree(prompt, responses, held))
            held, size = [], prompt
        held.append(member)
        size += responses[member]
    return [*trees, _tree(prompt, responses, held)]


def _tree(prompt: int, responses: Sequence[int], members: Sequence[int]) -> Tree:
    assert prompt > 0, "a sample without a prompt token: nothing predicts its first token"
    ordered = tuple(sorted(members))
    return Tree(prompt, tuple(responses[member] for member in ordered), ordered)
