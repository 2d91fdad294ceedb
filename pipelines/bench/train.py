"""The trainer against a plain loop of Hugging Face's model on the same batch, and packed rows against padded ones.

Both are in one process with all its cores, SmolLM2 in bfloat16 with float32 masters (float32 where that is faster). A
repetition trains the same batch once with each, in turn, so that a drift of the machine falls out; a figure is the
median of the repetitions' ratios, to the faster of the plain loop's two kinds of attention. A step is everything:
tensors, forward, backward, clipping, AdamW, figures.

The batch of the comparison has prompts of its own for every sample, all of one length: nothing is shared and nothing
is padded, so what is compared is the training itself. Ragged batches are groups of a prompt with response lengths as
reasoning has them: most are short, a few are long.
"""

import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.bench.benchmarks import Bench
from pipelines.device import best_dtype
from pipelines.validate import resolve
from schemas.settings import Settings
from workers.runtime import clock
from workers.trainer.learners.base import Sample

REPETITIONS, RAGGED_REPETITIONS = 5, 3
SAMPLES, PROMPT, RESPONSE = 8, 64, 192
"""2,048 tokens."""
RAGGED_SAMPLES, RAGGED_GROUP, RAGGED_PROMPT, RAGGED_MAX = 24, 8, 64, 448
WORDS = 49_000
SEED = 1
ATTENTIONS = ("sdpa", "eager")


def measure() -> Bench:
    """A row per repetition: seconds of a step."""
    from pipelines.bench.plain_loop import PlainLoop
    from workers.trainer.learners.megatron_learner import MegatronLearner

    folder = resolve("builtin:smollm2")
    settings = settings_of(folder)
    ours = MegatronLearner(settings, folder)
    samples = batch(ours, [RESPONSE] * SAMPLES, PROMPT, group_size=1)
    loops = {name: PlainLoop(settings, folder, name) for name in ATTENTIONS}
    first = ours.train(samples)
    theirs = {name: loop.train(samples) for name, loop in loops.items()}
    rows = []
    for _ in range(REPETITIONS):
        rows.append({"ours_s": _seconds(lambda: ours.train(samples))})
        rows[-1] |= {f"hf_{name}_s": _seconds(partial(loop.train, samples)) for name, loop in loops.items()}
    best = min(loops, key=lambda name: statistics.median(row[f"hf_{name}_s"] for row in rows))
    loops.clear()
    ragged_rows = _ragged_rows(ours, MegatronLearner(settings_of(folder, packing=False), folder))
    tokens = sum(map(_tokens, samples))
    ratios = [row[f"hf_{best}_s"] / row["ours_s"] for row in rows]
    figures = {
        "tokens_per_second_over_hf": round(statistics.median(ratios), 3),
        "tokens_per_second_over_hf_min": round(min(ratios), 3),
        "tokens_per_second": round(tokens / statistics.median(row["ours_s"] for row in rows), 1),
        "hf_tokens_per_second": round(tokens / statistics.median(row[f"hf_{best}_s"] for row in rows), 1),
        "hf_eager": int(best == "eager"),
        "grad_norm_over_hf": round(first["grad_norm"] / theirs[best]["grad_norm"], 4),
        "packing_over_padding": round(statistics.median(row["padded_s"] / row["packed_s"] for row in ragged_rows), 3),
    }
    return Bench([*rows, *ragged_rows], figures)


def _ragged_rows(packed: Any, padded: Any) -> list[dict[str, float]]:
    """Seconds of a step of the same ragged samples by two learners, in turn."""
    samples = batch(packed, ragged(RAGGED_SAMPLES, RAGGED_MAX), RAGGED_PROMPT, RAGGED_GROUP)
    for learner in (packed, padded):
        learner.train(samples)
    return [
        {"packed_s": _seconds(lambda: packed.train(samples)), "padded_s": _seconds(lambda: padded.train(samples))}
        for _ in range(RAGGED_REPETITIONS)
    ]


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def settings_of(folder: Path, *, packing: bool = True) -> Settings:
    """As a run of the quickstart has it, on all cores."""
    return Settings.model_validate(
        {
            "name": "train",
            "model": str(folder),
            "steps": 1,
            "dtype": best_dtype(),
            "sampling": {"max_new_tokens": RAGGED_MAX},
            "training": {
                "threads": len(os.sched_getaffinity(0)),
                "micro_batch_tokens": SAMPLES * (PROMPT + RESPONSE),
                "packing": packing,
            },
            "dataset": [{"path": "none.jsonl"}],
        }
    )


def batch(learner: Any, responses: Sequence[int], prompt: int, group_size: int) -> list[Sample]:
    """Samples with random ids; those of a group share a prompt; behaviour log-probs are the learner's, so ratios are 1;
    advantages alternate."""
    rng = random.Random(SEED)

    def ids(count: int) -> list[int]:
        return [rng.randrange(WORDS) for _ in range(count)]

    made: list[Sample] = []
    for place, length in enumerate(responses):
        shared = made[-1].prompt_ids if place % group_size else ids(prompt)
        blank = [0.0] * length
        made.append(Sample(shared, ids(length), blank, [True] * length, 1.0, (-1.0) ** place, place // group_size))
    known = learner.logprobs(made)
    return [replace(sample, logprobs=logprobs) for sample, logprobs in zip(made, known, strict=True)]


def ragged(count: int, longest: int) -> list[int]:
    """Response lengths, tokens: log-normal, the median an eighth of the longest, none longer than that."""
    rng = random.Random(SEED)
    return [max(4, min(longest, round(longest / 8 * math.exp(rng.gauss(0, 1))))) for _ in range(count)]


def _seconds(step: Callable[[], object]) -> float:
    began = clock.monotonic_s()
    step()
    return round(clock.monotonic_s() - began, 4)
