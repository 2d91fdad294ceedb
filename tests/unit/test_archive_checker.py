"""The archive checker finds nothing in a correct run, and every rule finds the breach it is for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests import archive_checker as checker
from tests.unit.small_run import write_run

Rows = list[dict[str, Any]]
Doctor = Callable[[Path], None]


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


def rewrite(run: Path, topic: str, change: Callable[[Rows], object]) -> None:
    """Change a topic's archived rows in place: the dicts of token rows, or of JSON records."""
    for file in sorted((run / "archive" / topic).glob("*.arrow")):
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        rows = table.to_pylist()
        if "value" in table.column_names:
            values = [json.loads(row["value"]) for row in rows]
            change(values)
            rows = [{**rows[min(place, len(rows) - 1)], "value": json.dumps(v)} for place, v in enumerate(values)]
        else:
            change(rows)
        schema = pa.schema([pa.field(field.name, field.type) for field in table.schema])
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def each(change: Callable[[dict[str, Any]], object]) -> Callable[[Rows], object]:
    """The change of every row."""
    return lambda rows: [change(row) for row in rows]


def both(change: Callable[[Rows], object]) -> Doctor:
    """The same change of the batches and of the journal's word on them, so that only the rule itself is broken."""

    def doctor(run: Path) -> None:
        rewrite(run, "batches", change)
        rewrite(run, "journal", lambda records: change(_batches(records)))

    return doctor


def _batches(journal: Rows) -> Rows:
    return [effect for record in journal for effect in record["effects"] if effect["kind"] == "batch"]


def _effects(journal: Rows, kind: str) -> Rows:
    return [effect for record in journal for effect in record["effects"] if effect["kind"] == kind]


def _drop_effect(kind: str, group: int | None = None) -> Doctor:
    def drop(journal: Rows) -> None:
        for record in journal:
            record["effects"] = [
                e for e in record["effects"] if e["kind"] != kind or (group is not None and e["group"] != group)
            ]

    return lambda run: rewrite(run, "journal", drop)


def _on(topic: str, change: Callable[[Rows], object]) -> Doctor:
    return lambda run: rewrite(run, topic, change)


def _drop_file(topic: str) -> Doctor:
    return lambda run: min((run / "archive" / topic).glob("*.arrow")).unlink()


def _drop_first_of_two(rows: Rows) -> None:
    if len(rows) > 1:
        del rows[0]


DOCTORS: list[tuple[Callable[..., object], str, Doctor]] = [
    (checker.steps_are_consecutive, "a step is missing", both(lambda batches: batches[1].update(step=7))),
    (checker.batches_have_B_groups, "not said to be exhausted", both(lambda b: b[2].update(exhausted=False))),
    (checker.batches_have_B_groups, "a group too few in the middle", both(lambda b: b[0]["groups"].pop())),
    (checker.groups_have_G_members, "a member is missing", both(lambda b: b[0]["members"].pop())),
    (checker.groups_have_G_members, "a sample twice", both(lambda b: b[0]["members"][0].update(index=1))),
    (checker.members_are_where_the_batch_says, "no such row", both(lambda b: b[0]["members"][0].update(row=1))),
    (checker.members_are_where_the_batch_says, "another's row", both(lambda b: b[0]["members"][0].update(attempt=1))),
    (checker.members_are_where_the_batch_says, "the row is not archived", _drop_file("trajectories")),
    (checker.lag_is_within_K, "lag 2", both(lambda b: b[2]["groups"][0].__setitem__(1, 0))),
    (checker.lag_is_within_K, "a version of the future", both(lambda b: b[0]["groups"][0].__setitem__(1, 1))),
    (checker.nothing_trains_twice, "a group in two steps", both(lambda b: b[2].update(groups=b[0]["groups"][:1]))),
    (checker.nothing_trains_twice, "a row in two steps", both(lambda b: b[2].update(members=b[0]["members"][:2]))),
    (checker.versions_are_consecutive, "a version is missing", _on("weights", lambda w: w.pop(1))),
    (checker.versions_are_consecutive, "a batch was never trained", _on("weights", lambda w: (w.pop(), w.pop()))),
    (
        checker.versions_are_consecutive,
        "announced again with other weights",
        _on("weights", lambda w: w.append({**w[-1], "fingerprint": "other"})),
    ),
    (checker.weights_name_their_batch, "another order", _on("weights", lambda w: w[1]["groups"].reverse())),
    (checker.weights_name_their_batch, "another step", _on("weights", lambda w: w[2].update(step=0))),
    (checker.weights_name_their_batch, "fewer rows", _on("weights", lambda w: w[1].update(trajectories=3))),
    (
        checker.a_group_has_one_version,
        "a stay under another version",
        _on("trajectories", each(lambda row: row["engine_path"][0].update(version=row["version"] + 1))),
    ),
    (
        checker.a_group_has_one_version,
        "a member was issued at another",
        _on("journal", lambda j: _effects(j, "issue")[0].update(version=1)),
    ),
    (
        checker.fingerprints_are_those_of_the_version,
        "sampled with other weights",
        _on("evaluations", each(lambda row: row["engine_path"][0].update(fingerprint="weights-1"))),
    ),
    (
        checker.fingerprints_are_those_of_the_version,
        "hosted other weights",
        _on("status", each(lambda s: s["kind"] == "hosting" and s.update(fingerprint="weights-0"))),
    ),
    (
        checker.token_columns_agree_in_length,
        "a log-prob too few",
        _on("trajectories", each(lambda row: row["logprobs"].pop())),
    ),
    (
        checker.times_are_in_order,
        "scored before it was finished",
        _on("trajectories", each(lambda row: row.update(scored_at=row["started_at"]))),
    ),
    (
        checker.scored_rows_have_a_verdict,
        "no reward and no error",
        _on("evaluations", each(lambda row: row.update(reward=None))),
    ),
    (
        checker.trained_rows_have_a_reward,
        "an error was trained",
        _on("trajectories", each(lambda row: row.update(reward=None, outcome=None, score_error="timed out"))),
    ),
    (
        checker.scored_rows_are_as_sampled,
        "re-tokenised ids",
        _on("trajectories", each(lambda row: row.update(response_ids=[9, 9]))),
    ),
    (checker.token_topics_have_no_gaps, "a record was lost", _on("completions", _drop_first_of_two)),
    (checker.run_names_agree, "a row of another run", _on("evaluations", each(lambda row: row.update(run="other")))),
    (checker.run_names_agree, "a metric of another run", _on("metrics", each(lambda x: x.update(run="other")))),
    (checker.journal_is_consecutive, "a record is missing", _on("journal", lambda j: j[2].update(sequence=3))),
    (checker.journal_and_batches_agree, "a batch nobody decided", _drop_effect("batch")),
    (checker.members_were_issued, "never issued", _drop_effect("issue", group=3)),
    (
        checker.members_were_issued,
        "issued for another prompt",
        _on("journal", lambda j: _effects(j, "issue")[0].update(prompt_row=99)),
    ),
    (checker.opened_groups_end_once, "silently lost", _drop_effect("void_group")),
    (
        checker.opened_groups_end_once,
        "voided and trained",
        _on("journal", lambda j: _effects(j, "void_group")[0].update(group=0)),
    ),
    (checker.held_out_groups_are_evaluated, "a held-out sample is missing", _drop_file("evaluations")),
]


def test_a_group_without_the_sample_that_it_lost_is_right_only_where_the_policy_says_so(
    correct: Path, tmp_path: Path
) -> None:
    """G = 3 of which one was lost in every trained group; then the word of one loss is missing, then the policy."""
    run = shutil.copytree(correct, tmp_path / "run")
    config = run / "config.toml"
    text = config.read_text().replace("group_size = 2", "group_size = 3")
    config.write_text(text.replace("[[dataset]]", '[scheduling]\ngroup_policy = "partial"\n[[dataset]]', 1))

    def lose(journal: Rows) -> None:
        lost = [{"kind": "sample_lost", "group": n, "index": 2, "version": 0, "reason": "late"} for n in range(5)]
        journal[0]["effects"] += lost

    rewrite(run, "journal", lose)
    assert list(checker.groups_have_G_members(checker.Run(run))) == []
    _drop_effect("sample_lost", group=3)(run)
    assert list(checker.groups_have_G_members(checker.Run(run))) != []
    rewrite(run, "journal", lose)
    config.write_text(config.read_text().replace('"partial"', '"all"'))
    assert len(list(checker.groups_have_G_members(checker.Run(run)))) == 5


def test_a_sample_that_goes_on_under_a_later_version_is_right_in_mode_partial_and_under_an_older_one_never(
    correct: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(correct, tmp_path / "run")
    config = run / "config.toml"
    config.write_text('mode = "partial"\n' + config.read_text())

    def later(row: dict[str, Any]) -> None:
        row["engine_path"][-1]["version"] += 1

    rewrite(run, "trajectories", each(later))
    assert list(checker.a_group_has_one_version(checker.Run(run))) == []
    rewrite(run, "trajectories", each(lambda row: row["engine_path"][-1].update(version=-1)))
    assert list(checker.a_group_has_one_version(checker.Run(run))) != []


def test_a_correct_run_has_no_violation(correct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checker.main([str(correct)]) == 0
    assert capsys.readouterr().out == f"0 violations of {len(checker.RULES)} rules\n"


@pytest.mark.parametrize(("rule", "case", "doctor"), DOCTORS, ids=[f"{d[0].__name__}: {d[1]}" for d in DOCTORS])
def test_a_doctored_run_is_caught(
    correct: Path, tmp_path: Path, rule: Callable[..., object], case: str, doctor: Doctor
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(correct, copy)
    doctor(copy)
    assert rule.__name__ in {violation.rule for violation in checker.check(copy)}, case
    assert checker.main([str(copy)]) == 1


def test_every_rule_has_a_doctored_run() -> None:
    assert {rule for rule, _, _ in DOCTORS} == set(checker.RULES)


def test_a_stopped_run_may_have_live_groups_but_no_more_than_its_limit(correct: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(correct, copy)
    _drop_effect("void_group")(copy)
    rewrite(copy, "journal", lambda j: _effects(j, "end_run")[0].update(outcome="cancelled"))
    assert checker.check(copy) == []


def test_a_run_that_was_done_and_went_on_is_judged_by_its_last_word(correct: Path, tmp_path: Path) -> None:
    """Done, resumed with more steps, then stopped by people (no word at all), cancelled, or failed: groups may live."""

    def go_on(last: str | None) -> Callable[[Rows], None]:
        def change(journal: Rows) -> None:
            end = next(record for record in journal if _effects([record], "end_run"))
            more = {**end, "sequence": len(journal), "events": [{"kind": "run_started", "steps": 9}], "effects": []}
            if last is not None:
                more["effects"] = [{**_effects([end], "end_run")[0], "outcome": last}]
            journal.append(more)

        return change

    for last in (None, "cancelled", "failed", "done"):
        copy = tmp_path / str(last)
        shutil.copytree(correct, copy)
        _drop_effect("void_group")(copy)
        rewrite(copy, "journal", go_on(last))
        broken = {violation.rule for violation in checker.check(copy)}
        assert broken == ({"opened_groups_end_once"} if last == "done" else set()), last


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    assert checker.main([str(tmp_path)]) == 2


def test_the_checker_shares_no_code_with_what_it_judges() -> None:
    source = Path(checker.__file__).read_text()
    assert "workers" not in source
    assert "pipelines" not in source
