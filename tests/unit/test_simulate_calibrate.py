"""A cost model out of an archive that was written by hand: each figure is what was put in."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.simulate.calibrate import Pair, calibrate, line
from pipelines.simulate.lengths import Empirical
from schemas import messages as m
from tests.unit.pipeline_parts import a_config
from tests.unit.reward_rows import a_row
from workers.runtime.errors import BadInput
from workers.taps import archive

SECOND = 1_000_000
WORD = tuple[float, m.Message]


def _text_file(run_dir: Path, kind: str, words: list[WORD]) -> None:
    rows = [
        {"partition": 0, "offset": n, "timestamp": round(at * SECOND), "key": None, "id": "i"}
        | {"value": word.model_dump_json()}
        for n, (at, word) in enumerate(words)
    ]
    table = pa.Table.from_pylist(rows, schema=archive.TEXT_SCHEMA)
    archive.write_file(run_dir / "archive" / kind / f"0.{0:020d}.arrow", table)


def _rows(run_dir: Path, without: str = "", topic: str = "trajectories", first: int = 0) -> None:
    rows = []
    for group, tokens in enumerate((4, 4, 9)):
        row = a_row(first + group, 0) | {
            "scored_at": 3_500_000,
            "reward": 1.0,
            "outcome": 1.0,
            "prompt_row": group // 2,
        }
        for name, value in (("response_ids", 7), ("logprobs", -0.5), ("loss_mask", True)):
            row[name] = [value] * tokens
        row["engine_path"][0]["tokens"] = tokens
        rows.append(row | {"partition": 0, "offset": group})
    table = pa.Table.from_pylist(rows, schema=archive._TOKEN_SCHEMAS[topic])
    if without:
        table = table.drop_columns([without])
    archive.write_file(run_dir / "archive" / topic / f"0.{0:020d}.arrow", table)


def _beats(engine: int, at: float, running: tuple[int, ...], t0_s: float, t1_s: float) -> list[WORD]:
    """A heartbeat after each ten decoding steps, and the one before."""
    words: list[WORD] = []
    tokens, decode_s = 0, 0.0
    for place, count in enumerate((running[0], *running)):
        if place:
            tokens += 10 * count
            decode_s += 10 * (t0_s + t1_s * count)
        names = {"engine": engine, "incarnation": 1, "version": 0, "running": count, "waiting": 0, "kv_tokens": 0}
        words.append((at + place, m.Heartbeat(**names, tokens=tokens, decode_s=decode_s, prefill_s=0.1)))
    return words


def _write(run_dir: Path, without: str = "") -> Path:
    """Engine 0 decodes while nobody trains (0.02 + 0.001 b), engine 1 while step 0 trains (0.03 + 0.002 b)."""
    _rows(run_dir, without)
    joined = {"incarnation": 1, "host": "h", "seats": 8, "tokens_per_request_max": 100}
    status: list[WORD] = [
        (0.0, m.Joined(engine=0, kv_tokens_max=900, **joined)),
        (0.0, m.Joined(engine=1, kv_tokens_max=800, **joined)),
        (0.5, m.Hosting(engine=0, incarnation=1, version=0, fingerprint="f", load_s=1.5)),
        (0.6, m.Hosting(engine=1, incarnation=1, version=0, fingerprint="f", load_s=2.5)),
        *_beats(0, 10.0, (2, 2, 2, 2, 5, 5, 5), 0.02, 0.001),
        *_beats(1, 110.0, (1, 1, 1, 4, 4, 4), 0.03, 0.002),
    ]
    _text_file(run_dir, "status", status)
    groups = ((0, 0), (1, 0))
    names = {"run": "r", "location": "file:///w", "manifest_sha256": "s", "fingerprint": "f", "created_at": 0}
    first = m.WeightsRecord(**names, version=0, step=None, groups=(), trajectories=0, kind="full", base=None)
    second = {"version": 1, "step": 0, "groups": groups, "trajectories": 2, "metrics": {"train_s": 37.0}}
    words: list[WORD] = [(0.0, first), (140.0, m.WeightsRecord(**names, **second, kind="full", base=None))]
    _text_file(run_dir, "weights", words)
    batch = m.BatchRecord(run="r", step=0, exhausted=False, groups=groups, members=())
    _text_file(run_dir, "batches", [(100.0, batch)])
    return run_dir


def test_each_figure_is_what_the_run_took(tmp_path: Path) -> None:
    cost, work = calibrate(_write(tmp_path))
    assert (cost.t0_s, cost.t1_s) == pytest.approx((0.02, 0.001))
    assert (cost.t0_busy_s, cost.t1_busy_s) == pytest.approx((0.03, 0.002))
    assert (cost.load_s, cost.train_s, cost.publish_s, cost.score_s) == pytest.approx((2.0, 37.0, 3.0, 0.5))
    assert cost.prefill_tokens_per_s == pytest.approx(9 / 0.2)
    assert work.lengths == Empirical(((4, 4), (9,)))
    assert (work.prompt, work.kv_tokens) == (3, 800)


def test_what_was_evaluated_was_prefilled_too(tmp_path: Path) -> None:
    run_dir = _write(tmp_path)
    _rows(run_dir, topic="evaluations", first=3)
    cost, work = calibrate(run_dir)
    assert cost.prefill_tokens_per_s == pytest.approx(18 / 0.2)
    assert work.lengths == Empirical(((4, 4), (9,)))


def test_the_first_load_of_an_engine_is_not_what_a_swap_takes(tmp_path: Path) -> None:
    run_dir = _write(tmp_path)
    limits = {"seats": 8, "kv_tokens_max": 900, "tokens_per_request_max": 100}
    words: list[WORD] = [(0.0, m.Joined(engine=0, incarnation=1, host="h", **limits))]
    for version, seconds in ((0, 9.0), (1, 0.5)):
        hosting = m.Hosting(engine=0, incarnation=1, version=version, fingerprint="f", load_s=seconds)
        words.append((1.0 + version, hosting))
    _text_file(run_dir, "status", [*words, *_beats(0, 10.0, (2, 2, 2, 2, 5, 5, 5), 0.02, 0.001)])
    assert calibrate(run_dir)[0].load_s == pytest.approx(0.5)


def test_one_number_of_requests_gives_no_slope_and_a_slope_is_never_negative() -> None:
    alike = [Pair(4, 10, 0.5, 0, 1)] * 3
    assert line(alike) == pytest.approx((0.05, 0.0))
    falling = [Pair(1, 10, 0.6, 0, 1), Pair(9, 10, 0.4, 0, 1)]
    assert line(falling) == pytest.approx((0.05, 0.0))
    steep = [Pair(1, 10, 0.1, 0, 1), Pair(10, 10, 10.0, 0, 1)]
    t0_s, t1_s = line(steep)
    assert t0_s > 0
    assert t1_s == pytest.approx((10 * 0.1 + 100 * 10.0) / (10**2 + 100**2))


def test_a_run_and_its_configuration_are_simulated(tmp_path: Path) -> None:
    run_dir = _write(tmp_path / "r")
    config = a_config(tmp_path, steps=6, sampling={"max_new_tokens": 9})
    (run_dir / "config.toml").write_text(config.read_text())
    arguments = ["simulate", str(config), "--calibrate-from", str(run_dir), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["cost_model"]["work"]["lengths"] == {"kind": "empirical", "prompts": 2, "median": 4, "longest": 9}
    assert said["modes"]["dora"]["step_minutes"] * 60 >= 37


def test_an_archive_that_lacks_what_is_needed_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no rows of trajectories"):
        calibrate(tmp_path)
    with pytest.raises(BadInput, match=r"archive/trajectories/0\.0+\.arrow is damaged \(no column engine_path\)"):
        calibrate(_write(tmp_path / "a", without="engine_path"))
    run_dir = _write(tmp_path / "b")
    _text_file(run_dir, "weights", [])
    with pytest.raises(BadInput, match="no rows of weights"):
        calibrate(run_dir)
    run_dir = _write(tmp_path / "c")
    _text_file(run_dir, "status", _beats(0, 0.0, (1, 1), 0.1, 0.1))
    with pytest.raises(BadInput, match="2 pairs of heartbeats"):
        calibrate(run_dir)
