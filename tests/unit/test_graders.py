"""Graders: what counts as right."""

import threading

import pytest

from workers.reward import graders, toy_graders
from workers.reward.verdict import GradeInput, Verdict


def item(
    text: str = "", answer: str = "", metadata: dict[str, object] | None = None, ids: tuple[int, ...] = ()
) -> GradeInput:
    return GradeInput(prompt_ids=(1,), response_ids=ids, text=text, answer=answer, metadata=metadata or {})


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The product is 56.", "56", True),
        ("7 * 8 = 56", "56", True),
        ("56, not 54", "56", False),
        ("the answer is -4", "-4", True),
        ("the answer is \u22124.", "-4", True),
        ("the answer is 4", "-4", False),
        ("10-4", "4", True),
        ("(3)-4", "4", True),
        ("= 1,234,567", "1234567", True),
        ("1234", "1,234", True),
        ("between 12, 34", "34", True),
        ("1,23", "23", True),
        ("42.0", "42", True),
        ("3.5", "5", False),
        ("it is 7, about 3.5", "7", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("no number", "0", False),
        ("", "0", False),
        ("9" * 5000, "9", False),
    ],
)
def test_last_integer(text: str, answer: str, right: bool) -> None:
    assert graders.last_integer(item(text, answer)) == float(right)


def test_an_answer_that_is_no_integer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="'seven' is not one integer"):
        graders.last_integer(item("7", "seven"))


def test_math_verify_works_in_a_worker_thread() -> None:
    """H01."""
    said: list[float] = []

    def work() -> None:
        grader = graders.load("math_verify")
        for text in (r"so it is \boxed{\frac{1}{3}}", r"\boxed{\frac{2}{6}}", r"\boxed{\frac{1}{4}}", "no idea"):
            said.append(graders.judge(grader, item(text, r"\frac{1}{3}")).reward)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert said == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of a package that it imports
def test_reasoning_gym_scores_by_the_entry_in_the_metadata() -> None:
    grader = graders.load("reasoning_gym:basic_arithmetic")
    entry = {"question": "Calculate 5 - 3 - 6.", "answer": "-4", "metadata": {"expression": "5 - 3 - 6"}}
    assert grader(item("so <answer>-4</answer>", metadata={"entry": entry})) == 1.0
    assert grader(item(" -4\n", metadata={"entry": entry})) == 1.0
    assert grader(item("<answer>4</answer>", metadata={"entry": entry})) < 1.0  # type: ignore[operator]
    with pytest.raises(ValueError, match="no `entry`"):
        grader(item("-4"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("last_intger", "did you mean last_integer"),
        ("math-verify", "did you mean math_verify"),
        ("reasoning_gym:basic_arithmetics", "did you mean reasoning_gym:basic_arithmetic?"),
        ("workers.reward.toy_graders:even_shares", "did you mean workers.reward.toy_graders:even_share?"),
        ("reasoning_gym:", "module:function"),
        ("no_such_module_here:grade", "No module named 'no_such_module_here'"),
    ],
)
def test_an_unknown_grader_names_the_nearest_and_how_to_write_one(name: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        graders.load(name)
    assert hint in str(caught.value)


def test_an_own_function_is_a_grader() -> None:
    grader = graders.load("tests.unit.grader_examples:text_length")
    assert graders.judge(grader, item("four")) == Verdict(4.0, 4.0)
    assert graders.needs_text(grader)


@pytest.mark.parametrize("answer", ["nan", "text"])
def test_an_answer_that_is_no_finite_number_is_refused(answer: str) -> None:
    grader = graders.load("tests.unit.grader_examples:by_answer")
    with pytest.raises((TypeError, ValueError), match="the grader returned"):
        graders.judge(grader, item(answer=answer))


def test_toy_graders_vary_and_need_no_text() -> None:
    half = item(ids=(2, 3, 400, 401))
    assert toy_graders.even_share(half) == 0.5
    assert toy_graders.low_share(half) == 0.5
    assert toy_graders.distinct_share(item(ids=(2, 3, 3, 3))) == 0.5
    assert toy_graders.low_majority(half) == Verdict(0.5, 1.0, {"share": 0.5})
    assert not graders.needs_text(toy_graders.even_share)
