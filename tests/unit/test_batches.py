"""From the list of a batch to its rows; what may not be trained is refused before the gradient (cases B02, B04)."""

from pathlib import Path
from typing import Any

import pytest

from schemas.messages import BatchRecord
from schemas.settings import Settings
from tests.unit.trainer_world import GROUP_SIZE, World, row
from workers.trainer.batches import Gatherer, check, figures


def gathered(world: World, record: BatchRecord) -> list[dict[str, Any]]:
    gatherer = Gatherer(world.bus, world.topics, {})
    try:
        return gatherer.rows(record)
    finally:
        gatherer.close()


def settings_of(staleness_max: int, **changes: Any) -> Settings:
    tree = {"model": "a folder", "steps": 100, "group_size": GROUP_SIZE, "dataset": [{"path": "rows.jsonl"}]}
    return Settings.model_validate({**tree, "staleness_max": staleness_max, **changes})


def check_with(record: BatchRecord, rows: list[dict[str, Any]], staleness_max: int = 2) -> None:
    check(record, rows, settings_of(staleness_max))


def test_rows_come_in_the_order_of_the_batch_and_not_of_the_log(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0, [0, 0, 0])
    turned = record.model_copy(update={"groups": record.groups[::-1], "members": record.members[::-1]})
    rows = gathered(world, turned)
    assert [(one["group"], one["index"]) for one in rows] == [(2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0)]
    check_with(turned, rows)


def test_a_row_among_several_of_one_record_is_found_by_its_number(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0, [0])
    two = gathered(world, record)
    assert [one["index"] for one in two] == [0, 1]


def test_a_group_of_version_3_cannot_reach_step_12_when_k_is_8(tmp_path: Path) -> None:
    world = World(tmp_path)
    late = world.batch(12, [3, 12])
    with pytest.raises(AssertionError, match="lag 9 > 8"):
        check_with(late, gathered(world, late), staleness_max=8)
    in_time = world.batch(11, [3, 11])
    check_with(in_time, gathered(world, in_time), staleness_max=8)


def test_with_k_0_every_row_has_lag_0_over_ten_steps(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(10):
        record = world.batch(step)
        rows = gathered(world, record)
        check_with(record, rows, staleness_max=0)
        assert figures(record, rows, {}, now_us=10)["lag_max"] == 0.0
    old = world.batch(10, [9, 10])
    with pytest.raises(AssertionError, match="lag 1 > 0"):
        check_with(old, gathered(world, old), staleness_max=0)


def test_a_group_of_a_version_to_come_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0, [1, 0])
    with pytest.raises(AssertionError, match="lag -1"):
        check_with(record, gathered(world, record))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, "version is 1"),
        ({"purpose": "eval"}, "purpose is 'eval'"),
        ({"attempt": 3}, "attempt is 3"),
        ({"logprobs": [-1.0]}, "logprobs has 1 entries"),
        ({"reward": None, "outcome": None, "score_error": "timeout"}, "not scored"),
        ({"loss_mask": [True, False, True]}, "where loss_mask is false"),
    ],
)
def test_a_row_that_is_not_what_the_batch_says_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    world = World(tmp_path)
    record = world.batch(1, [0, 1])
    rows = gathered(world, record)
    rows[1] |= changes
    with pytest.raises(AssertionError, match=said):
        check_with(record, rows)


def test_a_group_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0)
    short = record.model_copy(update={"members": record.members[:-1]})
    with pytest.raises(AssertionError, match=r"has samples \[0\]"):
        check_with(short, gathered(world, short))
    doubled = record.model_copy(update={"members": (*record.members[:-1], record.members[0])})
    with pytest.raises(AssertionError, match="has samples"):
        check_with(doubled, gathered(world, doubled))


def test_a_group_that_lost_samples_trains_with_two_or_more_where_the_policy_lets_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0)
    rows = gathered(world, record)
    partial = settings_of(2, group_size=3, scheduling={"group_policy": "partial"})
    check(record, rows, partial)
    with pytest.raises(AssertionError, match=r"has samples \[0, 1\]"):
        check(record, rows, settings_of(2, group_size=3))
    alone = record.model_copy(update={"members": record.members[1:]})
    with pytest.raises(AssertionError, match=r"has samples \[1\]"):
        check(alone, rows[1:], partial)
    doubled = record.model_copy(update={"members": (record.members[0], *record.members)})
    with pytest.raises(AssertionError, match=r"has samples \[0, 0, 1\]"):
        check(doubled, [rows[0], *rows], partial)


def test_a_member_of_no_group_of_the_batch_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0, [0, 0])
    short = record.model_copy(update={"groups": record.groups[:1]})
    with pytest.raises(AssertionError, match="members of no group"):
        check_with(short, gathered(world, record))


def test_a_group_that_stands_twice_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(0)
    twice = record.model_copy(update={"groups": (record.groups[0], record.groups[0])})
    with pytest.raises(AssertionError, match="twice"):
        check_with(twice, gathered(world, twice))


def test_what_was_pruned_is_read_from_the_log_by_position(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.batch(0), world.batch(1)
    gatherer = Gatherer(world.bus, world.topics, {})
    before = gatherer.rows(first)
    assert gatherer.read_by_position == 0
    gatherer.prune(first, oldest_version=0)
    assert len(gatherer.rows(second)) == 4
    assert gatherer.read_by_position == 0
    assert gatherer.rows(first) == before
    assert gatherer.read_by_position == 4
    gatherer.close()


def test_rows_too_old_for_any_step_are_forgotten_and_younger_ones_held(tmp_path: Path) -> None:
    world = World(tmp_path)
    used = world.batch(3)
    world.add_row(row(90, 0, 1))
    young = world.add_row(row(90, 1, 2))
    gatherer = Gatherer(world.bus, world.topics, {})
    gatherer.rows(used)
    gatherer.prune(used, oldest_version=2)
    starts = gatherer.positions()
    assert starts[f"{world.topics.trajectories}/{young.partition}"] == young.offset
    gatherer.close()


def test_a_full_buffer_stops_reading_ahead_and_batches_still_come(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.batch(0), world.batch(1)
    gatherer = Gatherer(world.bus, world.topics, {}, bytes_max=1)
    assert len(gatherer.rows(first)) == 4
    assert len(gatherer.rows(second)) == 4
    gatherer.close()


def test_a_reader_that_resumes_at_the_stored_positions_finds_everything(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.batch(0), world.batch(1)
    gatherer = Gatherer(world.bus, world.topics, {})
    gatherer.rows(first)
    gatherer.prune(first, oldest_version=0)
    stored = gatherer.positions()
    gatherer.close()
    resumed = Gatherer(world.bus, world.topics, stored)
    assert [one["group"] for one in resumed.rows(second)] == [2, 2, 3, 3]
    assert resumed.read_by_position == 0
    resumed.close()


def test_figures_count_trajectories_per_lag(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.batch(2, [0, 2, 2])
    said = figures(record, gathered(world, record), {}, now_us=1_000_004)
    assert said["lag_0_trajectories"] == 4.0
    assert said["lag_2_trajectories"] == 2.0
    assert said["lag_mean"] == pytest.approx(2 / 3)
    assert said["reward_mean"] == 0.5
    assert said["queue_s_mean"] == pytest.approx(1.0)


def test_lag_is_that_of_the_flight_and_that_of_the_queue(tmp_path: Path) -> None:
    """B04: versions 0 to 4 came at 100, 200, ...; step 4 trains one scored just before version 2 and one just after."""
    world = World(tmp_path)
    rows = [row(7, 0, 0, scored_at=299), row(7, 1, 0, scored_at=301), row(8, 0, 4, scored_at=550)]
    members = tuple(world.add_row(one) for one in rows)
    record = BatchRecord(run="r", step=4, exhausted=False, groups=((7, 0), (8, 4)), members=members)
    said = figures(record, rows, {version: 100 * (version + 1) for version in range(7)}, now_us=1000)
    assert said["lag_in_flight_mean"] == pytest.approx((1 + 2 + 0) / 3)
    assert said["lag_in_queue_mean"] == pytest.approx((3 + 2 + 0) / 3)
    assert said["lag_mean"] == pytest.approx(said["lag_in_flight_mean"] + said["lag_in_queue_mean"])
    assert [said[f"lag_in_flight_{lag}_trajectories"] for lag in (0, 1, 2)] == [1.0, 1.0, 1.0]
    assert [said[f"lag_in_queue_{lag}_trajectories"] for lag in (0, 2, 3)] == [1.0, 1.0, 1.0]
