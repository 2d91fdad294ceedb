"""`dora replay --group G --regenerate` with paced engines, whose tokens are a function of seed and place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.replay_regenerate import OTHERS_MAX, regenerate
from schemas import messages as m
from schemas.ids import sampling_seed
from tests.integration.helpers_vllm import request, run_all
from tests.unit.pipeline_parts import write_model
from tests.unit.test_replay import Stopping
from tests.unit.trainer_world import GROUP_SIZE, MODEL_CONFIG, World, row
from workers.rollout.engines.paced_engine import PacedEngine
from workers.runtime.process import Process
from workers.taps import archive
from workers.trainer.service import serve
from workers.transport.records.bus import publish

TOKENS = 40
PROMPT = [9, 9, 1]


def sampled(engine: PacedEngine, world: World, group: int, index: int, version: int) -> dict[str, Any]:
    """A row as this engine says it."""
    seed = sampling_seed(world.settings.seed, group, index)
    one = request(PROMPT, version=version, group=group, index=index, max_new_tokens=TOKENS, seed=seed)
    ids, logprobs = run_all(engine, [one])[one.key]
    return row(group, index, version, prompt_ids=PROMPT, response_ids=ids, logprobs=logprobs, loss_mask=[True] * TOKENS)


def ran(folder: Path, **changes: Any) -> None:
    """An archived run of one step: group 0 of version 0 by paced engines; `changes` of the row of its sample 1."""
    model = folder / "model"
    (write_model(model) / "config.json").write_text(MODEL_CONFIG)
    world = World(folder, model, engines={"kind": "paced"})
    write_resolved(world.settings, folder)
    world.next_group = 1
    world.send_batch(world.batch(0))
    process = Process("trainer", world.settings, folder)
    assert serve(process, world.bus, Stopping(process, 1)) == 0
    (announced, *_) = world.weights()
    engine = PacedEngine(world.settings, pace=0)
    engine.load(announced)
    for index in range(GROUP_SIZE):
        said = sampled(engine, world, 0, index, 0)
        said["engine_path"] = [
            {**said["engine_path"][0], "fingerprint": announced.fingerprint, "tokens": tokens}
            for tokens in (10, TOKENS - 10)
        ]
        world.add_row(said | (changes if index else {}))
    issue = {"engine": 1, "incarnation": 1, "sequence": 1, "purpose": "train", "prompt_row": 2, "queued_at": 1}
    effect = m.Issue(group=0, index=0, attempt=0, version=0, **issue)
    record = m.JournalRecord(run="r", sequence=0, inputs={}, events=(), effects=(effect,))
    publish(world.bus.producer(), world.topics.journal, record)
    archiving = Process("archive", world.settings, folder)
    archiving.stopping.set()
    assert archive.serve(archiving, world.bus) == 0


def asked(folder: Path, *more: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["replay", str(folder), *more], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_a_group_comes_out_again_with_tokens_and_log_probs(tmp_path: Path) -> None:
    ran(tmp_path)
    code, out, _ = asked(tmp_path, "--group", "0", "--regenerate")
    assert code == 0
    assert out.count(f"{TOKENS} of {TOKENS} tokens equal, log-probs differ by 1.5e-08 on average") == GROUP_SIZE
    assert out.splitlines()[-1].startswith("as it was: all tokens equal")


def test_another_token_is_shown_and_hides_no_later_one(tmp_path: Path) -> None:
    ran(tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    assert regenerate(tmp_path, 0).same
    tokens = archive.read(tmp_path, "trajectories").to_pylist()[1]["response_ids"]
    for place in (3, 20, TOKENS - 1):
        tokens[place] = (tokens[place] + 1) % 256
    ran(folder, response_ids=tokens)
    code, out, _ = asked(folder, "--group", "0", "--regenerate", "--json")
    assert code == 1
    said = json.loads(out)["regenerated"]
    assert [one["same"] for one in said["samples"]] == [True, False]
    assert said["samples"][1]["others"] == [3, 20, TOKENS - 1]
    assert said["samples"][1]["equal"] == TOKENS - 3


def test_log_probs_that_are_away_differ_though_all_tokens_are_equal(tmp_path: Path) -> None:
    ran(tmp_path, logprobs=[-5.0] * TOKENS)
    (first, second) = regenerate(tmp_path, 0).samples
    assert first.same("float32")
    assert not second.same("float32")
    assert second.others == []
    assert second.mean == pytest.approx(0.545, abs=1e-3)


def test_a_sample_of_other_weights_is_given_up_after_some_tokens_and_its_fingerprint_named(tmp_path: Path) -> None:
    stay = {"engine": "e", "version": 0, "fingerprint": "stale", "tokens": TOKENS, "kv_reused": 0, "kv_recomputed": 0}
    ran(tmp_path, response_ids=[-1 % 512] * TOKENS, engine_path=[stay])
    code, out, _ = asked(tmp_path, "--group", "0", "--regenerate")
    assert code == 1
    assert "the rest not looked at; it was sampled on stale, which is no version's  DIFFERS" in out
    (_, second) = regenerate(tmp_path, 0).samples
    assert len(second.others) == OTHERS_MAX
    assert not second.whole


def test_a_sample_of_several_versions_is_compared_on_each(tmp_path: Path) -> None:
    """Mode `partial`: tokens 0 to 9 of version 0, the rest of version 1."""
    ran(tmp_path)
    fingerprints = {one["version"]: one["fingerprint"] for one in map(json.loads, _weights(tmp_path))}
    path = [
        {
            "engine": "e",
            "version": version,
            "fingerprint": fingerprints[version],
            "tokens": tokens,
            "kv_reused": 0,
            "kv_recomputed": 0,
        }
        for version, tokens in ((0, 10), (1, TOKENS - 10))
    ]
    folder = tmp_path / "mixed"
    folder.mkdir()
    ran(folder, engine_path=path)
    said = regenerate(folder, 0)
    assert said.same
    assert said.fingerprints == fingerprints
    assert [len(one.differences) for one in said.samples] == [TOKENS] * GROUP_SIZE


def _weights(folder: Path) -> list[str]:
    return [str(text) for text in archive.read(folder, "weights").column("value").to_pylist()]


def test_a_version_that_is_gone_says_which_are_kept_and_how_to_keep_more(tmp_path: Path) -> None:
    ran(tmp_path)
    shutil.rmtree(tmp_path / "weights" / "v000000")
    code, _, err = asked(tmp_path, "--group", "0", "--regenerate")
    assert code == 2
    assert "the files of version 0 are gone (kept: 1)" in err
    assert "scheduling.weights_keep" in err
    assert "dora export" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [(("--regenerate",), "--group G"), (("--group", "5", "--regenerate"), "no group 5")],
)
def test_a_group_must_be_named_that_there_is(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    ran(tmp_path)
    code, _, err = asked(tmp_path, *more)
    assert code == 2
    assert said in err
