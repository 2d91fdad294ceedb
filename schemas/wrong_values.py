"""What is said of a value of the wrong kind in a configuration: pydantic's finding in our words, with what to write.

Rule 1: the advice is a line of TOML that would be taken: the key's default if it has one, else an example.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

SHOWN_CHARACTERS_MAX = 60
_WHOLE, _NUMBER, _BOOL, _TEXT = "no whole number", "no number", "neither true nor false", "no text"
_KINDS: Mapping[str, tuple[str, Any]] = {
    "int_parsing": (_WHOLE, 3),
    "int_parsing_size": (_WHOLE, 3),
    "int_type": (_WHOLE, 3),
    "int_from_float": (_WHOLE, 3),
    "float_parsing": (_NUMBER, 0.5),
    "float_type": (_NUMBER, 0.5),
    "bool_parsing": (_BOOL, True),
    "bool_type": (_BOOL, True),
    "string_type": (_TEXT, "..."),
}
"""Of pydantic's types: what such a value is not, and an example of what is."""
_TABLES = ("model_type", "model_attributes_type", "dict_type")


def sentence(model: type[BaseModel], fault: Mapping[str, Any]) -> str:
    """Of one of pydantic's `errors()` of `model`: `"three" is no whole number: write steps = 3`."""
    kind, value, path = fault["type"], fault["input"], [str(part) for part in fault["loc"]]
    keys = [part for part in path if not part.isdigit()]
    if kind == "missing":
        return f"is missing: write {keys[-1]} = ..."
    if kind == "literal_error":
        known = [str(choice) for choice in get_args(_field(model, keys).annotation)]
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5) or known
        return f'{_shown(value)} is none of {", ".join(known)}: write {keys[-1]} = "{near[0]}"'
    if kind == "tuple_type":
        return f"{_shown(value)} is no list of tables: write [[{keys[-1]}]] above the keys of each"
    if kind in _TABLES:
        head = f"[[{keys[-1]}]]" if path[-1].isdigit() else f"[{'.'.join(keys)}]"
        return f"{_shown(value)} is no table: write {head} above its keys"
    if kind in _KINDS:
        what, example = _KINDS[kind]
        field = _field(model, keys)
        better = example if field.is_required() else field.get_default() or example
        if kind == "string_type" and isinstance(value, int | float):
            better = json.dumps(value)
        return f"{_shown(value)} is {what}: write {keys[-1]} = {json.dumps(better, ensure_ascii=False)}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _field(model: type[BaseModel], keys: Sequence[str]) -> FieldInfo:
    """Of a key with its dots."""
    field = model.model_fields[keys[0]]
    for key in keys[1:]:
        kinds = [field.annotation, *get_args(field.annotation)]
        below = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        field = below.model_fields[key]
    return field


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 3] + "..."
