"""The parts of an engine: the model of its role, DeepSpeed around it, the ranks that share its rows."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from rlhf_core import ConfigError, EngineConfig, add_adapters, tile_mlps
from torch import nn

from rlhf_train.config.options import ZeroConfig
from rlhf_train.model.fused import use_fused_kernels
from rlhf_train.model.load import load_model
from rlhf_train.model.optimizers import build_optimizer, trained_elements
from rlhf_train.model.role_model import RoleModel
from rlhf_train.parallel.ranks import TrainingRanks, open_secondary_shards
from rlhf_train.parallel.sequence import SequenceGroup
from rlhf_train.parallel.tensor import note_full_shapes


def build_module(
    config: EngineConfig, zero: ZeroConfig, settings: dict[str, Any], *, ranks: TrainingRanks, replay: bool
) -> RoleModel:
    """The model of the role, with adapters and frozen parameters as asked for.

    `settings` are DeepSpeed's; `replay` lets batches say which experts their tokens go through.
    """
    if zero.zero_hpz_partition_size > 1:
        open_secondary_shards(ranks, zero.zero_hpz_partition_size)
    sharded = zero.stage == 3
    model = load_model(config, settings if sharded else None)
    if zero.liger_kernels:
        use_fused_kernels(model)
    if config.lora is not None and config.trained:
        add_adapters(model, config.lora, seed=config.seed, extra="rlhf-train[lora]")
    if config.optimizer is not None:
        freeze(model, zero.freeze)
    tiled = [] if (tile := config.max_tokens_per_mlp_tile) is None else tile_mlps(model, tile)
    if sharded:
        mark_expert_blocks(model)
        gather_whole(model, tiled)
    return RoleModel(model, sharded=sharded, replay=replay)


def freeze(model: Any, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose name matches one of the shell patterns; returns their names.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen: list[str] = []
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            some = ", ".join(list(parameters)[:3])
            raise ConfigError(
                f"engine options: freeze pattern {pattern!r} matches no parameter of {type(model).__name__}; names "
                f"are like {some}, so write for instance 'model.layers.0.*'"
            )
        frozen += matches
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"engine options: freeze {list(patterns)} leaves nothing to train; give fewer patterns, or no optimizer"
        )
    return list(dict.fromkeys(frozen))


def mark_expert_blocks(model: Any) -> list[str]:
    """Let ZeRO-3 gather the experts of a block together; returns the names of these blocks.

    Where experts are modules of their own, a rank calls only those its tokens are routed to, and would gather
    parameters that no other rank gathers: the ranks would wait for each other for ever. Experts that Transformers
    keeps fused in one tensor need no mark.
    """
    names = [
        name
        for name, module in model.named_modules()
        if any("expert" in child and isinstance(part, nn.ModuleList) for child, part in module.named_children())
    ]
    gather_whole(model, names)
    return names


def gather_whole(model: Any, names: Sequence[str]) -> None:
    """Let ZeRO-3 gather the modules of these names as one, whatever they call inside and however often.

    So ranks may run an MLP over different numbers of tiles: each gathers it once.
    """
    if names:
        from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules_by_name

        set_z3_leaf_modules_by_name(model, list(names))


def wrap_module(
    module: RoleModel, config: EngineConfig, zero: ZeroConfig, settings: dict[str, Any], *, device: torch.device
) -> Any:
    """DeepSpeed's engine; None for a frozen model that is not sharded, which needs nothing of it."""
    if zero.stage < 3:
        module.to(device)
    if config.optimizer is None and zero.stage < 3:
        return None
    import deepspeed

    if zero.stage == 3:
        settings["zero_optimization"]["stage3_max_live_parameters"] = zero.most_live(module.held_elements)
    optimizer = None
    if config.optimizer is not None:
        # The buffer is allocated at this size, however small the model.
        section = settings["zero_optimization"]
        section["reduce_bucket_size"] = min(section["reduce_bucket_size"], trained_elements(module))
        optimizer = build_optimizer(module, config, on_host=zero.offload_optimizer)
    wrapped, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    note_full_shapes(module)
    if zero.deep_compile:
        wrapped.compile()
    return wrapped


def group_with_common_rows(
    model: Any, config: EngineConfig, zero: ZeroConfig, *, ranks: TrainingRanks
) -> SequenceGroup | None:
    """The ranks that run the same rows, each a slice of the tokens or of the layers; None if this one is alone."""
    if zero.autotp_size > 1:
        return SequenceGroup(ranks, size=zero.autotp_size, setting="option autotp_size")
    if config.sequence_parallel_size == 1:
        return None
    group = SequenceGroup(ranks, size=config.sequence_parallel_size)
    group.attach(model)
    return group
