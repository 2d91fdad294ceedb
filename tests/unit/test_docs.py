"""What README and docs say is there, is there: files, make targets, commands, settings."""

import re
from pathlib import Path

import pytest

from schemas.invariants import INVARIANTS
from schemas.settings import Settings, parse_settings
from tests.unit.test_house import ROOT, _dora, _keys

DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = "schemas|workers|pipelines|infra|tests|configs|docs|requirements"
NAMED = re.compile(rf"`((?:{PLACES})/[\w./*{{}},-]*)`|\]\(((?!https?:|#)[^)]+)\)")
OF_A_RUN = re.compile(r"^(runs|archive|checkpoints|weights|logs)/")


def _text(doc: Path) -> str:
    return doc.read_text()


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_doc_names_only_files_that_exist(doc: Path) -> None:
    missing = []
    for in_code, link in NAMED.findall(_text(doc)):
        name = in_code or link.split("#")[0]
        base = ROOT if in_code else doc.parent
        if not OF_A_RUN.match(name) and not list(base.glob(name)) and not (base / name).exists():
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_doc_names_only_make_targets_that_exist(doc: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", _text(doc), re.M))
    assert {a or b for a, b in named} <= targets


def test_docs_name_only_commands_and_options_that_exist() -> None:
    helped = _dora("--help")
    commands = set(re.findall(r"^\W*([a-z][a-z-]+) {2,}\S", helped.split("Commands", 1)[1], re.M))
    assert {"run", "worker"} <= commands
    named: dict[str, set[str]] = {}
    for doc in DOCS:
        for command, rest in re.findall(r"(?:`|^|\$ |/)dora ([a-z][a-z-]*)([^`\n]*)", _text(doc), re.M):
            named.setdefault(command, set()).update(re.findall(r"(--[a-z][a-z-]+)", rest))
    assert set(named) <= commands
    for command, options in named.items():
        assert options <= set(re.findall(r"--[a-z][a-z-]+", _dora(command, "--help"))), command


def test_readme_names_every_command() -> None:
    helped = _dora("--help")
    commands = set(re.findall(r"^\W*([a-z][a-z-]+) {2,}\S", helped.split("Commands", 1)[1], re.M))
    readme = _text(ROOT / "README.md")
    assert [command for command in commands if f"dora {command}" not in readme] == []


def test_readme_names_every_configuration() -> None:
    readme = _text(ROOT / "README.md")
    assert [path.name for path in (ROOT / "configs").glob("*.toml") if f"configs/{path.name}" not in readme] == []


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_configuration_that_we_ship_is_valid(config: Path) -> None:
    parse_settings(config.read_text(), config.name)


def test_docs_name_only_settings_that_exist() -> None:
    keys = {*_keys(Settings)}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for doc in DOCS:
        for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)(?: = [^`]*)?`", _text(doc)):
            if section in sections:
                assert f"{section}.{key}" in keys, f"{doc.name} names {section}.{key}"


def test_architecture_names_every_room_and_every_invariant_is_spoken_of() -> None:
    text = _text(ROOT / "docs/ARCHITECTURE.md")
    rooms = [f"workers/{path.name}" for path in (ROOT / "workers").iterdir() if (path / "__init__.py").exists()]
    assert [room for room in [*rooms, "schemas", "pipelines"] if room not in text] == []
    assert [i.name for i in INVARIANTS if not re.search(rf"\b{i.name}\b", text)] == []


def test_every_invariant_is_stated_with_its_sentence_and_the_page_is_linked() -> None:
    text = " ".join(_text(ROOT / "docs/INVARIANTS.md").split())
    assert [i.name for i in INVARIANTS if f"**{i.name}** {i.sentence.rstrip('.')}" not in text] == []
    assert "(INVARIANTS.md)" in _text(ROOT / "docs/ARCHITECTURE.md")


def test_decisions_are_numbered_without_gaps_and_linked() -> None:
    notes = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(note.name[:4]) for note in notes] == list(range(1, len(notes) + 1))
    text = _text(ROOT / "docs/ARCHITECTURE.md")
    assert [note.name for note in notes if note.name not in text] == []
