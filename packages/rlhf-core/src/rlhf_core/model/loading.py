"""Loading a Transformers model for a role, with what it lacks seen and said."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.adapters.quantized import quantized_loading, settle_quantized
from rlhf_core.damage import naming_damage
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces.engine_config import EngineConfig
from rlhf_core.model.vision import Vision, has_vision_class

model_loading = threading.RLock()
"""Held while a model is loaded. Transformers then switches state of the whole process (default device and dtype),
so whoever shares a process loads one after the other."""


def check_model_path(model: str, *, what: str = "model") -> None:
    """Refuse a path that cannot be a model, before anything is loaded.

    Raises:
        ConfigError: a directory without config.json, or a path that does not exist and is no hub name either.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(
                f"{what} {model!r} is a directory without config.json; give one that save_pretrained wrote"
            )
    elif path.exists():
        raise ConfigError(f"{what} {model!r} is a file; give the directory that holds config.json")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ConfigError(f"{what} {model!r} does not exist; give a directory with config.json or a hub name")


def load_role(
    config: EngineConfig,
    *,
    extra: str,
    creation: contextlib.AbstractContextManager[Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[Any, list[str]]:
    """The model of `config.role` in `config.dtype`, and the names of parameters that a fresh head has.

    A causal language model for the roles policy and reference, with its image encoder if its checkpoint has one;
    else one with a scalar head, which is seeded where the checkpoint has none. Random numbers of the caller are
    left alone.

    Args:
        config: what to load.
        extra: what to install if a library for 4-bit weights is missing, for the message.
        creation: entered while the model is made.
        arguments: more of them for `from_pretrained`.

    Raises:
        ConfigError: there is no such model, it lacks weights or takes no images where it should, or a frozen
            reward model or critic has no trained head.
        CheckpointError: a file of the model is damaged.
    """
    check_model_path(config.model)
    causal = config.role in ("policy", "reference")
    given: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": config.trust_remote_code,
        **({} if causal else {"num_labels": 1}),
        **({} if config.attention is None else {"attn_implementation": config.attention}),
    }
    if config.quantize is not None:
        device = torch.device(config.device)
        given |= quantized_loading(config.quantize, dtype=given["dtype"], device=device, extra=extra)
    try:
        kind = _auto_class(config)
        vision = Vision.load(config.model, trust_remote_code=config.trust_remote_code) if config.images else None
        with (
            naming_damage(f"model {config.model!r}", config.model),
            torch.random.fork_rng(devices=[]),
            creation or contextlib.nullcontext(),
            _quiet_report(),
        ):
            torch.manual_seed(config.seed)
            model, info = kind.from_pretrained(config.model, output_loading_info=True, **given, **(arguments or {}))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model!r} cannot be loaded as a {config.role}: {error}") from error
    if vision is not None:
        vision.settle(model)
    fresh = _fresh_head(config, model, set(info["missing_keys"]))
    if config.quantize is not None:
        settle_quantized(model)
    return model, fresh


def _auto_class(config: EngineConfig) -> Any:
    """By which the model of a role is loaded: with its image encoder, if its checkpoint has one."""
    import transformers

    if config.role not in ("policy", "reference"):
        return transformers.AutoModelForSequenceClassification
    trusted = config.trust_remote_code
    its = transformers.AutoConfig.from_pretrained(config.model, trust_remote_code=trusted)
    if has_vision_class(its):
        return transformers.AutoModelForImageTextToText
    if config.images:
        raise ConfigError(
            f"model {config.model!r} ({its.model_type}) is no vision-language model, and there are rows with "
            "images; give a model that takes them, or rows of text"
        )
    return transformers.AutoModelForCausalLM


@contextlib.contextmanager
def _quiet_report() -> Iterator[None]:
    """A critic made from a language model misses its head by design; what matters is checked afterwards."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _fresh_head(config: EngineConfig, model: Any, missing: set[str]) -> list[str]:
    """Parameters that the checkpoint lacks because they are the scalar head's; any other gap is refused."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = (missing & parameters) - set(getattr(model, "all_tied_weights_keys", {}))
    heads = [] if config.role in ("policy", "reference") else sorted(filter(_beyond_backbone(model), missing))
    if others := sorted(missing - set(heads)):
        raise ConfigError(
            f"model {config.model!r} lacks {len(others)} weights of a {type(model).__name__}, among them "
            f"{', '.join(others[:3])}; give a complete checkpoint"
        )
    if heads and config.role == "reward" and config.optimizer is None:
        raise ConfigError(
            f"model {config.model!r} has no trained scalar head ({', '.join(heads)} is missing), so its "
            "scores would mean nothing; give a reward model, or an optimizer to train one"
        )
    return heads


def _beyond_backbone(model: Any) -> Any:
    """Whether a parameter of this name belongs to the head; an encoder's pooler does."""
    prefix = model.base_model_prefix + "."
    return lambda name: not name.startswith(prefix) or "pooler." in name


def zero_linear_head(model: Any, fresh: Sequence[str]) -> list[nn.Parameter]:
    """Parameters of a fresh head that may start at zero: those of a single linear layer.

    A critic that says 0 everywhere makes the first advantages the returns themselves.
    """
    owners = {name.rpartition(".")[0] for name in fresh}
    if len(owners) != 1 or not isinstance(model.get_submodule(*owners), nn.Linear):
        return []
    return [model.get_parameter(name) for name in fresh]
