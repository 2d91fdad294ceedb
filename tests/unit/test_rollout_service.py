"""The rollout service on a log in memory, with an engine that has no model: swaps, stops, late and repeated words."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from schemas import messages as m
from schemas.arrow import invalid_reason
from schemas.codec import decode
from schemas.ids import RequestKey
from tests.unit.rollout_house import NUMBER, House, settings
from workers.rollout.engines.base import Tokens
from workers.rollout.engines.paced_engine import PacedEngine
from workers.rollout.partials import Place, Running, begin, to_partial, to_row
from workers.rollout.service import serve
from workers.runtime.errors import ProbeMismatch


@pytest.fixture
def house(tmp_path: Path) -> House:
    return hosting_0(House(tmp_path))


def hosting_0(made: House) -> House:
    """Engine 1 hosts version 0."""
    made.service.join()
    made.announce(0)
    made.swap(0)
    made.until(lambda: bool(made.of(m.Hosting)))
    return made


def test_an_engine_joins_hosts_and_says_that_it_lives(house: House) -> None:
    house.until(lambda: len(house.of(m.Heartbeat)) > 0)
    (joined,) = house.of(m.Joined)
    (hosting,) = house.of(m.Hosting)
    assert (joined.engine, joined.host, joined.seats, joined.tokens_per_request_max) == (NUMBER, "host", 4, 64)
    assert (hosting.version, hosting.fingerprint) == (0, "fingerprint-0")
    assert hosting.incarnation == joined.incarnation == house.service.incarnation


def test_a_finished_request_has_a_valid_row_before_its_seat_is_free(house: House) -> None:
    keys = {house.issue(7, index, 0) for index in range(2)}
    house.until(lambda: len(house.of(m.Finished)) == 2)
    rows = house.of(dict)
    assert {RequestKey(row["group"], row["index"], row["attempt"]) for row in rows} == keys
    for row in rows:
        assert invalid_reason(row, scored=False) is None
        assert (len(row["response_ids"]), row["finish_reason"], row["queued_at"]) == (8, "length", 5)
        (stay,) = row["engine_path"]
        assert (stay["engine"], stay["version"], stay["fingerprint"]) == ("1", 0, "fingerprint-0")
        assert (stay["tokens"], stay["kv_reused"], stay["kv_recomputed"]) == (8, 0, 0)
    words = [word for word in house.said if isinstance(word, m.Started | m.Finished)]
    assert isinstance(words[0], m.Started)
    assert {key for started in house.of(m.Started) for key in started.requests} == keys
    assert {(word.tokens, word.finish_reason) for word in house.of(m.Finished)} == {(8, "length")}


def test_a_swap_turns_running_requests_into_partials_before_it_hosts(house: House) -> None:
    key = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(key) >= 3)
    house.announce(1)
    house.swap(1)
    house.until(lambda: len(house.of(m.Hosting)) == 2)
    (partial,) = house.of(m.PartialRecord)
    assert (partial.reason, partial.version, partial.group) == ("moved", 0, 1)
    assert 3 <= len(partial.response_ids) < 40
    assert len(partial.logprobs) == len(partial.loss_mask) == len(partial.response_ids)
    assert [stay.fingerprint for stay in partial.engine_path] == ["fingerprint-0"]
    assert not house.of(dict)
    assert house.engine.load_now().running == 0


def test_a_partial_that_comes_back_goes_on_as_if_it_had_never_moved(house: House) -> None:
    whole = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: len(house.of(dict)) == 1)
    (expected,) = house.of(dict)
    moved = house.issue(1, 0, 0, attempt=1, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(moved) >= 5)
    house.stop(moved, keep=True, reason="pressure")
    house.until(lambda: bool(house.of(m.PartialRecord)))
    (partial,) = house.of(m.PartialRecord)
    assert partial.reason == "pressure"
    carried = {
        name: getattr(partial, name) for name in ("response_ids", "logprobs", "loss_mask", "engine_path", "started_at")
    }
    house.issue(1, 0, 0, attempt=2, max_new_tokens=40, **carried)
    house.until(lambda: len(house.of(dict)) == 2)
    row = house.of(dict)[-1]
    assert invalid_reason(row, scored=False) is None
    assert row["response_ids"] == expected["response_ids"]
    first, second = row["engine_path"]
    so_far = len(partial.response_ids)
    assert (first["tokens"], first["kv_recomputed"]) == (so_far, 0)
    assert (second["tokens"], second["kv_recomputed"]) == (40 - so_far, 3 + so_far)
    assert row["started_at"] == partial.started_at
    assert whole.attempt == 0


class Keeping(PacedEngine):
    """Says of its n-th step that top-p kept exp(-n / 100)."""

    steps = 0

    def step(self) -> list[Tokens]:
        self.steps += 1
        return [replace(part, kept=(-self.steps / 100,)) for part in super().step()]


def test_the_kept_mass_of_a_truncated_draw_goes_along_with_each_token_also_when_its_request_moves(
    tmp_path: Path,
) -> None:
    house = hosting_0(House(tmp_path, Keeping(settings(), pace=0)))
    moved = house.issue(1, 0, 0, max_new_tokens=40, top_p=0.8)
    house.until(lambda: house.tokens_so_far(moved) >= 5)
    house.stop(moved, keep=True)
    house.until(lambda: bool(house.of(m.PartialRecord)))
    (partial,) = house.of(m.PartialRecord)
    names = ("response_ids", "logprobs", "kept_logmass", "loss_mask", "engine_path", "started_at")
    house.issue(1, 0, 0, attempt=1, max_new_tokens=40, top_p=0.8, **{name: getattr(partial, name) for name in names})
    plain = house.issue(2, 0, 0)
    house.until(lambda: len(house.of(dict)) == 2)
    rows = {row["group"]: row for row in house.of(dict)}
    assert rows[plain.group]["kept_logmass"] is None
    assert invalid_reason(rows[1], scored=False) is None
    assert rows[1]["kept_logmass"] == pytest.approx([-step / 100 for step in range(1, 41)])


def test_in_mode_partial_a_sample_goes_on_under_a_later_version_and_its_path_says_so(tmp_path: Path) -> None:
    house = hosting_0(House(tmp_path, mode="partial"))
    first = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(first) >= 5)
    house.announce(1)
    house.swap(1)
    house.until(lambda: bool(house.of(m.PartialRecord)))
    (partial,) = house.of(m.PartialRecord)
    names = ("response_ids", "logprobs", "loss_mask", "engine_path", "started_at")
    carried = {name: getattr(partial, name) for name in names}
    house.send(house.request(1, 0, 0, attempt=1, under=1, max_new_tokens=40, **carried), topic_version=1)
    house.until(lambda: bool(house.of(dict)))
    (row,) = house.of(dict)
    assert row["version"] == 0, "its group's"
    assert [(stay["version"], stay["fingerprint"]) for stay in row["engine_path"]] == [
        (0, "fingerprint-0"),
        (1, "fingerprint-1"),
    ]
    assert row["engine_path"][1]["kv_recomputed"] == 3 + len(partial.response_ids)
    assert invalid_reason(row, scored=False, mixed=True) is None
    assert invalid_reason(row, scored=False) == "engine_path has version 1, the row 0"


def test_a_swap_waits_for_the_last_request_issued_before_it(house: House) -> None:
    first, second = house.request(1, 0, 0), house.request(1, 1, 0)
    house.send(first)
    house.announce(1)
    house.swap(1)
    for _ in range(50):
        house.service.turn()
    house.listen()
    assert len(house.of(m.Hosting)) == 1
    house.send(second)
    house.until(lambda: len(house.of(m.Hosting)) == 2)
    assert {word.index for word in house.of(m.PartialRecord)} | {row["index"] for row in house.of(dict)} == {0, 1}


def test_a_swap_waits_for_the_announcement_of_its_version(house: House) -> None:
    house.swap(1)
    for _ in range(3):
        house.service.turn()
    house.listen()
    assert len(house.of(m.Hosting)) == 1
    house.announce(1)
    house.until(lambda: len(house.of(m.Hosting)) == 2)


def test_a_version_that_is_hosted_again_runs_only_what_is_new(house: House) -> None:
    house.issue(1, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 1)
    house.announce(1)
    house.swap(1)
    house.issue(2, 0, 1)
    house.until(lambda: len(house.of(m.Finished)) == 2)
    house.swap(0)
    house.issue(3, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 3)
    house.service.turn()
    house.listen()
    assert [(word.group, word.attempt) for word in house.of(m.Finished)] == [(1, 0), (2, 0), (3, 0)]
    assert [word.version for word in house.of(m.Hosting)] == [0, 1, 0]


def test_a_swap_to_the_hosted_version_leaves_its_requests_alone(house: House) -> None:
    key = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(key) >= 2)
    house.swap(0)
    house.until(lambda: len(house.of(m.Finished)) == 1)
    assert [word.version for word in house.of(m.Hosting)] == [0, 0]
    assert not house.of(m.PartialRecord)


def test_a_stop_without_keep_drops_the_request_and_frees_the_seat(house: House) -> None:
    key = house.issue(1, 0, 0, max_new_tokens=60)
    house.until(lambda: house.tokens_so_far(key) >= 2)
    house.stop(key, keep=False)
    house.until(lambda: house.engine.load_now().running == 0)
    assert not house.of(m.PartialRecord)
    assert not house.of(dict)
    assert not house.of(m.Finished)


@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_that_overtakes_its_request_still_stops_it(house: House, keep: bool) -> None:
    late = house.request(1, 0, 0)
    house.stop(late.key, keep=keep)
    for _ in range(3):
        house.service.turn()
    house.send(late)
    house.issue(2, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 1)
    assert [word.group for word in house.of(m.Finished)] == [2]
    assert [(word.group, word.response_ids) for word in house.of(m.PartialRecord)] == ([(1, ())] if keep else [])


def test_a_stop_for_a_request_that_has_ended_changes_nothing(house: House) -> None:
    key = house.issue(1, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 1)
    house.stop(key, keep=True)
    house.issue(2, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 2)
    assert not house.of(m.PartialRecord)


def test_words_for_another_engine_or_incarnation_are_ignored(house: House) -> None:
    old = house.service.incarnation - 1
    house.announce(1)
    house.swap(1, after=-1, incarnation=old)
    house.command(m.Swap(engine=0, incarnation=house.service.incarnation, version=1, after_sequence=-1))
    house.issue(1, 0, 0, incarnation=old, sequence=100)
    house.issue(2, 0, 0, engine=0, sequence=101)
    house.issue(3, 0, 0)
    house.until(lambda: bool(house.of(m.Finished)))
    assert [word.group for word in house.of(m.Finished)] == [3]
    assert [word.version for word in house.of(m.Hosting)] == [0]


def test_a_request_that_comes_twice_runs_once(house: House) -> None:
    request = house.request(1, 0, 0)
    house.send(request)
    house.send(request)
    house.issue(2, 0, 0)
    house.until(lambda: len(house.of(m.Finished)) == 2)
    assert [word.group for word in house.of(m.Finished)] == [1, 2]


def test_a_request_of_another_version_is_refused(house: House) -> None:
    house.send(house.request(1, 0, 5), topic_version=0)
    house.until(lambda: bool(house.of(m.Refused)))
    (refused,) = house.of(m.Refused)
    assert (refused.group, refused.index, refused.attempt) == (1, 0, 0)
    assert "5" in refused.reason


def test_a_request_that_is_too_long_fails_and_the_others_go_on(house: House) -> None:
    house.issue(1, 0, 0, max_new_tokens=62)
    house.issue(2, 0, 0)
    house.until(lambda: bool(house.of(m.Finished)))
    (failed,) = house.of(m.Failed)
    assert failed.group == 1
    assert "tokens_per_request_max = 64" in failed.reason


def test_a_row_that_would_be_invalid_fails_its_request(house: House) -> None:
    house.issue(1, 0, 0, metadata="{}", response_ids=(4,), logprobs=(), loss_mask=(True,))
    house.until(lambda: bool(house.of(m.Failed)))
    assert not house.of(dict)
    assert house.of(m.Failed)[0].reason == "bad row: logprobs has 7 entries, response_ids 8"


def test_an_issue_that_overtakes_the_stop_before_it_waits_for_the_seat(house: House) -> None:
    running = [house.issue(1, index, 0, max_new_tokens=60) for index in range(4)]
    late = house.issue(2, 0, 0)
    house.until(lambda: all(house.tokens_so_far(key) for key in running))
    assert house.tokens_so_far(late) == 0
    assert house.engine.load_now().running == 4
    house.stop(*running, keep=False)
    house.until(lambda: bool(house.of(m.Finished)))
    assert [word.group for word in house.of(m.Finished)] == [2]


def test_more_requests_than_two_for_each_seat_are_refused(house: House) -> None:
    for index in range(9):
        house.issue(1, index, 0, max_new_tokens=30)
    house.until(lambda: len(house.of(m.Finished)) == 8)
    assert [word.index for word in house.of(m.Refused)] == [8]


def test_a_record_that_cannot_be_read_is_buried_and_the_engine_goes_on(house: House) -> None:
    house.producer.send(house.topics.control, b"{", {"schema": "control/1", "id": "x"})
    house.producer.send(house.topics.requests(0), b"nonsense", {}, partition=NUMBER)
    house.issue(1, 0, 0)
    house.until(lambda: bool(house.of(m.Finished)))
    assert {letter.topic for letter in house.of(m.DeadLetter)} == {house.topics.control, house.topics.requests(0)}


def test_commands_from_before_the_engine_joined_are_not_heard(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.announce(0)
    house.swap(0)
    house.service.join()
    for _ in range(3):
        house.service.turn()
    house.listen()
    assert not house.of(m.Hosting)


class RaisingEngine(PacedEngine):
    """Its weights never match."""

    def load(self, weights: m.WeightsRecord) -> None:
        raise ProbeMismatch(f"version {weights.version}: probe differs")


def test_an_engine_that_cannot_load_its_version_ends_with_1_and_hosts_nothing(tmp_path: Path) -> None:
    house = House(tmp_path, engine=RaisingEngine(settings(), pace=0))
    house.announce(0)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(serve(house.process, house.bus, house.engine, NUMBER, "host")), daemon=True
    )
    thread.start()
    first = house.heard["status"].poll(5000)[0]
    joined = decode(m.STATUS, first.value, first.headers)
    assert isinstance(joined, m.Joined)
    house.swap(0, incarnation=joined.incarnation)
    thread.join(10)
    house.listen()
    assert codes == [1]
    assert not house.of(m.Hosting)


def test_serve_ends_with_0_when_it_is_told_to_stop_and_closes_the_engine(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.process.stopping.set()
    assert serve(house.process, house.bus, house.engine, NUMBER, "host") == 0
    house.listen()
    assert [type(word) for word in house.said] == [m.Joined]


def test_at_the_end_what_has_ended_is_said_and_what_runs_is_not(house: House) -> None:
    house.service._talk_at = float("inf")
    house.issue(1, 0, 0, max_new_tokens=1)
    running = house.issue(2, 0, 0, max_new_tokens=50)
    for _ in range(10):
        house.service.turn()
    assert house.tokens_so_far(running)
    house.service.finish()
    house.listen()
    assert [word.group for word in house.of(m.Finished)] == [1]
    assert not house.of(m.PartialRecord)


class DyingEngine(PacedEngine):
    """Ends every request for a reason of its own."""

    def step(self) -> list[Tokens]:
        return [replace(part, finish="abort") for part in super().step()]


def test_a_request_that_the_engine_gave_up_fails(tmp_path: Path) -> None:
    house = House(tmp_path, engine=DyingEngine(settings(), pace=0))
    house.service.join()
    house.announce(0)
    house.swap(0)
    house.issue(1, 0, 0, max_new_tokens=1)
    house.until(lambda: bool(house.of(m.Failed)))
    assert "abort" in house.of(m.Failed)[0].reason
    assert not house.of(m.Finished)


def test_times_are_in_order_even_when_the_clocks_are_not(house: House) -> None:
    request = house.request(1, 0, 0, queued_at=100)
    one = begin(request, now=90)
    one.ids, one.logprobs = [1], [-1.0]
    row = to_row(one, Place(1, 2, "f"), "stop", now=80)
    assert row["queued_at"] <= row["started_at"] <= row["finished_at"]
    assert invalid_reason(row, scored=False) is None


def test_a_request_that_never_ran_keeps_its_path(house: House) -> None:
    stay = m.Stay(engine="0", version=0, fingerprint="f", tokens=1)
    carried = {"response_ids": (1,), "logprobs": (-1.0,), "loss_mask": (True,), "engine_path": (stay,)}
    request = house.request(1, 0, 0, **carried, started_at=7)
    partial = to_partial(Running(request, 7), Place(1, 2, "g"), "moved")
    assert partial.engine_path == (stay,)
    assert (partial.response_ids, partial.started_at) == ((1,), 7)
