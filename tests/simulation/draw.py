"""What differs from seed to seed: the settings of the run, the rows, the speeds and the faults."""

import random
from dataclasses import dataclass

from schemas.messages import PromptArrived
from schemas.settings import Settings

NEVER = 1 << 40
MANY_ENGINES_SHARE = 0.03


@dataclass(frozen=True)
class Drawn:
    """One world. Times are seconds. `rows_max` is NEVER if the prompts never end. At `stop_at` people cancel the run
    and resume it; when it is done they resume it with `grow` more steps.
    `sigma`: of lognormal lengths; held-out ones are `eval_longer` times as long."""

    settings: Settings
    rows: tuple[PromptArrived, ...]
    rows_max: int
    eval_rows: int
    kv_tokens_max: int
    tokens_per_request_max: int
    speeds: tuple[float, ...]
    step_s: float
    load_s: float
    poll_s: float
    faults: float
    quiet_at: float
    restarts: int
    stop_at: float
    grow: int
    sigma: float
    eval_longer: int
    constant_share: float
    poison_share: float


def draw(seed: int) -> Drawn:
    """The world of this seed."""
    rng = random.Random(seed)
    modes = random.Random(seed + 4_000_003)
    mode = modes.choice(["dora"] * 4 + ["sync", "one_step", "partial", "partial", "oversample"])
    engines, seats = rng.randint(1, 8), rng.choice([1, 2, 3, 4, 6, 8, 12])
    filled = mode == "dora" and modes.random() < 0.3
    if modes.random() < MANY_ENGINES_SHARE:
        engines = modes.randint(9, 64)
    group_size = rng.randint(2, 6)
    while engines * seats < group_size:
        seats += 1
    new_max = rng.choice([32, 64, 256, 256])
    request_max = 32 + new_max
    kv_factor = rng.choice([1.0, 2.5, seats + 1.0])
    if mode == "partial" and modes.random() < 0.7:
        kv_factor = 2.5
    faults = rng.choice([0.0, 0.3, 1.0])
    speeds = tuple(rng.choice([20.0, 20.0, 20.0, 6.0]) for _ in range(engines))
    evaluates = (rng.random() < 0.35) | (mode in ("partial", "oversample") and modes.random() < 0.5)
    eval_rows = rng.randint(1, 4) if evaluates else 0
    batch, steps = rng.randint(1, 6), rng.randint(3, 8)
    by_epochs = rng.random() < 0.4
    few = by_epochs or rng.random() < 0.15
    rows_max = eval_rows + rng.randint(1, steps * batch) if few else NEVER
    timeout_s = rng.choice([15.0, 40.0])
    staleness_max = modes.choice([0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8])
    every = random.Random(seed + 5_000_003).choice([1, 1, 2, 3, 8])
    settings = Settings.model_validate(
        {
            "name": f"seed-{seed}",
            "model": "builtin:tiny",
            "mode": mode,
            "steps": 0 if by_epochs else steps,
            "epochs": 1 if by_epochs else 0,
            "group_size": group_size,
            "groups_per_batch": batch,
            "staleness_max": staleness_max,
            "engines": {
                "count": engines,
                "seats": seats,
                "tokens_per_request_max": request_max,
                "timeout_s": timeout_s,
                "start_timeout_s": 90.0,
                "request_timeout_s": 1.3 * new_max / min(speeds) + 10.0,
            },
            "scheduling": {
                "live_factor": rng.choice([1.0, 1.5, 2.0, 3.0]) + filled,
                "oversample_factor": modes.choice([1.0, 1.5, 2.5]),
                "legacy_fill": filled,
                "open_every": max(1, min(every, staleness_max)) if mode == "dora" else 1,
                "partition": rng.choice(["packed", "packed", "proportional"]),
                "rebalance_period_s": rng.choice([2.0, 5.0, 10.0]),
                "failures_max": rng.randint(1, 3),
                "group_policy": random.Random(seed + 3_000_003).choice(["all", "partial"]),
                "dynamic_sampling": rng.random() < 0.4,
                "voids_in_row_max": min(
                    rng.choice([5, 256, 256]), modes.choice([3, 256]) if mode == "oversample" else 256
                ),
                "weights_keep": rng.randint(1, 3),
                "weights_keep_every": random.Random(seed + 4_000_037).choice([0, 0, 2, 3]),
            },
            "dataset": [{"path": "rows.jsonl"}, {"path": "held.jsonl", "purpose": "eval"}],
            "evaluation": {"samples": rng.randint(1, 3) if evaluates else 0},
        }
    )
    return Drawn(
        settings=settings,
        rows=_rows(rng, min(rows_max, 400), eval_rows, new_max),
        rows_max=rows_max,
        eval_rows=eval_rows,
        kv_tokens_max=int(kv_factor * request_max),
        tokens_per_request_max=request_max,
        speeds=speeds,
        step_s=rng.choice([2.0, 10.0, 40.0]),
        load_s=rng.choice([0.5, 3.0, 8.0]),
        poll_s=rng.choice([0.3, 1.0, 2.0]),
        faults=faults,
        quiet_at=rng.choice([60.0, 200.0]),
        restarts=rng.randint(0, 2),
        stop_at=rng.choice([15.0, 30.0, 90.0]) if rng.random() < 0.25 else float(NEVER),
        grow=rng.randint(1, 2) if rng.random() < 0.1 else 0,
        sigma=rng.choice([0.6, 1.1, 2.0, 2.0]),
        eval_longer=modes.choice([1, 1, 16]),
        constant_share=rng.choice([0.0, 0.2, 0.6]),
        poison_share=rng.choice([0.0, 0.0, 0.02]),
    )


def _rows(rng: random.Random, count: int, eval_rows: int, new_max: int) -> tuple[PromptArrived, ...]:
    """Some rows set a shorter limit of their own; a few training rows are longer than any engine holds."""
    rows = []
    for number in range(count):
        purpose = "eval" if number < eval_rows else "train"
        prompt = 10_000 if purpose == "train" and rng.random() < 0.01 else rng.randint(1, 32)
        limit = new_max if rng.random() < 0.7 else rng.randint(1, new_max)
        rows.append(PromptArrived(row=number, purpose=purpose, prompt_tokens=prompt, max_new_tokens=limit))
    return tuple(rows)
