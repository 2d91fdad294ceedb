"""`docs/SETTINGS.md`: every key with its default, bounds and meaning, made from `schemas/settings.py`.

python -m pipelines.settings_page        writes it anew
"""

from collections.abc import Iterator
from pathlib import Path

import tomli_w
from pydantic.fields import FieldInfo

from pipelines.init import bounds_of, section_of
from schemas.settings import PASSED_THROUGH, Section, Settings

FILE = Path(__file__).parents[1] / "docs" / "SETTINGS.md"
_HEAD = """\
# Settings

Made from `schemas/settings.py` by `python -m pipelines.settings_page`: change it there. A run is one TOML file:
`dora init` writes one with every key, `--set key=value` changes a key for once, and an unknown key is refused with the
nearest name. Durations are seconds.
"""


def page() -> str:
    """The whole document."""
    plain = {key: field for key, field in Settings.model_fields.items() if section_of(field) is None}
    own = {key: field for key, field in plain.items() if key not in PASSED_THROUGH}
    lines = [_HEAD, "## Of the run", "", *_table("", own)]
    for key, field in Settings.model_fields.items():
        section = section_of(field)
        if section is not None:
            lines += ["", *_section(key, section, many=key == "dataset")]
    lines += ["", "## Of the libraries", "", "Not looked at: what is there goes on as it is.", ""]
    lines += [f"- `[{key}]` {plain[key].description}" for key in PASSED_THROUGH]
    return "\n".join(lines) + "\n"


def _section(name: str, section: type[Section], *, many: bool) -> Iterator[str]:
    """A table of the file, and those below it."""
    yield f"## `[[{name}]]`" if many else f"## `[{name}]`"
    yield ""
    yield " ".join((section.__doc__ or "").split())
    yield ""
    inner = {key: found for key, field in section.model_fields.items() if (found := section_of(field)) is not None}
    yield from _table(f"{name}.", {key: field for key, field in section.model_fields.items() if key not in inner})
    for key, below in inner.items():
        yield ""
        yield from _section(f"{name}.{key}", below, many=False)


def _table(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for key, field in fields.items():
        value = "needed" if field.is_required() else f"`{_toml(field.get_default(call_default_factory=True))}`"
        meaning = " ".join(part for part in (field.description or "", bounds_of(field)) if part)
        yield f"| `{prefix}{key}` | {value} | {_cell(meaning)} |"


def _toml(value: object) -> str:
    return tomli_w.dumps({"k": value}).strip().removeprefix("k = ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
