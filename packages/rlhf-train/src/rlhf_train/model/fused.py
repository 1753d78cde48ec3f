"""Liger's fused kernels for the norms and gated MLPs of a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from rlhf_core import ConfigError, PluginError

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""The activations that are in Liger's gated MLPs, whatever the model's configuration asks for. Its rotary embedding
is no part of a model but of its family's module, and its losses have no place where engines return log-probs."""
_SETTING = "engine options: liger_kernels"


def use_fused_kernels(model: Any) -> list[str]:
    """Let the norms and gated MLPs of a Transformers model run Liger's kernels; returns the names of those that do.

    Liger's function for a family also puts its classes in the place of the family's own, for all models that the
    process makes later; that is taken back.

    Raises:
        PluginError: the library is not installed.
        ConfigError: it has no kernels for this family, or the model routes tokens to experts.
    """
    hooks = liger_hooks()
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in hooks:
        raise ConfigError(
            f"{_SETTING}: Liger has no kernels for {kind or type(model).__name__}, only for "
            f"{', '.join(sorted(hooks))}; leave it out for this model"
        )
    if routed := [name for name, _ in model.named_modules() if "expert" in name.rpartition(".")[2]]:
        raise ConfigError(
            f"{_SETTING}: {kind} routes tokens to experts ({routed[0]}), and Liger's kernel for them is not the "
            "one that routing is recorded from and replayed in; leave it out for a mixture of experts"
        )
    hook = hooks[kind]
    switches = {name: name == "rms_norm" for name in inspect.signature(hook).parameters if name != "model"}
    text = model.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    switches |= {name: activation in fitting for name, fitting in _ACTIVATIONS.items() if name in switches}
    before = _with_own_forward(model)
    families = {sys.modules[type(module).__module__] for module in model.modules()}
    names = {family: dict(vars(family)) for family in families}
    try:
        hook(model=model, **switches)
    finally:
        for family, found in names.items():
            for name, value in found.items():
                if vars(family)[name] is not value:
                    setattr(family, name, value)
    fused = [name for name in _with_own_forward(model) if name not in before]
    if not fused:
        raise ConfigError(f"{_SETTING}: Liger has changed nothing in {type(model).__name__}; leave it out")
    return fused


def liger_hooks() -> dict[str, Callable[..., None]]:
    """Liger's functions that change a model, by the `model_type` of its configuration.

    Raises:
        PluginError: the library is not installed.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise PluginError(f"{_SETTING} needs {error.name}: install rlhf-train[liger]") from error
    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def _with_own_forward(model: Any) -> set[str]:
    """Names of the modules whose `forward` is not their class's."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}
