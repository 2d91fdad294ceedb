"""`dora run` as people start it: a process of its own, with everything it starts; and what must be true afterwards."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipelines.config_file import read_resolved
from pipelines.home import HOME_VARIABLE
from schemas.messages import Effect, JournalRecord
from schemas.summary import Summary
from tests.archive_checker import check
from workers.orchestrator import recovery
from workers.taps import archive

ROOT = Path(__file__).parents[2]
MARK = "DORA_TEST_MARK"
LIMIT_S = 280.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that has ended. `run_dir` is its folder."""

    code: int
    said: str
    run_dir: Path

    @property
    def summary(self) -> Summary:
        return Summary.model_validate_json((self.run_dir / "summary.json").read_text())


@dataclass
class Running:
    """A run under way."""

    popen: "subprocess.Popen[bytes]"
    output: Path
    run_dir: Path
    mark: str

    def wait(self, limit_s: float = LIMIT_S) -> Ran:
        """Its end; AssertionError with what it said after `limit_s`."""
        try:
            code = self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"dora run did not end within {limit_s} s:\n{self.story()}") from None
        return Ran(code, self.output.read_text(), self.run_dir)

    def processes(self) -> list[psutil.Process]:
        """Everything that this run started and that still runs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def worker(self, name: str) -> int:
        """The process id of a worker."""
        said = json.loads((self.run_dir / "supervisor.json").read_text())
        return int(said["processes"][name]["pid"])

    def story(self) -> str:
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs]
        return "\n".join([self.output.read_text(), *tails])


@contextlib.contextmanager
def dora_run(
    config: str,
    folder: Path,
    *overrides: str,
    name: str = "r",
    resume: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start `dora run configs/<config>.toml` as run `name` in `folder`; whatever is left at the end is killed.
    `environment` is given to the run and to all that it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    argv = [sys.executable, "-m", "pipelines.cli", "run", str(ROOT / "configs" / f"{config}.toml")]
    settings = (f"name={name}", f"runs_dir={folder}", *overrides)
    argv += [part for setting in settings for part in ("--set", setting)] + (["--resume"] if resume else [])
    output = folder / f"output-{mark[:6]}.txt"
    with output.open("wb") as sink:
        popen = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**environment_of(mark), **(environment or {})},
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    running = Running(popen, output, folder / name, mark)
    try:
        yield running
    finally:
        for process in running.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        popen.wait()


def environment_of(mark: str) -> Mapping[str, str]:
    """For a command of a test and all that it starts: nothing of ours is set but its mark and the tests' home."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DORA_"))}
    return given | {MARK: mark, "OMP_NUM_THREADS": "1", HOME_VARIABLE: str(ROOT / ".run" / "tests")}


def assert_good(ran: Ran, running: Running, steps: int, *, faults: bool = False) -> None:
    """Exit 0, a clean archive, a summary of all steps, a journal that replays to the same effects, nothing left; and
    without `faults` no error in any log (those of Kafka's client, which tries again, apart)."""
    assert ran.code == 0, running.story()
    assert running.processes() == []
    assert check(ran.run_dir) == []
    assert ran.summary.steps == steps
    assert ran.summary.versions.published == steps + 1
    assert replayed_differently(ran.run_dir) == []
    if faults:
        return
    assert [error for log in sorted((ran.run_dir / "logs").glob("*.log")) for error in _errors(log)] == []


def _errors(log: Path) -> list[str]:
    """Records of a log that are errors, whole, with what they trace; those of Kafka's client apart."""
    records: list[str] = []
    for line in log.read_text(errors="replace").splitlines():
        if re.match(r"\d{4}-\d\d-\d\d", line) or not records:
            records.append(f"{log.name}: {line}")
        else:
            records[-1] += f"\n{line}"
    wrong = [record for record in records if " ERROR " in record.split("\n")[0] or "Traceback" in record]
    return [record for record in wrong if not re.match(r"\S+ \S+ (\S+ )?(ERROR|WARNING) kafka\.", record)]


def journal(run_dir: Path) -> list[JournalRecord]:
    """The archived journal."""
    texts = archive.read(run_dir, "journal").column("value").to_pylist()
    return [JournalRecord.model_validate_json(text) for text in texts]


def replayed_differently(run_dir: Path) -> list[int]:
    """I9: numbers of the journal records whose effects the mind would not give again, byte for byte."""
    settings = read_resolved(run_dir)
    records = journal(run_dir)
    mind = recovery.replay(settings, [])
    different = []
    for record in records:
        again: list[Effect] = [effect for event in record.events for effect in mind.on(event)]
        if [effect.model_dump_json() for effect in again] != [effect.model_dump_json() for effect in record.effects]:
            different.append(record.sequence)
    return different
