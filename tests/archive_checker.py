"""Judges a finished run by its archive alone: `python -m tests.archive_checker RUN_FOLDER`.

It shares no code with what it judges: pyarrow, the standard library and `schemas.settings` (K, B, G of config.toml).
One rule is one function of the `Run`, named by what must hold; it yields a sentence for every breach.
Exit codes: 0 nothing found, 1 violations (a line each), 2 this is no run folder.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.settings import Settings, parse_settings

TOKEN_TOPICS = ("completions", "trajectories", "evaluations")
SCORED_TOPICS = ("trajectories", "evaluations")
JSON_TOPICS_WITH_RUN = ("prompts", "partials", "weights", "batches", "journal", "metrics", "dead-letters")
Row = dict[str, Any]
Key = tuple[int, int, int]
"""Group, index, attempt."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Run:
    """What the archive of a run holds. `rows[topic]`: token rows in order; `said[topic]`: JSON records in order."""

    def __init__(self, folder: Path) -> None:
        config = folder / "config.toml"
        self.settings: Settings = parse_settings(config.read_text(), str(config))
        archive = folder / "archive"
        self.rows: dict[str, list[Row]] = {topic: _rows_in(archive / topic) for topic in TOKEN_TOPICS}
        self.said: dict[str, list[Row]] = {
            topic: [said for row in _rows_in(archive / topic) if _is_ours(topic, said := json.loads(row["value"]))]
            for topic in (*JSON_TOPICS_WITH_RUN, "status")
        }
        self.batches = self.said["batches"]
        self.journal = self.said["journal"]
        self.weights: dict[int, Row] = {}
        for record in self.said["weights"]:
            self.weights.setdefault(record["version"], record)
        self.refused = {(x["topic"].rsplit(".", 1)[-1], x["partition"], x["offset"]) for x in self.said["dead-letters"]}
        for file in (archive / "unreadable").glob("*.arrow"):
            topic, partition, offset, _ = file.name.rsplit(".", 3)
            self.refused.add((topic, int(partition), int(offset)))
        self.places: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in self.rows["trajectories"]:
            self.places[row["partition"], row["offset"]].append(row)

    def effects(self, kind: str) -> list[Row]:
        return [effect for record in self.journal for effect in record["effects"] if effect["kind"] == kind]

    def token_rows(self, topics: Iterable[str] = TOKEN_TOPICS) -> Iterator[tuple[str, Row]]:
        """(where it lies, row) of every token row that was not refused (dead-lettered, or kept as unreadable)."""
        for topic in topics:
            for row in self.rows[topic]:
                if (topic, row["partition"], row["offset"]) in self.refused:
                    continue
                yield f"{topic} {row['partition']}/{row['offset']}", row

    def members(self) -> Iterator[tuple[str, Row, Row | None]]:
        """(name, member, its row in trajectories or None) of every chosen trajectory."""
        for batch in self.batches:
            for member in batch["members"]:
                there = self.places.get((member["partition"], member["offset"]), [])
                row = there[member["row"]] if 0 <= member["row"] < len(there) else None
                yield f"step {batch['step']}, trajectory {_key(member)}", member, row


def _is_ours(topic: str, said: Any) -> bool:
    """Not something that a stranger wrote: JSON of another shape."""
    return isinstance(said, dict) and ("kind" in said if topic == "status" else "run" in said)


def _rows_in(folder: Path) -> list[Row]:
    """All rows of a topic's files by partition and offset, each once; but what an evaluator adds (1000)."""
    files = sorted(folder.glob("?.*.arrow"), key=lambda file: [int(part) for part in file.name.split(".")[:2]])
    rows: list[Row] = []
    next_offset: dict[int, int] = defaultdict(int)
    for file in files:
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        for place, column in enumerate(table.schema):
            if pa.types.is_timestamp(column.type):
                table = table.set_column(place, column.name, table.column(place).cast(pa.int64()))
        fresh = [row for row in table.to_pylist() if row["offset"] >= next_offset[row["partition"]]]
        for row in fresh:
            next_offset[row["partition"]] = row["offset"] + 1
        rows += fresh
    return rows


def _key(row: Mapping[str, Any]) -> Key:
    return row["group"], row["index"], row["attempt"]


# --- steps and batches ------------------------------------------------------------------------


def steps_are_consecutive(run: Run) -> Iterator[str]:
    steps = [batch["step"] for batch in run.batches]
    if steps != list(range(len(steps))):
        yield f"the batches are those of steps {steps}"


def batches_have_B_groups(run: Run) -> Iterator[str]:
    wanted = run.settings.groups_per_batch
    for place, batch in enumerate(run.batches):
        count, last = len(batch["groups"]), place == len(run.batches) - 1
        fewer_allowed = last and batch["exhausted"] and 1 <= count < wanted
        if count != wanted and not fewer_allowed:
            said = f"exhausted: {batch['exhausted']}, last: {last}"
            yield f"step {batch['step']} has {count} groups, not {wanted} ({said})"


def groups_have_G_members(run: Run) -> Iterator[str]:
    """All samples of a group but those that the mind said it lost; that may be only where the policy allows it."""
    partial = run.settings.scheduling.group_policy == "partial"
    lost = {(effect["group"], effect["index"]) for effect in run.effects("sample_lost") if partial}
    for batch in run.batches:
        indexes: dict[int, list[int]] = {group: [] for group, _ in batch["groups"]}
        for member in batch["members"]:
            indexes.setdefault(member["group"], []).append(member["index"])
        for group, there in indexes.items():
            wanted = [index for index in range(run.settings.group_size) if (group, index) not in lost]
            if sorted(there) != wanted or len(there) < 2:
                yield f"step {batch['step']}, group {group}: samples {sorted(there)}, not {wanted}"


def members_are_where_the_batch_says(run: Run) -> Iterator[str]:
    for name, member, row in run.members():
        if row is None:
            yield f"{name}: no row {member['row']} at {member['partition']}/{member['offset']}"
        elif _key(row) != _key(member):
            yield f"{name}: the row at {member['partition']}/{member['offset']} is that of {_key(row)}"


def lag_is_within_K(run: Run) -> Iterator[str]:
    most = run.settings.lag_max
    for batch in run.batches:
        for group, version in batch["groups"]:
            if not 0 <= batch["step"] - version <= most:
                yield f"step {batch['step']} trains group {group} of version {version}: lag is 0 to {most}"


def nothing_trains_twice(run: Run) -> Iterator[str]:
    groups = Counter(group for batch in run.batches for group, _ in batch["groups"])
    samples = Counter((m["group"], m["index"]) for batch in run.batches for m in batch["members"])
    rows = Counter((m["partition"], m["offset"], m["row"]) for batch in run.batches for m in batch["members"])
    counters: list[tuple[str, Counter[Any]]] = [("group", groups), ("sample", samples), ("row", rows)]
    for what, counter in counters:
        yield from (f"{what} {name} is in {times} batches" for name, times in counter.items() if times > 1)


# --- versions ---------------------------------------------------------------------------------


def versions_are_consecutive(run: Run) -> Iterator[str]:
    if list(run.weights) != list(range(len(run.weights))):
        yield f"the announced versions are {list(run.weights)}"
    if not len(run.batches) <= len(run.weights) <= len(run.batches) + 1:
        yield f"{len(run.weights)} versions for {len(run.batches)} batches"
    for record in run.said["weights"]:
        if record["fingerprint"] != run.weights[record["version"]]["fingerprint"]:
            yield f"version {record['version']} was announced with two fingerprints"


def weights_name_their_batch(run: Run) -> Iterator[str]:
    batches = {batch["step"]: batch for batch in run.batches}
    for version, record in run.weights.items():
        if version == 0:
            if record["step"] is not None or record["groups"]:
                yield "version 0 names a step or groups"
            continue
        batch = batches.get(version - 1, {"groups": None, "members": []})
        if record["step"] != version - 1:
            yield f"version {version} names step {record['step']}"
        if record["groups"] != batch["groups"]:
            yield f"version {version} trained {record['groups']}, batch {version - 1} has {batch['groups']}"
        if record["trajectories"] != len(batch["members"]):
            yield f"version {version} trained {record['trajectories']} trajectories of {len(batch['members'])}"


def a_group_has_one_version(run: Run) -> Iterator[str]:
    """In mode `partial` a group keeps its version too, and its samples go on under later ones, never under older."""
    chosen = {group: version for batch in run.batches for group, version in batch["groups"]}
    for effect in run.effects("issue"):
        if chosen.setdefault(effect["group"], effect["version"]) != effect["version"]:
            yield f"group {effect['group']} was issued at versions {chosen[effect['group']]} and {effect['version']}"
    for where, row in run.token_rows():
        version = chosen.setdefault(row["group"], row["version"])
        seen = [row["version"], *(stay["version"] for stay in row["engine_path"])]
        grows = run.settings.mode == "partial" and row["version"] == version and seen == sorted(seen)
        if set(seen) != {version} and not grows:
            yield f"{where}: versions {sorted(set(seen))}, group {row['group']} has {version}"


def fingerprints_are_those_of_the_version(run: Run) -> Iterator[str]:
    known = {version: record["fingerprint"] for version, record in run.weights.items()}
    for where, row in run.token_rows():
        for stay in row["engine_path"]:
            if stay["fingerprint"] != known.get(stay["version"]):
                yield f"{where}: engine {stay['engine']} sampled version {stay['version']} with other weights"
    for said in run.said["status"]:
        if said.get("kind") == "hosting" and said["fingerprint"] != known.get(said["version"]):
            yield f"engine {said['engine']} hosts version {said['version']} with other weights"


# --- rows -------------------------------------------------------------------------------------


def token_columns_agree_in_length(run: Run) -> Iterator[str]:
    for where, row in run.token_rows():
        lengths = {name: len(row[name]) for name in ("response_ids", "logprobs", "loss_mask")}
        if row["kept_logmass"] is not None:
            lengths["kept_logmass"] = len(row["kept_logmass"])
        lengths["engine_path"] = sum(stay["tokens"] for stay in row["engine_path"])
        if len(set(lengths.values())) > 1 or not lengths["response_ids"]:
            yield f"{where}: {lengths}"


def times_are_in_order(run: Run) -> Iterator[str]:
    for where, row in run.token_rows():
        times = [row["queued_at"], row["started_at"], row["finished_at"]]
        times += [] if row["scored_at"] is None else [row["scored_at"]]
        if times != sorted(times):
            yield f"{where}: queued, started, finished, scored at {times}"


def scored_rows_have_a_verdict(run: Run) -> Iterator[str]:
    for where, row in run.token_rows(SCORED_TOPICS):
        judged = row["reward"] is not None and row["outcome"] is not None
        if judged == (row["score_error"] is not None) or row["scored_at"] is None:
            yield f"{where}: reward {row['reward']}, outcome {row['outcome']}, score_error {row['score_error']!r}"


def trained_rows_have_a_reward(run: Run) -> Iterator[str]:
    for name, _, row in run.members():
        if row is not None and (row["reward"] is None or row["purpose"] != "train"):
            yield f"{name}: reward {row['reward']}, purpose {row['purpose']}"


def scored_rows_are_as_sampled(run: Run) -> Iterator[str]:
    """Scoring adds a verdict and changes nothing that was sampled."""
    columns = ("version", "prompt_ids", "response_ids", "logprobs", "kept_logmass", "loss_mask", "engine_path")
    sampled: dict[Key, list[list[Any]]] = defaultdict(list)
    for row in run.rows["completions"]:
        sampled[_key(row)].append([row[name] for name in columns])
    for where, row in run.token_rows(SCORED_TOPICS):
        if [row[name] for name in columns] not in sampled[_key(row)]:
            yield f"{where}: {_key(row)} is not what an engine completed"


def token_topics_have_no_gaps(run: Run) -> Iterator[str]:
    """Their writers use no transactions, so every offset is a record (one that could not be read apart)."""
    for topic in TOKEN_TOPICS:
        offsets: dict[int, set[int]] = defaultdict(set)
        for row in run.rows[topic]:
            offsets[row["partition"]].add(row["offset"])
        for partition, there in offsets.items():
            for missing in sorted(set(range(max(there))) - there):
                if (topic, partition, missing) not in run.refused:
                    yield f"{topic} {partition}/{missing} is not in the archive"


def run_names_agree(run: Run) -> Iterator[str]:
    name = run.settings.name
    for where, row in run.token_rows():
        if row["run"] != name:
            yield f"{where}: run {row['run']!r}, not {name!r}"
    for topic in JSON_TOPICS_WITH_RUN:
        for place, record in enumerate(run.said[topic]):
            if record["run"] != name:
                yield f"{topic} record {place}: run {record['run']!r}, not {name!r}"


# --- decisions --------------------------------------------------------------------------------


def journal_is_consecutive(run: Run) -> Iterator[str]:
    for place, record in enumerate(run.journal):
        if record["sequence"] != place:
            yield f"record {place} has sequence {record['sequence']}"
            return


def journal_and_batches_agree(run: Run) -> Iterator[str]:
    decided = run.effects("batch")
    if decided != run.batches:
        yield f"the journal decided steps {[b['step'] for b in decided]}, the batches differ or are others"


def members_were_issued(run: Run) -> Iterator[str]:
    issued = {_key(effect): effect for effect in run.effects("issue")}
    for name, member, row in run.members():
        effect = issued.get(_key(member))
        if effect is None:
            yield f"{name} was never issued"
        elif effect["purpose"] != "train":
            yield f"{name} was issued for {effect['purpose']}"
        elif row is not None and row["prompt_row"] != effect["prompt_row"]:
            yield f"{name} answers prompt {row['prompt_row']}, issued was {effect['prompt_row']}"


def opened_groups_end_once(run: Run) -> Iterator[str]:
    """Trained or voided, once; only a run that was stopped may have live groups, and no more than its limit."""
    opened: dict[int, str] = {}
    for effect in run.effects("issue"):
        opened.setdefault(effect["group"], effect["purpose"])
    ends = Counter(group for batch in run.batches for group, _ in batch["groups"])
    ends.update(effect["group"] for effect in run.effects("void_group"))
    yield from (f"group {group} ended but was never opened" for group in ends if group not in opened)
    yield from (f"group {group} ended {times} times" for group, times in ends.items() if times > 1)
    live = [group for group, purpose in opened.items() if purpose == "train" and group not in ends]
    if live and _is_done(run):
        yield f"the run is done, but groups {live} are neither trained nor voided"
    if len(live) > run.settings.live_max:
        yield f"{len(live)} groups are live, at most {run.settings.live_max} may be"


def held_out_groups_are_evaluated(run: Run) -> Iterator[str]:
    if not _is_done(run):
        return
    voided = {effect["group"] for effect in run.effects("void_group")}
    asked = {(e["group"], e["index"]) for e in run.effects("issue") if e["purpose"] == "eval"}
    answered = {(row["group"], row["index"]) for row in run.rows["evaluations"]}
    for group, index in sorted(asked - answered):
        if group not in voided:
            yield f"sample {index} of held-out group {group} was issued and has no row in evaluations"


def _is_done(run: Run) -> bool:
    """By the last word: whoever goes on with a run (`run_started`) takes back an end that was said before."""
    done = False
    for record in run.journal:
        if any(event["kind"] == "run_started" for event in record["events"]):
            done = False
        for effect in record["effects"]:
            if effect["kind"] == "end_run":
                done = effect["outcome"] == "done"
    return done


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    steps_are_consecutive,
    batches_have_B_groups,
    groups_have_G_members,
    members_are_where_the_batch_says,
    lag_is_within_K,
    nothing_trains_twice,
    versions_are_consecutive,
    weights_name_their_batch,
    a_group_has_one_version,
    fingerprints_are_those_of_the_version,
    token_columns_agree_in_length,
    times_are_in_order,
    scored_rows_have_a_verdict,
    trained_rows_have_a_reward,
    scored_rows_are_as_sampled,
    token_topics_have_no_gaps,
    run_names_agree,
    journal_is_consecutive,
    journal_and_batches_agree,
    members_were_issued,
    opened_groups_end_once,
    held_out_groups_are_evaluated,
)


def check(run_folder: Path) -> list[Violation]:
    """All breaches of all rules. FileNotFoundError if this is no run folder."""
    run = Run(run_folder)
    return [Violation(rule.__name__, text) for rule in RULES for text in rule(run)]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / "archive").is_dir():
        print("usage: python -m tests.archive_checker RUN_FOLDER (with config.toml and archive/)", file=sys.stderr)
        return 2
    violations = check(Path(arguments[0]))
    for violation in violations:
        print(violation)
    print(f"{len(violations)} violations of {len(RULES)} rules")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
