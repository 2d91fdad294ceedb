"""Names of topics."""

import pytest

from schemas.topics import RECORD_BYTES_MAX, SCORE_PARTITIONS, Topics, score_partition, version_key


def test_requests_topic_of_a_version_has_one_partition_per_engine() -> None:
    topics = Topics("run-1")
    spec = topics.requests_spec(12, engines=5)
    assert (spec.name, spec.partitions) == ("dora.run-1.requests.v000012", 5)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "ü", "x" * 81, "a/b"])
def test_run_name_that_kafka_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        Topics(name)


def test_every_topic_of_the_start_is_kept_for_ever_and_weights_and_tables_are_compacted() -> None:
    specs = {spec.name: spec for spec in Topics("r").specs()}
    assert all(spec.config["retention.ms"] == "-1" for spec in specs.values())
    assert all(spec.config["max.message.bytes"] == str(RECORD_BYTES_MAX) for spec in specs.values())
    assert [name for name, spec in specs.items() if spec.config.get("cleanup.policy") == "compact"] == [
        "dora.r.weights",
        "dora.r.tables",
    ]


def test_scored_topics_share_one_partitioning_so_that_a_group_stays_together() -> None:
    specs = {spec.name: spec.partitions for spec in Topics("r").specs()}
    topics = Topics("r")
    assert {specs[t] for t in (topics.completions, topics.trajectories, topics.evaluations)} == {SCORE_PARTITIONS}
    assert [score_partition(group) for group in range(SCORE_PARTITIONS + 1)] == [*range(SCORE_PARTITIONS), 0]


def test_journal_and_prompts_have_one_partition_because_their_order_means_something() -> None:
    specs = {spec.name: spec.partitions for spec in Topics("r").specs()}
    for name in ("journal", "prompts", "control", "status", "batches", "weights", "dead-letters"):
        assert specs[f"dora.r.{name}"] == 1


def test_kind_of_a_topic_and_another_runs_topic() -> None:
    topics = Topics("r")
    assert topics.kind(topics.requests(3)) == "requests"
    assert topics.kind(topics.dead_letters) == "dead-letters"
    with pytest.raises(ValueError, match="is not a topic of run r"):
        topics.kind("dora.other.prompts")


def test_key_of_a_version_is_ascii() -> None:
    assert version_key(12) == b"12"


def test_names_of_groups_and_of_the_writer_belong_to_the_run() -> None:
    assert Topics("r").group("reward") == "dora.r.reward"
    assert Topics("r").transactional_id == "dora.r.orchestrator"
