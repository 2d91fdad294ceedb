"""One record of each kind, with values in every field: what the golden bytes were made of.

`python -m tests.golden.records` writes the files anew; do that only with a new schema number or a new optional field.
"""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from schemas import messages as m
from schemas.arrow import TRAJECTORY, to_bytes
from schemas.codec import arrow_headers, encode
from schemas.ids import Position, RequestKey
from schemas.tables import TABLES, Cell, Learned

HERE = Path(__file__).parent
AT = 1_700_000_000_000_000
STAY = m.Stay(engine="0", version=12, fingerprint="ab" * 32, tokens=2, kv_reused=3, kv_recomputed=1)
REQUEST = m.RequestRecord(
    run="golden",
    group=4711,
    index=3,
    attempt=1,
    version=12,
    engine=1,
    incarnation=AT,
    sequence=17,
    purpose="train",
    task="products",
    prompt_row=9,
    prompt_ids=(1, 2, 3),
    answer="56",
    seed=2**62,
    temperature=0.5,
    top_p=1.0,
    top_k=0,
    max_new_tokens=16,
    queued_at=AT,
    response_ids=(4, 5),
    logprobs=(-0.5, -0.25),
    kept_logmass=None,
    loss_mask=(True, True),
    engine_path=(STAY,),
    started_at=AT + 1,
    kv=m.KvHandle(location="shm://golden", tokens=5, fingerprint="ab" * 32),
    metadata='{"a":1}',
)
PARTIAL = m.PartialRecord(
    **{name: getattr(REQUEST, name) for name in m.PartialRecord.model_fields if name != "reason"}, reason="moved"
)
BATCH = m.BatchRecord(
    run="golden",
    step=12,
    exhausted=False,
    groups=((4711, 12),),
    members=(m.Member(group=4711, index=0, attempt=0, partition=3, offset=8, row=1),),
)
CONTROL: tuple[m.Message, ...] = (
    m.Swap(engine=1, incarnation=AT, version=13, after_sequence=17),
    m.Stop(engine=1, incarnation=AT, requests=(RequestKey(4711, 3, 1),), keep=True, reason="pressure"),
    m.WantPrompts(rows=64),
    m.EndRun(outcome="done", reason="all steps trained"),
)
STATUS: tuple[m.Message, ...] = (
    m.Joined(engine=1, incarnation=AT, host="h", seats=8, kv_tokens_max=4096, tokens_per_request_max=512),
    m.Hosting(engine=1, incarnation=AT, version=12, fingerprint="ab" * 32, load_s=0.5),
    m.Heartbeat(
        engine=1,
        incarnation=AT,
        version=None,
        running=1,
        waiting=2,
        kv_tokens=3,
        tokens=4,
        decode_s=0.5,
        prefill_s=0.25,
        idle_s=1.0,
        load_s=2.0,
        migrate_s=0.0,
        moves=m.Moves(
            taken=3,
            carried=2,
            tokens_carried=90,
            tokens_recomputed=42,
            size=4096,
            reprefill_s=0.125,
            reprefills={"gone": 1},
        ),
    ),
    m.Started(engine=1, incarnation=AT, requests=(RequestKey(4711, 3, 1),)),
    m.Finished(engine=1, incarnation=AT, group=4711, index=3, attempt=1, tokens=2, finish_reason="stop"),
    m.Refused(engine=1, incarnation=AT, group=4711, index=3, attempt=1, reason="hosts 11"),
    m.Failed(engine=None, incarnation=None, group=4711, index=3, attempt=1, reason="bad row"),
    m.Scored(
        group=4711,
        index=3,
        attempt=1,
        version=12,
        purpose="train",
        reward=1.0,
        outcome=1.0,
        error=None,
        partition=3,
        offset=8,
        row=0,
    ),
    m.EngineGone(engine=1, incarnation=None, reason="killed"),
    m.PromptsEnded(rows=64),
    m.CheckpointSaved(version=10, kept=(5, 10)),
    m.StopRun(reason="by hand"),
)
WEIGHTS = m.WeightsRecord(
    run="golden",
    version=13,
    step=12,
    groups=((4711, 12),),
    trajectories=8,
    location="file:///weights/v000013",
    manifest_sha256="cd" * 32,
    fingerprint="ab" * 32,
    created_at=AT,
    metrics={"loss": 0.5},
)
JOURNAL = m.JournalRecord(
    run="golden",
    sequence=5,
    inputs={"dora.golden.status/0": 12},
    events=(
        m.Tick(now=AT),
        m.PromptArrived(row=9, purpose="train", prompt_tokens=3, max_new_tokens=16),
        m.PartialArrived(
            group=4711,
            index=3,
            attempt=0,
            version=12,
            engine=0,
            incarnation=AT,
            reason="moved",
            tokens=2,
            at=Position("dora.golden.partials", 0, 4),
        ),
        m.WeightsArrived(version=13, groups=((4711, 12),), fingerprint="ab" * 32),
        *STATUS,
    ),
    effects=(
        m.MakeVersion(version=13),
        m.RetireVersion(version=11),
        m.DeleteWeights(version=9),
        m.Issue(
            group=4711,
            index=3,
            attempt=1,
            version=12,
            engine=1,
            incarnation=AT,
            sequence=17,
            purpose="train",
            prompt_row=9,
            queued_at=AT,
            partial=Position("dora.golden.partials", 0, 4),
        ),
        m.VoidGroup(group=4712, version=12, reason="no_signal", detail="all 1.0"),
        m.EngineLost(engine=1, incarnation=AT, reason="silent"),
        BATCH,
        *CONTROL,
    ),
)
JOURNAL_LATER = m.JournalRecord(
    run="golden",
    sequence=6,
    inputs={"dora.golden.status/0": 12},
    events=(),
    effects=(m.SampleLost(group=4712, index=1, version=12, reason="took too long on an engine"),),
    snapshot="eJyrVkrOSCzKTS1Wsq0FACFQBM0=",
)
PROMPT = m.PromptRecord(
    run="golden",
    prompt="7 * 8?",
    prompt_ids=(1, 2, 3),
    answer="56",
    task="products",
    dataset="rows.jsonl",
    purpose="train",
    epoch=0,
    row=9,
    max_new_tokens=16,
)
TABLE: tuple[m.Message, ...] = (
    Cell(
        run="golden",
        version=12,
        task="products",
        difficulty="to a half",
        lag=None,
        samples=8,
        judged=7,
        reward=0.5,
        tokens=90,
        cut=1,
    ),
    Learned(run="golden", version=12, lag=1, tokens=90, clip_low_share=0.25, clip_high_share=0.125, mismatch_kl=0.0625),
)
Kind = type[Any] | TypeAdapter[Any]
MESSAGES: dict[str, tuple[Kind, tuple[m.Message, ...]]] = {
    "prompt": (m.PromptRecord, (PROMPT,)),
    "request": (m.RequestRecord, (REQUEST,)),
    "partial": (m.PartialRecord, (PARTIAL,)),
    "weights": (m.WeightsRecord, (WEIGHTS,)),
    "control": (m.CONTROL, CONTROL),
    "status": (m.STATUS, STATUS),
    "batch": (m.BatchRecord, (BATCH,)),
    "journal": (m.JournalRecord, (JOURNAL, JOURNAL_LATER)),
    "metric": (m.MetricPoint, (m.MetricPoint(run="golden", source="trainer", at=AT, step=12, values={"loss": 0.5}),)),
    "table": (TABLES, TABLE),
    "dead-letter": (
        m.DeadLetter,
        (m.DeadLetter(run="golden", topic="t", partition=0, offset=3, reason="no JSON", value_base64="e30="),),
    ),
}
"""Schema name -> how to read it, and records of it."""
ROW: dict[str, object] = {
    "run": "golden",
    "task": "products",
    "purpose": "train",
    "version": 12,
    "group": 4711,
    "prompt_row": 9,
    "index": 3,
    "attempt": 1,
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5],
    "answer": "56",
    "logprobs": [-0.5, -0.25],
    "kept_logmass": None,
    "loss_mask": [True, True],
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 0,
    "finish_reason": "stop",
    "engine_path": [STAY.model_dump()],
    "queued_at": AT,
    "started_at": AT + 1,
    "finished_at": AT + 2,
    "scored_at": AT + 3,
    "reward": 1.0,
    "outcome": 1.0,
    "reward_parts": {"correct": 1.0},
    "score_error": None,
    "attachments": {"routes": "s3://b/k#00"},
    "metadata": "{}",
}


def lines(messages: tuple[m.Message, ...]) -> bytes:
    """A golden file: a line per record: schema header, id header, value, tabs between."""
    encoded = [encode(message) for message in messages]
    return b"".join(f"{headers['schema']}\t{headers['id']}\t".encode() + value + b"\n" for value, headers in encoded)


if __name__ == "__main__":
    for name, (_, messages) in MESSAGES.items():
        (HERE / f"{name}.json").write_bytes(lines(messages))
    (HERE / "trajectory.arrow").write_bytes(to_bytes([ROW]))
    (HERE / "trajectory.headers").write_text("".join(f"{k}={v}\n" for k, v in arrow_headers(4711, 3, 1).items()))
    (HERE / "columns.txt").write_text(
        "".join(f"{f.name}: {f.type}{'' if f.nullable else ' not null'}\n" for f in TRAJECTORY)
    )
