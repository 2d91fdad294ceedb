"""The benchmark of the mind, small: what it measures is there, and the churn goes on as it should."""

from pipelines.bench import decide


def test_a_row_has_publications_moves_and_full_seats() -> None:
    row = decide.row(engines=8, requests=512)
    assert row["events"] > 500
    assert 0 < row["mean_ms"] <= row["p99_ms"] <= row["worst_ms"]
    assert 0 < row["publication_ms_worst"] <= row["burst_ms_worst"]
    assert row["running"] > 0.8 * 512


def test_memory_of_a_live_request_is_some_hundred_bytes() -> None:
    assert 100 < decide.bytes_per_request(8, 2_000) < 5_000
