"""Micro-batches: nothing lost, nothing doubled, within the budget, packed or padded."""

import random

import pytest

from workers.trainer.packing import MicroBatch, pack, pad


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


def test_every_sample_is_padded_to_the_longest_of_its_micro_batch_within_the_budget() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        prompts, responses = random_batch(chance)
        budget = chance.randrange(1, 200)
        padded = pad(prompts, responses, budget)
        assert sorted(member for micro in padded for member in micro.members) == list(range(len(prompts)))
        for micro in padded:
            assert micro.tokens == micro.width * len(micro.trees)
            assert micro.tokens <= budget or len(micro.members) == 1
            assert micro.width == max(tree.tokens for tree in micro.trees)
            for tree in micro.trees:
                (member,) = tree.members
                assert (tree.prompt, tree.responses) == (len(prompts[member]), (responses[member],))


def test_padding_fills_where_packing_shares_the_prompt() -> None:
    prompts, responses = [[1, 2, 3]] * 3, [1, 4, 2]
    assert pad(prompts, responses, 100)[0].tokens == 3 * (3 + 4)
    assert pack(prompts, responses, 100)[0].tokens == 3 + (1 + 4 + 2)
    assert [micro.tokens for micro in pad(prompts, responses, 14)] == [2 * 7, 4]
    empty: list[MicroBatch] = []
    assert pad([], [], 14) == pack([], [], 14) == empty


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
    for together in (pack, pad):
        with pytest.raises(AssertionError, match="prompt token"):
            together([[]], [3], 10)
