"""Micro-batches: nothing lost, nothing doubled, nothing padded, within the budget."""

import random

import pytest

from workers.trainer.packing import pack


def random_batch(chance: random.Random) -> tuple[list[list[int]], list[int]]:
    prompts = [[chance.randrange(9) for _ in range(chance.randrange(1, 30))] for _ in range(chance.randrange(1, 8))]
    chosen = [chance.choice(prompts) for _ in range(chance.randrange(1, 40))]
    return chosen, [chance.randrange(1, 50) for _ in chosen]


def test_every_sample_is_packed_once_within_the_budget() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        prompts, responses = random_batch(chance)
        budget = chance.randrange(1, 200)
        packed = pack(prompts, responses, budget)
        assert sorted(member for micro in packed for member in micro.members) == list(range(len(prompts)))
        for micro in packed:
            assert micro.tokens <= budget or len(micro.members) == 1
            for tree in micro.trees:
                assert {tuple(prompts[member]) for member in tree.members} == {tuple(prompts[tree.members[0]])}
                assert tree.prompt == len(prompts[tree.members[0]])
                assert tree.responses == tuple(responses[member] for member in tree.members)


def test_the_same_batch_makes_the_same_micro_batches() -> None:
    prompts, responses = random_batch(random.Random(3))
    assert pack(prompts, responses, 64) == pack([list(prompt) for prompt in prompts], list(responses), 64)


def test_a_prompt_that_samples_share_is_computed_once() -> None:
    (micro,) = pack([[1, 2, 3]] * 4 + [[4, 5, 6]], [2, 2, 2, 2, 2], 100)
    assert micro.tokens == (3 + 4 * 2) + (3 + 2)


def test_a_group_that_is_larger_than_the_budget_is_split_by_length() -> None:
    packed = pack([[1, 2]] * 4, [10, 1, 10, 1], 22)
    assert [micro.tokens for micro in packed] == [22, 4]
    assert [micro.members for micro in packed] == [(0, 2), (1, 3)]


def test_a_sample_without_a_prompt_token_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="prompt token"):
        pack([[]], [3], 10)
