"""All arithmetic of lag by hand: what may be opened, which groups make a batch, what weights must stay."""

from random import Random

from schemas.invariants import feasible
from workers.orchestrator.window import Candidate, Choice, Rules, choose, fits, leaves_room, needed, openable


def rules(batch: int, staleness_max: int, factor: float = 2.0, steps: int | None = None) -> Rules:
    return Rules(batch, staleness_max, int(factor * batch) if staleness_max else batch, steps)


def test_b01_a_run_resumed_at_version_100_has_the_capacity_of_its_window() -> None:
    """192 = 3 x 64 at live_factor 3, 128 at the default 2; never 6,592 = 103 x 64."""
    assert openable(rules(64, 2, factor=3.0), newest=100, first=100, live=0) == 192
    assert openable(rules(64, 2), newest=100, first=100, live=0) == 128


def test_a06_step_0_at_version_0_may_start() -> None:
    assert openable(rules(4, 1), newest=0, first=0, live=0) == 8
    assert openable(rules(4, 0), newest=0, first=0, live=0) == 4


def test_b05_without_staleness_the_limit_is_one_batch_and_not_zero() -> None:
    assert openable(rules(4, 0), newest=7, first=7, live=0) == 4
    assert openable(rules(4, 0), newest=7, first=7, live=3) == 1
    assert openable(rules(4, 0), newest=7, first=8, live=0) == 0, "batch 7 is chosen: version 8 comes first"


def test_the_last_steps_open_no_more_than_they_train() -> None:
    assert openable(rules(4, 3, factor=9, steps=10), newest=9, first=9, live=0) == 4
    assert openable(rules(4, 3, factor=9, steps=10), newest=8, first=9, live=0) == 4
    assert openable(rules(4, 3, factor=9, steps=10), newest=8, first=8, live=5) == 3
    assert openable(rules(4, 3, steps=10), newest=10, first=10, live=0) == 0


def complete(*versions: int) -> list[Candidate]:
    return [Candidate(group, version, completed=group) for group, version in enumerate(versions)]


def test_a03_two_of_ten_complete_groups_stay_queued_for_the_next_batch() -> None:
    choice = choose(rules(8, 1), 0, complete(*[0] * 10), [(0, 10)], exhausted=False)
    assert choice == Choice(tuple(range(8)))
    assert choose(rules(8, 1), 1, complete(0, 0), [(0, 2)], exhausted=False) == Choice()


def test_groups_are_taken_in_order_of_deadline_and_then_of_completion() -> None:
    found = [Candidate(7, 5, 0), Candidate(8, 4, 2), Candidate(9, 4, 1), Candidate(10, 5, 3)]
    assert choose(rules(3, 2), 5, found, [(4, 2), (5, 2)], exhausted=False).groups == (9, 8, 7)


def test_equal_deadlines_at_the_end_go_by_completion() -> None:
    found = [Candidate(7, 5, 0), Candidate(8, 4, 1)]
    assert choose(rules(1, 3, steps=7), 5, found, [(4, 1), (5, 1)], exhausted=False).groups == (7,)


def test_a_batch_waits_for_an_old_group_that_could_not_be_trained_later() -> None:
    """Version 3 is at its deadline in step 5 (K = 2) and one group of it runs: two newer ones must not pass it."""
    assert not leaves_room(rules(2, 2), 5, [(5, 2)], [(3, 1), (5, 2)])
    assert choose(rules(2, 2), 5, complete(5, 5), [(3, 1), (5, 2)], exhausted=False) == Choice()
    found = [*complete(5, 5), Candidate(2, 3, 2)]
    assert choose(rules(2, 2), 5, found, [(3, 1), (5, 2)], exhausted=False).groups == (2, 0)


def test_a_batch_waits_when_later_ones_would_not_hold_what_is_left() -> None:
    """Three groups of version 4 must be in steps 5 and 6; if 5 takes two of version 5, 6 cannot hold three."""
    assert not leaves_room(rules(2, 2), 5, [(5, 2)], [(4, 3), (5, 2)])
    assert choose(rules(2, 2), 5, complete(5, 5), [(4, 3), (5, 2)], exhausted=False) == Choice()


def test_a04_the_last_batch_takes_what_is_left_and_says_so() -> None:
    """Rows 0, 1, 2 with two to a batch: 0 and 1, then 2 with `exhausted`."""
    sizes = rules(2, 1)
    assert choose(sizes, 0, complete(0, 0, 0), [(0, 3)], exhausted=True) == Choice((0, 1))
    assert choose(sizes, 1, [Candidate(2, 0, 2)], [(0, 1)], exhausted=True) == Choice((2,), exhausted=True)
    assert choose(sizes, 2, [], [], exhausted=True) == Choice()


def test_the_last_batch_waits_for_groups_that_still_run() -> None:
    assert choose(rules(4, 1), 0, complete(0, 0), [(0, 3)], exhausted=True) == Choice()


def test_a_full_last_batch_is_exhausted_too() -> None:
    assert choose(rules(2, 1), 0, complete(0, 0), [(0, 2)], exhausted=True) == Choice((0, 1), exhausted=True)


def test_i6_by_counts_is_i6_by_definition() -> None:
    random = Random(5)
    for _ in range(2000):
        limits = rules(random.randint(1, 3), random.randint(0, 3), steps=random.choice([None, 6]))
        first = random.randint(0, 5)
        counts = sorted({random.randint(0, 6): random.randint(0, 4) for _ in range(3)}.items())
        versions = [version for version, count in counts for _ in range(count)]
        due = feasible(versions, first, limits.batch, limits.staleness_max, limits.steps)
        assert fits(limits, counts, first) == due, (limits, first, counts)


def test_i6_holds_through_any_order_of_openings_choices_voids_and_publications() -> None:
    """The induction of `window.py`, walked at random: no state is reached from which a deadline cannot be kept."""
    for seed in range(300):
        random = Random(seed)
        limits = rules(
            random.randint(1, 4), random.randint(0, 4), random.choice([1.0, 1.5, 3.0]), random.choice([None, 9])
        )
        newest = first = 0
        live: list[tuple[int, int, bool]] = []
        for number in range(250):
            act = random.choices(range(5), weights=(6, 1, 6, 3, 3))[0]
            counts = [(v, sum(version == v for _, version, _ in live)) for v in sorted({v for _, v, _ in live})]
            if act == 0 and openable(limits, newest, first, len(live)):
                live.append((number, newest, False))
            elif act == 1 and live:
                live.pop(random.randrange(len(live)))
            elif act == 2 and live:
                place = random.randrange(len(live))
                live[place] = (*live[place][:2], True)
            elif act == 3 and newest == first and first != limits.steps:
                found = [Candidate(n, v, n) for n, v, done in live if done]
                taken = choose(limits, first, found, counts, exhausted=False).groups
                live = [item for item in live if item[0] not in taken]
                first += bool(taken)
            elif act == 4 and newest < first:
                newest += 1
            versions = [version for _, version, _ in live]
            assert feasible(versions, first, limits.batch, limits.staleness_max, limits.steps), f"seed {seed}"
        assert first > 0, f"seed {seed}: nothing was ever chosen"


def test_weights_of_the_window_the_last_ones_and_checkpoints_stay() -> None:
    assert needed(rules(4, 2), first=10, newest=9, keep=1, checkpoints=[4]) == (8, [4])
    assert needed(rules(4, 0), first=10, newest=9, keep=3, checkpoints=[4, 8]) == (7, [4, 8])
    assert needed(rules(4, 2), first=3, newest=3, keep=2, checkpoints=None) == (1, [0]), "no checkpoint: from the start"
