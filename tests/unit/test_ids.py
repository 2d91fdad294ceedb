"""Seeds and record ids."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import RequestKey, record_id, sampling_seed

COUNT = st.integers(min_value=0, max_value=1 << 40)


def test_same_prompt_in_two_rows_on_four_engines_gives_eight_different_seeds() -> None:
    """B07: two rows are two groups; the engine is no part of the seed, so a copy on another engine cannot coincide."""
    seeds = {sampling_seed(7, group, index) for group in (10, 11) for index in range(4)}
    assert len(seeds) == 8


def test_sample_that_is_issued_again_keeps_its_seed() -> None:
    assert sampling_seed(7, 10, 3) == sampling_seed(7, 10, 3)
    assert sampling_seed(7, 10, 3, token=0) != sampling_seed(7, 10, 3, token=5)


@given(COUNT, COUNT, COUNT, COUNT)
def test_a_seed_depends_on_every_number_and_fits_63_bits(run: int, group: int, index: int, token: int) -> None:
    seed = sampling_seed(run, group, index, token)
    assert 0 <= seed < 1 << 63
    others = [
        sampling_seed(run + 1, group, index, token),
        sampling_seed(run, group + 1, index, token),
        sampling_seed(run, group, index + 1, token),
        sampling_seed(run, group, index, token + 1),
    ]
    assert seed not in others


def test_neighbouring_numbers_do_not_run_together() -> None:
    assert sampling_seed(1, 12, 3) != sampling_seed(1, 1, 23)


def test_seed_is_the_same_on_every_machine() -> None:
    """A frozen value: a change of the rule would make replays of old runs differ."""
    assert sampling_seed(0, 0, 0) == 8662518681111019217


def test_requests_sort_by_group_then_index_then_attempt() -> None:
    keys = [RequestKey(1, 0, 0), RequestKey(0, 1, 0), RequestKey(0, 0, 1)]
    assert sorted(keys) == [RequestKey(0, 0, 1), RequestKey(0, 1, 0), RequestKey(1, 0, 0)]


def test_record_id_names_kind_and_parts() -> None:
    assert record_id("request", 4711, 3, 0) == "request/4711.3.0"
