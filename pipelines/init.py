"""`dora init`: a configuration with every key, its meaning and its bounds as comments, made from `schemas/settings.py`;
beside it rows and a reward function to begin with.

Rule 1: nothing that exists is overwritten. What is written passes `dora validate`.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic.fields import FieldInfo

from schemas.settings import PASSED_THROUGH, Section, Settings
from workers.runtime.errors import BadInput

COMMENT_CHARACTERS_MAX = 116
ROWS, REWARD = "my_rows.jsonl", "my_reward.py"
_GIVEN: Mapping[str, Any] = {
    "model": "builtin:smollm2",
    "steps": 20,
    "group_size": 4,
    "groups_per_batch": 4,
    "sampling.max_new_tokens": 24,
    "engines.seats": 16,
    "engines.kv_mib": 128,
    "engines.tokens_per_request_max": 256,
    "training.learning_rate": 1e-5,
    "training.micro_batch_tokens": 1024,
    "dataset.path": ROWS,
    "dataset.grader": "my_reward:reward",
}
"""What the example sets; all other keys stay comments with their defaults."""
_HEAD = """\
# A run: `dora validate {name}` finds mistakes, `dora run {name}` trains.
# Every key is here. A key behind `#` has the value that it would have anyway; take the `#` away to change it.
"""
_REWARD = '''\
"""The reward of a response: any function of a GradeInput that returns a number (or a Verdict)."""

from workers.reward.verdict import GradeInput


def reward(item: GradeInput) -> float:
    """1 for the right last word, a tenth for any number at all.

    `item` has: text (the response), answer (the row's reference answer), metadata (a dict: the row's object `metadata`
    and its columns of no other use, under their names), prompt_ids and response_ids (tuples of token ids)."""
    words = item.text.replace(".", " ").split()
    if words and words[-1] == item.answer:
        return 1.0
    return 0.1 if any(word.isdigit() for word in words) else 0.0
'''


def init(file: Path) -> list[Path]:
    """Write the configuration, and rows and reward beside it unless they are there; what was written. BadInput."""
    if file.suffix != ".toml":
        raise BadInput(f"{file}: a configuration's name ends with .toml")
    if file.exists():
        raise BadInput(f"{file} exists: choose another name, or remove it first")
    if not file.parent.is_dir():
        raise BadInput(f"{file}: there is no folder {file.parent}")
    texts = {file: config_text(file.name)}
    texts |= {file.with_name(ROWS): _rows(), file.with_name(REWARD): _REWARD}
    written = []
    for path, text in texts.items():
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def _rows() -> str:
    pairs = [(a, b) for a in (2, 3, 4, 5, 6) for b in (3, 7)]
    rows = [{"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]
    return "".join(json.dumps(row) + "\n" for row in rows)


def config_text(name: str = "my_run.toml") -> str:
    """The whole configuration as TOML with comments."""
    plain = [(key, field) for key, field in Settings.model_fields.items() if section_of(field) is None]
    lines = [*_HEAD.format(name=name).splitlines()]
    for key, field in plain:
        if key not in PASSED_THROUGH:
            lines += ["", *_key("", key, field)]
    for key, field in Settings.model_fields.items():
        section = section_of(field)
        if section is not None:
            lines += ["", *_table(key, section, many=key == "dataset")]
    for key in PASSED_THROUGH:
        lines += ["", f"# {Settings.model_fields[key].description}", f"[{key}]"]
    return "\n".join(lines) + "\n"


def _table(name: str, section: type[Section], *, many: bool) -> Iterator[str]:
    """A section with its keys; one below another (columns of a dataset) is a table of its own."""
    yield from _comment((section.__doc__ or "").strip())
    yield f"[[{name}]]" if many else f"[{name}]"
    below = []
    for key, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield from _key(f"{name}.", key, field)
        else:
            below.append((key, inner))
    for key, inner in below:
        yield ""
        yield from _table(f"{name}.{key}", inner, many=False)


def _key(prefix: str, key: str, field: FieldInfo) -> Iterator[str]:
    said = " ".join(part for part in (field.description or "", bounds_of(field)) if part)
    if said:
        yield from _comment(said)
    given = prefix + key in _GIVEN
    value = _GIVEN[prefix + key] if given else field.get_default(call_default_factory=True)
    assert given or not field.is_required(), f"{prefix}{key} has no default, so the example must set it"
    yield ("" if given else "# ") + tomli_w.dumps({key: value}).strip()


def _comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(line.strip(), COMMENT_CHARACTERS_MAX, initial_indent="## ", subsequent_indent="## ")


def bounds_of(field: FieldInfo) -> str:
    """`(one of a, b)`, `(at least 1, below 2)`."""
    if get_origin(field.annotation) is Literal:
        return f"({' | '.join(map(str, get_args(field.annotation)))})"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(word, getattr(one, name, None)) for one in field.metadata for name, word in words.items()]
    said = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return f"({', '.join(said)})" if said else ""


def section_of(field: FieldInfo) -> type[Section] | None:
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
