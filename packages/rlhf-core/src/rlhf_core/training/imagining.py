"""A model without numbers: tensors that have a shape and a type alone, and how a model of them is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rlhf_core.adapters.lora import add_adapters
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces.engine_config import EngineConfig
from rlhf_core.model.attention.enable import assume_packing
from rlhf_core.model.tiled_mlp import tile_mlps
from rlhf_core.model.vision import has_vision_class
from rlhf_core.training.deepened import SHALLOW, Deepening
from rlhf_core.training.memory_meter import LivingTensors

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings of mixtures of experts, whose layers need not be alike."""
_ZERO = "_known_to_be_zero"
_ANY = torch.ops.aten.any.default
_MAKES_ZEROS = (torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros)


class Imagining(LivingTensors):
    """Makes up what only a number could tell, and keeps integers real."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Floating-point operations of matrix products and attention so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in given)
        if func is torch.ops.aten._local_scalar_dense.default and fake:
            dtype = given[0].dtype  # a loss that is finite, a gradient that is there
            return 1.0 if dtype.is_floating_point else dtype is torch.bool and not hasattr(given[0], _ZERO)
        if fake or (not given and _makes_floats(kwargs)):
            found = super().__torch_dispatch__(func, types, args, kwargs)
            self.flops += _flops(func, args, kwargs, found)
            if func.overloadpacket in _MAKES_ZEROS or (given and func is _ANY and hasattr(given[0], _ZERO)):
                setattr(found, _ZERO, True)  # the gradient of an output that the loss only reports
            return found
        with unset_fake_temporarily():
            return super().__torch_dispatch__(func, types, args, kwargs)


def _flops(func: Any, args: Any, kwargs: Any, found: Any) -> int:
    if (count := flop_registry.get(func.overloadpacket)) is not None:
        return count(*args, **kwargs, out_val=found)
    if "flash_attention_for_cpu" not in func.overloadpacket.__name__:
        return 0
    backward = "backward" in func.overloadpacket.__name__
    query, key = args[1:3] if backward else args[:2]
    rows, heads, tokens, width = query.shape
    # Causal: half of all pairs; two products forwards, five backwards.
    return (5 if backward else 2) * rows * heads * tokens * key.shape[2] * width


def _makes_floats(kwargs: dict[str, Any]) -> bool:
    return (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point


def fake_mode() -> Any:
    """What gives tensors no storage; one for all of a model, since tensors of another are copied, and counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def imagining(mode: Any) -> Iterator[Imagining]:
    """A context in which floating tensors that are made have no numbers, and living ones are counted.

    Args:
        mode: of the model (`fake_mode`).
    """
    with mode, Imagining() as living:
        yield living


def put_on_host(model: nn.Module) -> None:
    """Put tensors of the present mode, on the CPU, in the place of those on `meta`; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def config_of(config: EngineConfig) -> Any:
    """The model's configuration, which Transformers reads."""
    import transformers

    labels = {} if config.role in ("policy", "reference") else {"num_labels": 1}
    try:
        return transformers.AutoConfig.from_pretrained(
            config.model, trust_remote_code=config.trust_remote_code, **labels
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {config.model!r} has no configuration at hand: {error}") from error


def deepening_of(its: Any) -> Deepening | None:
    """How to get from a few layers to all, if all are alike; the configuration is made shallow."""
    text = its.get_text_config()
    layers, kinds = getattr(text, "num_hidden_layers", 0), getattr(text, "layer_types", None)
    alike = kinds is None or len(set(kinds)) == 1
    experts = any(hasattr(text, name) for name in _EXPERTS)
    if text is not its or layers <= SHALLOW + 2 or not alike or experts:
        return None
    text.num_hidden_layers = SHALLOW
    if kinds is not None:
        text.layer_types = list(kinds[:SHALLOW])
    return Deepening(layers=layers)


def built(config: EngineConfig, its: Any) -> Any:
    """See `load_role`, without weights."""
    import transformers

    causal = config.role in ("policy", "reference")
    kind: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    if causal and has_vision_class(its):
        kind = transformers.AutoModelForImageTextToText
    try:
        model = kind.from_config(
            its, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {config.model!r} cannot be imagined: {error}") from error
    adapted = config.lora is not None and config.trained
    if adapted and config.lora is not None:
        add_adapters(model, config.lora, seed=config.seed, extra="rlhf-train[lora]")
    if config.gradient_checkpointing and config.trained:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.max_tokens_per_mlp_tile is not None:
        tile_mlps(model, config.max_tokens_per_mlp_tile)
    if config.packing and config.attention in (None, "sdpa"):
        assume_packing(model)
    for parameter in model.parameters():
        parameter.requires_grad_(config.trained and (parameter.requires_grad or not adapted))
    return model
