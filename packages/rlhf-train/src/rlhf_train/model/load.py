"""Loading a Transformers model for a role, under ZeRO-3 straight into shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from rlhf_core import EngineConfig, load_role, zero_linear_head

from rlhf_train.model.buffers import restore_buffers
from rlhf_train.parallel.tensor import whole_layers


def load_model(config: EngineConfig, zero_config: dict[str, Any] | None) -> Any:
    """The model of `config.role` in `config.dtype`, its linear layers in 4 bits where `config.quantize` says so.

    Args:
        config: what to load.
        zero_config: the DeepSpeed configuration if parameters are to be created sharded (stage 3), else None.
            A quantised model is created whole on every rank, and sharded when DeepSpeed wraps it.

    Raises:
        ConfigError: there is no such model, or a frozen reward model has no trained head.
        CheckpointError: a file of the model is damaged.
    """
    creation = _sharded_creation(None if config.quantize else zero_config)
    model, fresh = load_role(config, extra="rlhf-train[qlora]", creation=creation)
    if zero_config is not None and not config.quantize:
        restore_buffers(model, getattr(torch, config.dtype))
    if parameters := zero_linear_head(model, fresh):
        with torch.no_grad(), gathered(parameters, modify=True) as whole:
            for parameter in whole:
                parameter.zero_()
    if config.gradient_checkpointing and config.optimizer is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.requires_grad_(config.optimizer is not None and parameter.is_floating_point())
    return model


@contextlib.contextmanager
def _sharded_creation(zero_config: dict[str, Any] | None) -> Iterator[None]:
    """Transformers creates parameters sharded while an HfDeepSpeedConfig of stage 3 is alive, process-wide."""
    if zero_config is None:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(zero_config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive


@contextlib.contextmanager
def gathered(parameters: list[torch.nn.Parameter], *, modify: bool = False) -> Iterator[list[torch.nn.Parameter]]:
    """The parameters at full shape on all ranks, in one gather; a no-op for unsharded ones.

    With `modify`, all ranks make the same change and rank 0's is kept.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        with whole_layers(parameters):
            yield parameters
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None):
        yield parameters
