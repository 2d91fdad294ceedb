"""Megatron's gradient buffers and optimizer from our settings, and what its distributed optimizer lacks on a resume.

Rule 1: gradients are summed in float32; in bfloat16 the optimizer keeps float32 masters.
Rule 2: the distributed optimizer of megatron-core 0.16.1 with torch's own Adam (no Apex, no Transformer Engine) cannot
   load what it saved: it wants moments that a fresh optimizer has not, looks for a `step` among the tensors, and gives
   all parameters one `step` tensor, which then counts once per parameter. `ready_to_load` and `loaded` mend that.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from schemas.settings import Settings

_BUFFERS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bucket_size")
_OPTIMIZER = ("use_distributed_optimizer", "overlap_param_gather", "optimizer", "sgd_momentum")
KEYS = frozenset({*_BUFFERS, *_OPTIMIZER})
"""Keys of `[megatron]` that are no fields of its TransformerConfig."""


def buffers(megatron: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """The model with buffers for its gradients, which all copies of it share."""
    chosen = {key: given[key] for key in _BUFFERS if key in given}
    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | chosen)
    ddp = DistributedDataParallel(megatron, config, model)
    if config.overlap_grad_reduce:
        megatron.no_sync_func = ddp.no_sync
    return ddp


def optimizer_of(settings: Settings, dtype: torch.dtype, ddp: Any) -> Any:
    training = settings.training
    chosen = {key: settings.megatron[key] for key in _OPTIMIZER if key in settings.megatron}
    own: dict[str, Any] = {
        "optimizer": "adam",
        "sgd_momentum": 0.0,
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "clip_grad": training.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**own | chosen), [ddp])
    hold_settings(optimizer, settings)
    return optimizer


def hold_settings(optimizer: Any, settings: Settings) -> None:
    """The run's settings hold, not those of a checkpoint."""
    training = settings.training
    for group in optimizer.param_groups:
        if "betas" in group:
            group.update(betas=(training.adam_beta1, training.adam_beta2))
        group["fused"] = True  # one pass over memory instead of one per operation


def ready_to_load(optimizer: Any) -> None:
    """Moments of zero where there are none yet. Rule 2."""
    for one in _distributed(optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                state = one.optimizer.state[parameter]
                if "betas" in group and not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def loaded(optimizer: Any) -> None:
    """A `step` of its own for each parameter. Rule 2."""
    for one in _distributed(optimizer):
        for state in one.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _distributed(optimizer: Any) -> Iterator[Any]:
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    return (one for one in found if isinstance(one, DistributedOptimizer))


def _take_state(self: Any, model_param: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """The master parameter and moments of one parameter from `tensors`, which has no `step`. Rule 2."""
    if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        _take_state_upstream(self, model_param, tensors)
        return
    group, place = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][place]
    for key, held in {"param": main, **self.optimizer.state[main]}.items():
        if key != "step":
            held.copy_(tensors[key])


_take_state_upstream = DistributedOptimizer._set_main_param_and_optimizer_states
DistributedOptimizer._set_main_param_and_optimizer_states = _take_state
