"""The grader pool: whatever a grader does, every item comes back once and the others go on."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.reward.pool import Graded, GradersUnavailable, Item, Limits, Pool
from workers.reward.verdict import Verdict
from workers.runtime import clock
from workers.runtime.errors import BadInput

BY_ANSWER = "tests.unit.grader_examples:by_answer"
LIMIT_S = 60.0


@contextmanager
def a_pool(
    size: int = 1, timeout_s: float = 20.0, memory_mib: int = 2048, graders: tuple[str, ...] = (), model: str = "."
) -> Iterator[Pool]:
    pool = Pool(size, Limits(timeout_s, memory_mib), Path(model), graders)
    try:
        yield pool
    finally:
        pool.close()


def all_of(pool: Pool) -> dict[int, Graded]:
    """Collect until nothing is pending."""
    done: dict[int, Graded] = {}
    end = clock.monotonic_s() + LIMIT_S
    while pool.pending:
        assert clock.monotonic_s() < end, f"{pool.pending} items never came back"
        for graded in pool.collect(1.0):
            assert graded.key not in done
            done[graded.key] = graded
    return done


def asked(key: int, answer: str, grader: str = BY_ANSWER) -> Item:
    return Item(key, grader, (1,), (2, 3), answer)


def test_two_verifiers_that_sleep_for_ever_do_not_hold_up_the_third_item() -> None:
    """H02: pool of 2, limit 1 s, the third item is scored within 5 s of the first grading."""
    sleeper = "tests.unit.grader_examples:endless_sleep"
    with a_pool(size=2, timeout_s=1.0, graders=(sleeper,)) as pool:
        pool.submit(asked(9, "0", sleeper))
        all_of(pool)  # the processes are up
        began = clock.monotonic_s()
        for key, answer in enumerate(["", "", "1"]):
            pool.submit(asked(key, answer, sleeper))
        done = all_of(pool)
        took = clock.monotonic_s() - began
    assert done[0].error == done[1].error == "timed out after 1 s"
    assert done[2] == Graded(2, Verdict(1.0, 1.0, {}), None)
    assert took < 5.0


def test_every_way_to_fail_is_an_error_with_its_reason_and_the_rest_is_scored() -> None:
    with a_pool() as pool:
        answers = ["0.5", "raise", "die", "eat", "print", "nan", "text", "shaped", "1"]
        for key, answer in enumerate(answers):
            pool.submit(asked(key, answer))
        done = {answers[key]: graded for key, graded in all_of(pool).items()}
    assert done["0.5"].verdict == Verdict(0.5, 0.5, {})
    assert done["raise"].error == "KeyError: 'no such cell'"
    assert re.fullmatch(r".*/grader_examples\.py:[0-9]+", done["raise"].place)
    assert (done["die"].place, done["0.5"].place) == ("", "")
    assert done["die"].error == "the grader process ended: signal SIGKILL (reward.memory_mib = 2048)"
    assert done["eat"].error is not None
    assert "MemoryError" in done["eat"].error
    assert "reward.memory_mib = 2048" in done["eat"].error
    assert done["print"].verdict == Verdict(0.5, 0.5, {})
    assert done["nan"].error is not None
    assert "not finite" in done["nan"].error
    assert done["text"].error == "TypeError: the grader returned str, not a number or Verdict"
    assert done["shaped"].verdict == Verdict(0.25, 1.0, {"length": -0.75})
    assert done["1"].verdict == Verdict(1.0, 1.0, {})


def test_a_large_response_goes_through_the_pipe() -> None:
    with a_pool() as pool:
        pool.submit(Item(0, "workers.reward.toy_graders:even_share", (1,), list(range(200_000)), ""))
        assert all_of(pool)[0].verdict == Verdict(0.5, 0.5, {})


def test_text_is_decoded_in_the_subprocess_without_special_tokens(tmp_path: Path) -> None:
    """H03: ids [he][llo] and [hello] give the same text; the ids themselves never change."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"he": 0, "llo": 1, "hello": 2}, unk_token="he"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|stop|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with a_pool(model=str(tmp_path)) as pool:
        for key, ids in enumerate([(0, 1), (2,), (2, 3)]):
            pool.submit(Item(key, "tests.unit.grader_examples:text_length", (), ids, ""))
        done = all_of(pool)
    assert [done[key].verdict for key in range(3)] == [Verdict(5.0, 5.0, {})] * 3


def test_a_text_grader_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with a_pool(model=str(tmp_path)) as pool:
        pool.submit(asked(0, "1", "last_integer"))
        error = all_of(pool)[0].error
    assert error == f"ValueError: grader last_integer reads text, but {tmp_path} has no tokenizer"


def test_a_configured_grader_that_cannot_be_loaded_is_bad_input() -> None:
    with a_pool(graders=("tests.unit.grader_examples:by_anser",)) as pool:
        pool.submit(asked(0, "1"))
        with pytest.raises(BadInput, match=r"did you mean tests.unit.grader_examples:by_answer"):
            all_of(pool)


def test_too_little_memory_to_start_is_reported_and_not_retried_for_ever() -> None:
    with a_pool(memory_mib=64, graders=("math_verify",)) as pool:
        pool.submit(asked(0, "1"))
        with pytest.raises((GradersUnavailable, BadInput), match=r"reward\.memory_mib = 64"):
            all_of(pool)


def test_closing_leaves_no_process_behind() -> None:
    with a_pool(size=2) as pool:
        pids = [child.process.pid for child in pool._children]
        pool.submit(asked(0, "hang"))
        pool.collect(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
