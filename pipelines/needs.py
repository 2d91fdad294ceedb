"""What a run needs of this machine: memory and disk, estimated before anything starts.

    engine    weights twice (what it serves, and the next version while it is prepared) + kv_mib + kv_host_mib
              + 1.2 GiB of a vLLM process
    trainer   32 bytes per parameter in bfloat16, 30 in float32 (weights, gradient, masters, moments, and what of them a
              checkpoint copies), and those of a reference model + activations of a forward pass: a micro-batch, or one
              sample if that is longer + 1 GiB; for each copy of the model, the last for each of its processes
    disk      checkpoints kept and the next one, 14 bytes per parameter; versions kept; 1 GiB of log and archive

Rule 1: what the machine can never hold is refused, with the key to lower; what it cannot hold now is a note.
Rule 2: with a GPU the weights lie there: memory is not looked at.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipelines.device import GPU_DEVICE, visible_gpus
from pipelines.doctor import memory
from pipelines.model_folder import ModelFolder
from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.trainer.learners.layout import layout_of

GIB = float(2**30)
VLLM_GIB, PACED_GIB, TRAINER_GIB, SCORER_GIB, OTHERS_GIB, BROKER_GIB, PREFECT_GIB = 1.2, 0.1, 1.0, 0.2, 0.6, 0.5, 0.4
CHECKPOINT_BYTES_PER_PARAMETER = 14
TRAINER_BYTES_PER_PARAMETER, SNAPSHOT_BYTES_PER_PARAMETER = {"bfloat16": 2 + 4 + 4 + 8, "float32": 4 + 4 + 8}, 14
ACTIVATION_BYTES_PER_HIDDEN, LOGITS_BYTES_PER_WORD = {"bfloat16": 34, "float32": 68}, 12
LOG_GIB = 1.0
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB. `pass_key` bounds the tokens of the trainer's forward pass."""

    engine: float
    engines: int
    trainer: float
    others: float
    pass_key: str

    @property
    def total(self) -> float:
        return self.engine * self.engines + self.trainer + self.others


def memory_of(settings: Settings, model: ModelFolder) -> Memory:
    weights = model.parameters * _BYTES[settings.dtype] / GIB
    vllm, megatron = settings.engines.kind == "vllm", settings.training.kind == "megatron"
    caches = (settings.engines.kv_mib + settings.engines.kv_host_mib) / 1024
    engine = 2 * weights + caches + VLLM_GIB if vllm else PACED_GIB
    trainer = PACED_GIB
    if megatron:
        layout = layout_of(settings)
        bytes_each = TRAINER_BYTES_PER_PARAMETER[settings.dtype] + SNAPSHOT_BYTES_PER_PARAMETER
        state = model.parameters * bytes_each / GIB
        reference = weights * bool(settings.training.kl_coef)
        in_flight = (layout.pipeline + 1) / 2  # micro-batches whose activations a pipeline holds, of all its layers
        copy = state + reference + _activations(settings, model) * in_flight
        trainer = copy * layout.data + TRAINER_GIB * layout.ranks
    services = BROKER_GIB * (not settings.broker.address) + PREFECT_GIB * settings.prefect.enabled
    scorers = SCORER_GIB * settings.reward.workers * (1 + settings.reward.pool)
    alone = settings.engines.tokens_per_request_max > settings.training.micro_batch_tokens
    pass_key = "engines.tokens_per_request_max" if alone else "training.micro_batch_tokens"
    return Memory(engine, settings.engines.count, trainer, OTHERS_GIB + services + scorers, pass_key)


def _activations(settings: Settings, model: ModelFolder) -> float:
    """Of one forward pass, GiB. A sample that is longer than a micro-batch goes alone."""
    sizes = [model.config.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
    hidden, layers, words = (size if isinstance(size, int) else 0 for size in sizes)
    per_token = hidden * layers * ACTIVATION_BYTES_PER_HIDDEN[settings.dtype] + words * LOGITS_BYTES_PER_WORD
    return max(settings.training.micro_batch_tokens, settings.engines.tokens_per_request_max) * per_token / GIB


def disk_of(settings: Settings, model: ModelFolder) -> float:
    """GiB."""
    if settings.training.kind != "megatron":
        return LOG_GIB
    reference = _BYTES[settings.dtype] * settings.training.reference_changes
    checkpoints = (settings.training.checkpoints_keep + 1) * (CHECKPOINT_BYTES_PER_PARAMETER + reference)
    versions = settings.scheduling.weights_keep + settings.lag_max + 2 + settings.training.checkpoints_keep
    if settings.scheduling.weights_keep_every:
        versions += settings.steps // settings.scheduling.weights_keep_every + 1
    return (checkpoints + versions * _BYTES[settings.dtype]) * model.parameters / GIB + LOG_GIB


def check(settings: Settings, model: ModelFolder) -> list[str]:
    """Notes; BadInput if it cannot be. `settings.dtype` is settled."""
    ranks = layout_of(settings).ranks
    if GPU_DEVICE.exists():
        if ranks > max(1, len(visible_gpus())):
            raise BadInput(
                f"training.data_parallel and megatron.*_parallel_size make {ranks} processes of the trainer, a GPU for "
                f"each, but {len(visible_gpus())} are visible: lower them"
            )
        notes = []
    else:
        notes = _check_memory(memory_of(settings, model))
        if ranks > (cores := len(os.sched_getaffinity(0))):
            notes.append(f"the trainer has {ranks} processes on {cores} cores: fewer would be faster")
    run = Path(settings.runs_dir) / settings.name
    if not (settings.name and run.exists()):  # a resumed run's files are there already
        _check_disk(settings, disk_of(settings, model))
    return notes


def _check_memory(needed: Memory) -> list[str]:
    total, available = memory()
    parts = (
        f"about {needed.total:.1f} GiB of memory ({needed.engines} engines with {needed.engine:.1f} GiB each, "
        f"trainer {needed.trainer:.1f} GiB, all others {needed.others:.1f} GiB)"
    )
    if needed.total > total:
        fits = int((total - needed.trainer - needed.others) / needed.engine)
        advice = (
            f"lower engines.count to {fits}, or engines.kv_mib"
            if fits >= 1
            else f"lower {needed.pass_key} or engines.kv_mib, or take a smaller model"
        )
        raise BadInput(f"this run needs {parts}, this machine has {total:.1f} GiB: {advice}")
    if needed.total > available:
        return [f"this run needs {parts}, {available:.1f} GiB are free now: end other programs, or lower engines.count"]
    return []


def _check_disk(settings: Settings, needed: float) -> None:
    place = Path(settings.runs_dir).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if needed > free:
        raise BadInput(
            f"this run needs about {needed:.1f} GiB of disk for checkpoints, versions and its log, {place} has "
            f"{free:.1f} GiB free: lower training.checkpoints_keep or scheduling.weights_keep*, or set runs_dir"
        )
