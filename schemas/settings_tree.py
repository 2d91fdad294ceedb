"""The tree of a TOML text before it is settings: `--set` puts a value in, and keys that do not exist are found."""

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel


def override(tree: dict[str, Any], text: str) -> None:
    """Set one key, `a.b=value` (a TOML value; bare words are strings). ValueError says what to write."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ValueError(f"--set {text}: write key=value, e.g. --set engines.count=3")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *parents, last = path.strip().split(".")
    node: Any = tree
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ValueError(f"--set {text}: {'.'.join(parents)} is no table")
    node[last] = parsed


def unknown(
    tree: Mapping[str, Any], model: type[BaseModel], passed_through: Collection[str], prefix: str = ""
) -> Iterator[str]:
    """A sentence for each key that does not exist; tables that go to foreign libraries are not looked into."""
    for key, value in tree.items():
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(sorted(model.model_fields))}"
            yield f"unknown key {prefix}{key}: {hint}"
            continue
        if key in passed_through and not prefix:
            continue
        inner = _section_of(model, key)
        if inner is None:
            continue
        for place, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict):
                number = f".{place}" if isinstance(value, list) else ""
                yield from unknown(item, inner, passed_through, f"{prefix}{key}{number}.")


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    kind = model.model_fields[key].annotation
    for candidate in (kind, *getattr(kind, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
