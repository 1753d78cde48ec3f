"""Loading a Transformers model for a role, under ZeRO-3 straight into shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rlhf_core import ConfigError, EngineConfig, quantized_loading, settle_quantized

from rlhf_train.parallel.tensor import whole_layers


def load_model(config: EngineConfig, zero_config: dict[str, Any] | None) -> Any:
    """The model of `config.role` in `config.dtype`, its linear layers in 4 bits where `config.quantize` says so.

    Args:
        config: what to load.
        zero_config: the DeepSpeed configuration if parameters are to be created sharded (stage 3), else None.
            A quantised model is created whole on every rank, and sharded when DeepSpeed wraps it.

    Raises:
        ConfigError: there is no such model, or a frozen reward model has no trained head.
    """
    import transformers

    _check_path(config.model)
    causal = config.role in ("policy", "reference")
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.attention is not None:
        arguments["attn_implementation"] = config.attention
    if not causal:
        arguments["num_labels"] = 1
    if config.quantize is not None:
        dtype, device = arguments["dtype"], torch.device(config.device)
        arguments |= quantized_loading(config.quantize, dtype=dtype, device=device, extra="rlhf-train[qlora]")
    kind: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _sharded_creation(None if config.quantize else zero_config),
            _quiet_load_report(),
        ):
            torch.manual_seed(config.seed)
            model, info = kind.from_pretrained(config.model, output_loading_info=True, **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model!r} cannot be loaded as a {config.role}: {error}") from error
    _check_missing(config, model, set(info["missing_keys"]))
    if config.quantize is not None:
        settle_quantized(model)
    if config.gradient_checkpointing and config.optimizer is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.requires_grad_(config.optimizer is not None and parameter.is_floating_point())
    return model


def _check_path(model: str) -> None:
    path = Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"model {model!r} is a directory without config.json; give a Transformers directory")
    if path.is_file() or (path.is_absolute() and not path.exists()):
        raise ConfigError(f"model {model!r} is not a directory; give a Transformers directory or a hub name")


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
def _quiet_load_report() -> Iterator[None]:
    """A critic made from a language model misses its head by design; what matters is checked afterwards."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_missing(config: EngineConfig, model: Any, missing: set[str]) -> None:
    """Zero a head that the checkpoint does not have; refuse other gaps."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    heads = {name for name in missing if name.split(".")[0] in ("score", "classifier")}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = sorted((missing & parameters) - heads - tied)
    if others:
        raise ConfigError(
            f"model {config.model!r} lacks {len(others)} weights of a {type(model).__name__}, among them "
            f"{', '.join(others[:3])}; give a complete checkpoint"
        )
    if not heads:
        return
    if config.role == "reward" and config.optimizer is None:
        raise ConfigError(
            f"model {config.model!r} has no trained scalar head ({', '.join(sorted(heads))} is missing), so its "
            "scores would mean nothing; give a reward model, or an optimizer to train one"
        )
    # A fresh critic says 0 everywhere, so that the first advantages are the returns themselves.
    with torch.no_grad(), gathered([model.get_parameter(name) for name in sorted(heads)], modify=True) as params:
        for parameter in params:
            parameter.zero_()


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
