"""MLPs over tiles of a row, as in Arctic Long Sequence Training (Bekman et al. 2025, arXiv:2506.13996).

An MLP works on each token by itself, so it can run over a few thousand tokens at a time. What it makes inside,
several times as wide as the model, then exists for one tile: the backward pass runs each tile again, takes its
gradients and lets it go. A row's length is no longer bounded by its MLPs.

DeepSpeed has such a function, too (`runtime.sequence_parallel.ulysses_sp.TiledMLP`). It is not used here, because
it starts a whole backward pass for each tile: gradients reach the optimizer's hooks once per tile and have to be
held back by a mark on each parameter, they are added up in the model's 16 bits, and under ZeRO-3 the linear layers
gather their weights anew for each tile, so that ranks with other numbers of tiles wait for each other for ever.
Here a tile's gradients are taken apart from the rest, added up in float32, and given to autograd once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_core.errors import CapabilityError, ConfigError
from rlhf_core.model.heads import backbone, kind_of, text_config
from rlhf_core.model.linear_head import full_precision

_NAMES = ("mlp", "feed_forward", "ffn")
"""What Transformers calls the MLP of a layer."""
_SETTING = "engine: max_tokens_per_mlp_tile"
_ATTRIBUTE = "_rlhf_tiles"


@dataclass(kw_only=True, slots=True, eq=False)
class _Tiles:
    """Of one model: how many tokens its MLPs run over at a time, and which they are."""

    tokens: int | None
    modules: tuple[nn.Module, ...] = ()


def tile_mlps(model: Any, tokens: int) -> list[str]:
    """Let the MLPs of a Transformers model run over tiles of so many tokens; returns their names in the model.

    What a model's adapters are must be settled before.

    Raises:
        ConfigError: a layer has no MLP of its own that takes the hidden states alone, or routes tokens to experts;
            names the model and the layer.
    """
    found = _mlps(model)
    tiles = _Tiles(tokens=tokens, modules=tuple(found.values()))
    for module in tiles.modules:
        whole: Any = module.forward
        module.forward = partial(_forward, tiles, module, whole)
        module.register_forward_pre_hook(_with_gradient)
    object.__setattr__(model, _ATTRIBUTE, tiles)
    return list(found)


def tiled_mlps(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that run over tiles; none unless `tile_mlps` was called for the model."""
    tiles: _Tiles | None = vars(model).get(_ATTRIBUTE)
    return () if tiles is None else tiles.modules


@contextlib.contextmanager
def tiles_of(model: nn.Module, tokens: int | None) -> Iterator[None]:
    """A context in which the tiles of a model have another size; None runs its MLPs whole."""
    tiles: _Tiles | None = vars(model).get(_ATTRIBUTE)
    if tiles is None:
        yield
        return
    before, tiles.tokens = tiles.tokens, tokens
    try:
        yield
    finally:
        tiles.tokens = before


# ------------------------------------------------------------ which modules


def _mlps(model: Any) -> dict[str, nn.Module]:
    layers = getattr(text_config(model), "num_hidden_layers", None)
    prefix = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for part in backbone(model).modules():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            for number, layer in enumerate(part):
                module = _mlp_of(model, layer, number)
                found[prefix[id(module)]] = module
    if not found:
        raise ConfigError(f"{_SETTING} needs a list of layers, and {kind_of(model)} has none; leave it out")
    return found


def _mlp_of(model: Any, layer: nn.Module, number: int) -> nn.Module:
    children = dict(layer.named_children())
    name = next((name for name in _NAMES if name in children), None)
    if name is None:
        raise ConfigError(
            f"{_SETTING}: layer {number} of {kind_of(model)} has no MLP by the name of {' or '.join(_NAMES)}, only "
            f"{', '.join(children)}; leave it out for this model"
        )
    module = children[name]
    where = f"{_SETTING}: {name} of layer {number} of {kind_of(model)}, a {type(module).__name__},"
    routing = [inner for inner, _ in module.named_modules() if "expert" in inner or "router" in inner]
    if routing:
        raise ConfigError(
            f"{where} routes tokens to experts ({routing[0]}), whose choices are counted over all tokens of a "
            "micro-batch; leave it out for a mixture of experts"
        )
    needed = [
        one.name
        for one in signature(module.forward).parameters.values()
        if one.default is Parameter.empty and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    if len(needed) != 1:
        raise ConfigError(
            f"{where} takes {', '.join(needed) or 'no argument'}, not the hidden states alone; leave it out for "
            "this model"
        )
    return module


# ------------------------------------------------------------ the pass over tiles


def _with_gradient(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the input have a gradient where the module's parameters have one.

    ZeRO-3 takes the gradients of a module that it gathers whole when that of its input is there. Below the first
    trained parameter no input has one, and the gradients would be taken before they were made.
    """
    if not (torch.is_grad_enabled() and given and isinstance(given[0], Tensor)) or given[0].requires_grad:
        return None
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return None
    return (given[0].detach().requires_grad_(), *given[1:])


def _forward(
    tiles: _Tiles, module: nn.Module, whole: Callable[..., Any], hidden: Tensor, *rest: Any, **named: Any
) -> Any:
    """The module's forward pass; `whole` is the one that it had."""
    if tiles.tokens is None or hidden.shape[:-1].numel() <= tiles.tokens:
        return whole(hidden, *rest, **named)
    if rest or named:
        raise CapabilityError(
            f"{type(module).__name__} is given more than hidden states, so it cannot run over tiles of them; leave "
            "max_tokens_per_mlp_tile out for this model"
        )
    call = _Call(run=whole, tokens=tiles.tokens, draws=_draws(module))
    flat = _Tiled.apply(hidden.flatten(0, -2), call, *module.parameters())
    return flat.unflatten(0, hidden.shape[:-1])  # type: ignore[union-attr]


def _draws(module: nn.Module) -> bool:
    """Whether the module draws random numbers now."""
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in module.modules())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """One call of an MLP."""

    run: Callable[[Tensor], Tensor]
    """[1, tokens, hidden] to [1, tokens, out]."""
    tokens: int
    draws: bool

    def over(self, hidden: Tensor) -> Sequence[slice]:
        """The tiles; the last one may be shorter."""
        return [slice(at, at + self.tokens) for at in range(0, len(hidden), self.tokens)]


class _Tiled(torch.autograd.Function):
    """[tokens, hidden] to [tokens, out], a tile at a time; keeps nothing but its input.

    The parameters are arguments, so that autograd knows whose gradients come, and are used where the module has
    them: under ZeRO-3 they are whole while the module runs, in the backward pass, too.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Float[Tensor, "tokens hidden"], call: _Call, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.parameters = call, parameters
        ctx.random = _random_state(hidden.device) if call.draws else None
        ctx.save_for_backward(hidden)
        output = None
        for part in call.over(hidden):
            done = call.run(hidden[part][None])[0]
            if output is None:
                output = done.new_empty(len(hidden), *done.shape[1:])
            output[part] = done
        return output if output is not None else hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        (hidden,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        trained = [one for one, wanted in zip(ctx.parameters, needed, strict=True) if wanted]
        sums: list[Tensor | None] = [None] * len(trained)
        to_hidden = torch.empty_like(hidden)
        with _with_random_state(ctx.random, hidden.device):
            for part in call.over(hidden):
                tile = hidden[part].detach().requires_grad_()
                with torch.enable_grad():
                    output = call.run(tile[None])[0]
                found = torch.autograd.grad(output, (tile, *trained), grads[0][part], allow_unused=True)
                del output
                to_hidden[part] = found[0]
                sums = [_added(total, one) for total, one in zip(sums, found[1:], strict=True)]
        narrow = iter(None if one is None else one.to(own.dtype) for one, own in zip(sums, trained, strict=True))
        return (
            to_hidden if ctx.needs_input_grad[0] else None,
            None,
            *(next(narrow) if wanted else None for wanted in needed),
        )


def _added(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """The sum in float32 or better, written over `total`."""
    if total is None or one is None:
        return total if one is None else full_precision(one)
    return total.add_(one)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _with_random_state(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """A context that draws the random numbers of the forward pass again, and leaves those of the caller alone."""
    if state is None:
        yield
        return
    host, own = state
    with torch.random.fork_rng(devices=[] if own is None else [device]):
        torch.set_rng_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own, device)
        yield
