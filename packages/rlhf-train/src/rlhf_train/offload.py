"""The accelerator's memory given back between training phases; on the CPU there is nothing to give back.

There are four cases, because DeepSpeed moves only what its optimizers own. This code is for CUDA; the tests, which
run on the CPU, do not exercise it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_train.weights.average import release_gathered


def move_engine(engine: Any, model: nn.Module, device: torch.device) -> None:
    """Move parameters, optimizer state and master weights to `device` (the host to offload, else back).

    `engine` is DeepSpeed's, or None for a plain frozen model.
    """
    if device.type == "cpu":
        # Full copies of sharded parameters, kept for the next pass, would stay where they are.
        release_gathered(getattr(engine, "optimizer", None))
    if engine is None or engine.zero_optimization_stage() == 0:
        model.to(device)
        _move_optimizer_state(engine, device)
    elif _is_frozen(engine):
        _move_shards(model, device)
    elif engine.zero_optimization_stage() < 3 or _fused(engine) or engine.zero_use_cpu_optimizer():
        _move_states(engine, device)
    else:
        # ZeRO-3 moves optimizer state only of its own fused Adam.
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        _move_states(engine, device, include=[State.lp_params, State.lp_grads, State.contiguous_grad_buffer])
        for master in engine.optimizer.fp32_partitioned_groups_flat:
            master.data = master.data.to(device)
        _move_optimizer_state(engine, device)
    torch.cuda.empty_cache()


def _is_frozen(engine: Any) -> bool:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return isinstance(engine.optimizer, DeepSpeedZeRoOffload)


def _fused(engine: Any) -> bool:
    return type(engine.basic_optimizer).__name__ == "FusedAdam"


def _move_states(engine: Any, device: torch.device, include: Any = None) -> None:
    if device.type == "cpu":
        engine.offload_states(include=include)
    else:
        engine.reload_states()


def _move_shards(model: nn.Module, device: torch.device) -> None:
    """A frozen ZeRO-3 model: its shards, and the small parameters that every rank keeps in full."""
    for parameter in model.parameters():
        shard: Any = parameter
        shard.ds_tensor.data = shard.ds_tensor.data.to(device)
        if parameter.numel():
            parameter.data = parameter.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _move_optimizer_state(engine: Any, device: torch.device) -> None:
    for state in getattr(getattr(engine, "basic_optimizer", None), "state", {}).values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device)
