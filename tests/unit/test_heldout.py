"""Held-out rows on every k-th version: one file a version, nothing lost or doubled, whatever is deleted meanwhile."""

import json
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from pipelines import heldout
from pipelines.alone import alone
from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.evaluate import LOCK
from pipelines.heldout import HeldOut, Pins, evaluated, pin
from schemas import messages as m
from schemas.settings import Settings
from schemas.topics import EVALUATOR_PARTITION, Topics, version_key
from tests.unit.pipeline_parts import some_rows, some_settings, write_rows
from tests.unit.reward_rows import a_process
from workers.rollout.engines.paced_engine import PacedEngine
from workers.runtime.errors import BadInput
from workers.taps import archive, evaluate
from workers.trainer.learners.paced_learner import PacedLearner
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus
from workers.transport.weights.manifest import probe_ids
from workers.transport.weights.store import Store

GRADER = "workers.reward.toy_graders:low_share"
VERSIONS = 7


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_rows(tmp_path / "held.jsonl", some_rows(3, "held"))
    sets = [{"path": "rows.jsonl", "grader": GRADER}, {"path": "held.jsonl", "grader": GRADER, "purpose": "eval"}]
    return some_settings(tmp_path, dataset=sets, evaluation={"samples": 2}, dtype="float32")


@pytest.fixture
def run_dir(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archived run that ended, with the files of all versions."""
    monkeypatch.setattr(heldout, "engine_of", lambda settings, **_: PacedEngine(settings, pace=0.0, load_s=0.0))
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    write_resolved(settings, folder)
    bus, topics, model = MemoryBus(), Topics("r"), Path(settings.model)
    bus.make_topics(topics.specs())
    store, learner = Store(folder / "weights"), PacedLearner(settings, pace=0.0)
    probes = learner.probe(probe_ids(json.loads((model / "config.json").read_text())["vocab_size"]))
    for version in range(VERSIONS):
        learner._state = bytes([version] * len(learner._state))
        made = store.publish(
            version, learner.export(), model_folder=model, probe_logprobs=probes, dtype="float32"
        )  # fmt: skip
        weights = m.WeightsRecord(
            run="r", version=version, step=None, groups=(), trajectories=0, location=made.location,
            manifest_sha256=made.manifest_sha256, fingerprint=made.fingerprint, created_at=1,
        )  # fmt: skip
        publish(bus.producer(), topics.weights, weights, key=version_key(version))
    process = a_process(folder, "archive")
    process.stopping.set()
    assert archive.serve(process, bus) == 0
    return folder


def _held(run_dir: Path, every: int, stopping: threading.Event | None = None) -> HeldOut:
    held = HeldOut(run_dir, every, stopping or threading.Event())
    held.run()
    return held


def _rows(run_dir: Path) -> list[tuple[int, int, int]]:
    rows = archive.read(run_dir, "evaluations").to_pylist()
    assert all(row["partition"] == EVALUATOR_PARTITION for row in rows)
    assert [row["offset"] for row in rows] == list(range(len(rows)))
    return [(row["version"], row["group"], row["index"]) for row in rows]


ALL = [(group, index) for group in (-1, -2, -3) for index in range(2)]


def test_every_second_version_has_a_point_with_its_own_fingerprint(run_dir: Path) -> None:
    assert _held(run_dir, 2).missing() == []
    assert _rows(run_dir) == [(version, *one) for version in (0, 2, 4, 6) for one in ALL]
    announced = archive.read(run_dir, "weights").column("value").to_pylist()
    fingerprint = {said["version"]: said["fingerprint"] for said in map(json.loads, announced)}
    assert evaluate.fingerprints(run_dir) == {version: fingerprint[version] for version in (0, 2, 4, 6)}
    assert len(set(fingerprint.values())) == VERSIONS
    curve = evaluate.heldout(run_dir)
    assert {version: of["all"].rows for version, of in curve.items()} == dict.fromkeys((0, 2, 4, 6), 6)
    done = CliRunner().invoke(app, ["eval", str(run_dir), "--json"], catch_exceptions=False)
    points = [point for point in json.loads(done.stdout)["heldout"] if point["of"] == "all"]
    assert [point["fingerprint"] for point in points] == [fingerprint[version] for version in (0, 2, 4, 6)]
    page = run_dir / "page.html"
    assert CliRunner().invoke(app, ["report", str(run_dir), "--html", str(page)]).exit_code == 0
    assert all(fingerprint[version][:16] in page.read_text() for version in (0, 2, 4, 6))
    assert not (run_dir / heldout.PINNED).exists()


class _Killed(Exception):
    """In place of SIGKILL."""


@pytest.mark.parametrize("moment", ["while it samples", "before its file", "after its file"])
def test_killed_and_started_again_no_row_is_lost_or_doubled(
    run_dir: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"while it samples": 40, "before its file": 2, "after its file": 2}[moment]
    write, step = archive.write_file, PacedEngine.step

    def killed() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise _Killed

    def writing(*arguments: Any) -> None:
        if moment == "before its file":
            killed()
        write(*arguments)
        if moment == "after its file":
            killed()

    def stepping(engine: PacedEngine) -> Any:
        if moment == "while it samples":
            killed()
        return step(engine)

    with monkeypatch.context() as broken:
        broken.setattr(archive, "write_file", writing)
        broken.setattr(PacedEngine, "step", stepping)
        with pytest.raises(_Killed):
            _held(run_dir, 3)
    shutil.rmtree(run_dir / "weights")  # the run has deleted all: what is pinned is there
    done = evaluated(run_dir)
    assert _held(run_dir, 3).missing() == []
    assert sorted(_rows(run_dir), key=lambda one: (one[0], -one[1])) == [
        (version, *one) for version in (0, 3, 6) for one in ALL
    ]
    assert len(done) == {"while it samples": 2, "before its file": 1, "after its file": 2}[moment]
    before = (run_dir / "archive" / "evaluations").stat().st_mtime_ns
    _held(run_dir, 3)
    assert (run_dir / "archive" / "evaluations").stat().st_mtime_ns == before, "nothing was left to do"


def test_what_was_deleted_before_it_was_heard_of_is_named(run_dir: Path) -> None:
    Store(run_dir / "weights").delete(3)
    missing = _held(run_dir, 1).missing()
    assert missing == [
        "versions 3 were deleted before they were heard of: begin with the run, or have it keep them for good "
        "(scheduling.weights_keep_every = 1)"
    ]  # fmt: skip
    assert evaluated(run_dir) == {0, 1, 2, 4, 5, 6}


def test_a_pinned_version_is_that_one_also_when_the_store_has_another_by_then(run_dir: Path) -> None:
    text = archive.read(run_dir, "weights").column("value").to_pylist()[2]
    weights = m.WeightsRecord.model_validate_json(text)
    pinned = pin(weights, run_dir / "pinned")
    assert pinned is not None
    Store(run_dir / "weights").delete(2)
    folder, manifest = Store.open(pinned)
    assert folder.parent == run_dir / "pinned"
    assert manifest.fingerprint == weights.fingerprint
    assert pin(weights, run_dir / "pinned") == pinned
    (run_dir / "weights").rename(run_dir / "elsewhere")
    assert pin(weights.model_copy(update={"version": 5}), run_dir / "pinned") is None


def test_an_evaluator_that_is_told_to_stop_writes_nothing_half(run_dir: Path) -> None:
    stopping = threading.Event()
    stopping.set()
    _held(run_dir, 1, stopping)
    assert evaluated(run_dir) == set()


def test_pins_are_made_while_an_engine_is_busy(run_dir: Path) -> None:
    bus = MemoryBus()
    pins = Pins(run_dir, 2, {2}, threading.Event(), lambda *_: nullcontext(bus))
    pins.start()
    pins.join(30)
    assert sorted(folder.name for folder in (run_dir / "pinned").iterdir()) == ["v000000", "v000004", "v000006"]


def test_what_cannot_be_evaluated_is_said(run_dir: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines import flows

    with alone(run_dir / LOCK, "this one has it"):
        done = CliRunner().invoke(app, ["eval", str(run_dir), "--follow"])
        assert (done.exit_code, "another `dora eval --follow` works on" in done.stderr) == (2, True)
        flow_run = SimpleNamespace(id=uuid4())
        monkeypatch.setattr(flows.FlowRunContext, "get", lambda: SimpleNamespace(flow_run=flow_run))
        state = flows.evaluate.fn(str(run_dir))
        assert (state.name, "another `dora eval --follow`" in state.message) == ("Cancelled", True)
    assert "only `--follow` samples" in CliRunner().invoke(app, ["eval", str(run_dir), "--every", "2"]).stderr
    write_resolved(
        settings.model_copy(update={"dataset": settings.dataset[:1], "evaluation": type(settings.evaluation)()}),
        run_dir,
    )  # fmt: skip
    with pytest.raises(BadInput, match="no \\[\\[dataset\\]\\] with purpose"):
        HeldOut(run_dir, 1, threading.Event())
