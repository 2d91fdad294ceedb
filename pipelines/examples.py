"""Three rows of each dataset as the model will see them: what `dora validate` shows.

text      the prompt with the template applied
verdict   what the grader says of the reference answer, if it were the response (graders that read text)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.datasets import Row, Table
from pipelines.tokens import PromptTokenizer
from schemas.settings import Reward
from workers.reward import graders
from workers.reward.pool import Graded, Item, Limits, Pool
from workers.runtime import clock
from workers.runtime.errors import BadInput, DoraError

ROWS_SHOWN = 3
GRADING_S_MAX = 180.0


@dataclass(frozen=True, slots=True)
class Example:
    """`tokens` is None without a model. `verdict` is None where none was asked for, or `error` says why."""

    dataset: str
    row: str
    text: str
    tokens: int | None
    answer: str
    grader: str
    verdict: float | None = None
    error: str = ""


def examples(tables: Sequence[Table], model: Path | None, reward: Reward | None) -> list[Example]:
    """The first rows of each table. BadInput; with `reward` they are graded."""
    tokenizer = None if model is None else PromptTokenizer(model)
    found = [
        _example(table, number, tokenizer) for table in tables for number in range(min(ROWS_SHOWN, len(table.rows)))
    ]
    if tokenizer is None or reward is None:
        return found
    rows = [row for table in tables for row in table.rows[:ROWS_SHOWN]]
    prompts = [
        tokenizer.ids(row.prompt, table.settings.template) for table in tables for row in table.rows[:ROWS_SHOWN]
    ]
    return _graded(found, rows, prompts, tokenizer, reward)


def _example(table: Table, number: int, tokenizer: PromptTokenizer | None) -> Example:
    row, template = table.rows[number], table.settings.template
    text = row.prompt if tokenizer is None else tokenizer.rendered(row.prompt, template)
    tokens = None if tokenizer is None else len(tokenizer.ids(row.prompt, template))
    return Example(f"{table.settings.purpose}:{table.name}", row.place, text, tokens, row.answer, table.settings.grader)


def _graded(
    found: list[Example],
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    tokenizer: PromptTokenizer,
    reward: Reward,
) -> list[Example]:
    """In the same killable processes, under the same limits, as in a run."""
    asked = [place for place, example in enumerate(found) if example.answer and _reads_text(example.grader)]
    if not asked:
        return found
    pool = Pool(1, Limits(reward.timeout_s, reward.memory_mib), tokenizer.folder, path=reward.path)
    try:
        for place in asked:
            ids = tokenizer.ids(found[place].answer, "plain")
            pool.submit(Item(place, found[place].grader, prompts[place], ids, rows[place].answer, rows[place].metadata))
        end = clock.monotonic_s() + GRADING_S_MAX
        while pool.pending and clock.monotonic_s() < end:
            for graded in pool.collect(1.0):
                verdict = None if graded.verdict is None else graded.verdict.reward
                found[graded.key] = replace(found[graded.key], verdict=verdict, error=_said(graded))
    except BadInput:
        raise
    except DoraError as error:
        raise BadInput(f"graders do not start: {error}") from error
    finally:
        pool.close()
    return found


def _said(graded: Graded) -> str:
    return f"{graded.error or ''}{f' ({graded.place})' if graded.place else ''}"


def _reads_text(grader: str) -> bool:
    """Of a person's own grader this is not known before it is loaded, elsewhere."""
    return not grader.startswith("workers.") or graders.needs_text(graders.load(grader))


def notes(found: Iterable[Example]) -> list[str]:
    """What looks wrong."""
    said = []
    for example in found:
        where = f"{example.dataset}, {example.row}: {example.grader}"
        if example.error:
            said.append(f"{where} cannot judge the reference answer {example.answer!r}: {example.error}")
        elif example.verdict == 0.0:
            said.append(f"{where} gives the reference answer {example.answer!r} nothing")
    return said


def lines(found: Iterable[Example]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A headline with labelled texts for each."""
    for example in found:
        tokens = "" if example.tokens is None else f", {example.tokens} tokens"
        rows = [("prompt", example.text), ("answer", example.answer)]
        if example.verdict is not None:
            rows.append(("verdict", f"{example.verdict:g} by {example.grader} on the answer"))
        yield f"{example.dataset}, {example.row}{tokens}", rows
