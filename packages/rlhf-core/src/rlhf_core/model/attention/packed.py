"""Attention over packed rows, in the form in which Transformers takes it: a model's code is not touched."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from rlhf_core.errors import CapabilityError
from rlhf_core.model.attention.kernels import SEGMENT_ATTENTION, Kernel
from rlhf_core.model.attention.segments import AttentionTerms, masked_attention, sdpa_segments
from rlhf_core.model.packing import Layout

NAME = "rlhf_packed"
"""Under which Transformers knows the attention; the kernel's name follows where it is not `sdpa`."""

_HARMLESS = frozenset(
    {
        *("position_ids", "cache_position", "is_causal", "use_cache", "return_dict", "whole_tokens"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
"""Arguments of an attention call that change nothing in a packed row; switches that are off are harmless too."""


class HeadExchange(Protocol):
    """Sequence parallelism: ranks hold slices of a packed row, and trade them for shares of the heads."""

    def to_heads(self, states: Tensor) -> Tensor:
        """[1, heads, slice of tokens, head_dim] to [1, share of heads, tokens, head_dim]."""
        ...

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, tokens, share of heads, head_dim] to [1, slice of tokens, heads, head_dim]."""
        ...

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads] to this rank's share of them."""
        ...


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 key_heads tokens head_dim"],
    value: Float[Tensor, "1 key_heads tokens head_dim"],
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    exchange: HeadExchange | None = None,
    kernel: Kernel = "sdpa",
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 tokens heads head_dim"], None]:
    """Transformers' attention signature. Without a `layout` it is ordinary attention under the mask.

    The layer's window, soft cap and sinks are those of the call (`sliding_window`, `softcap`, `s_aux`). With an
    `exchange` the arguments hold a slice of the row's tokens, and so does the result. Attention dropout is `sdpa`'s
    alone, whatever the `kernel`.

    Raises:
        CapabilityError: the call has a packed row and a term that is not known here.
    """
    terms = AttentionTerms(
        scale=kwargs.pop("scaling", None),
        window=kwargs.pop("sliding_window", None),
        soft_cap=kwargs.pop("softcap", None),
        sinks=kwargs.pop("s_aux", None),
    )
    dropout = kwargs.pop("dropout", 0.0)
    dropout = dropout if module.training else 0.0
    if layout is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise CapabilityError(f"{type(module).__name__} is not given the layout of packed rows")
        if _WATCHES:
            _WATCHES[-1].note(query, attention_mask, terms)
        return _ordinary(module, query, key, value, attention_mask, terms, {"dropout": dropout, **kwargs})
    _check_known(module, kwargs)
    if exchange is not None:
        query, key, value = exchange.to_heads(query), exchange.to_heads(key), exchange.to_heads(value)
        if terms.sinks is not None:
            terms = AttentionTerms(
                scale=terms.scale,
                window=terms.window,
                soft_cap=terms.soft_cap,
                sinks=exchange.own_heads(terms.sinks),
            )
    if dropout:
        output = sdpa_segments(query, key, value, layout, terms, dropout=dropout)
    else:
        output = SEGMENT_ATTENTION[kernel](query, key, value, layout, terms)
    return (output if exchange is None else exchange.to_tokens(output)).contiguous(), None


def _ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    terms: AttentionTerms,
    rest: dict[str, Any],
) -> tuple[Tensor, None]:
    """Transformers' own `sdpa`, which ignores soft caps and sinks, and so only where there are none."""
    if terms.soft_cap is None and terms.sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=terms.scale, sliding_window=terms.window, **rest
        )
    if mask is None:
        # Masks are left out where they would say no more than "causal".
        mask = Layout(segments=()).mask(query.shape[2], key.shape[2], query, window=terms.window)
    output = masked_attention(query, key, value, mask, terms, dropout=rest["dropout"])
    return output.transpose(1, 2).contiguous(), None


def _check_known(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what would change the scores in a way that no kernel here knows."""
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise CapabilityError(f"{type(module).__name__} attends to later tokens, too")
    unknown = sorted(
        name for name, value in kwargs.items() if name not in _HARMLESS and value is not None and value is not False
    )
    if unknown:
        raise CapabilityError(f"the attention of {type(module).__name__} uses {', '.join(unknown)}")


# ------------------------------------------------------------ what Transformers knows


def register(kernel: Kernel) -> str:
    """Make the attention known to Transformers; returns its name there."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = NAME if kernel == "sdpa" else f"{NAME}_{kernel}"
    AttentionInterface.register(name, partial(packed_attention, kernel=kernel))
    AttentionMaskInterface.register(name, _mask)
    return name


def is_packing(model: nn.Module) -> bool:
    """True after `enable_packing` found that the model can run packed rows."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return isinstance(name, str) and name.startswith(NAME)


def has_dropout(model: nn.Module) -> bool:
    """True if the forward pass draws random numbers now: then each row must draw its own."""
    if not model.training:
        return False
    config: Any = copy.copy(getattr(model, "config", None))
    return getattr(config, "attention_dropout", 0.0) > 0 or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )


# ------------------------------------------------------------ what the layers' masks hold


@dataclass(kw_only=True, slots=True)
class MaskWatch:
    """Compares the masks that a model made with the windows that it names in the calls of its attention.

    A packed row has no mask: what is in the mask and not in the call would be lost, and the few tokens of a trial
    might not show it. So layer by layer the sizes are compared, whatever they are.
    """

    sizes: dict[int, int | None] = field(default_factory=dict)
    """Window or chunk of each mask, by the place of its storage."""
    masks: list[Tensor] = field(default_factory=list)
    """The masks, so that no other takes the place of one."""
    head_dims: set[int] = field(default_factory=set)
    windows: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    unlike: str = ""
    """What is in the mask of a layer and not in its call; empty if nothing is."""

    def note(self, query: Tensor, mask: Tensor | None, terms: AttentionTerms) -> None:
        """A layer attends under this mask."""
        self.head_dims.add(query.shape[-1])
        self.windows |= terms.window is not None
        self.soft_cap = terms.soft_cap or self.soft_cap
        self.sinks |= terms.sinks is not None
        place = None if mask is None else mask.untyped_storage().data_ptr()
        if place not in self.sizes:
            self.unlike = self.unlike or "a layer's mask is not one that Transformers' mask functions made"
        elif (size := self.sizes[place]) != terms.window:
            self.unlike = self.unlike or (
                f"a layer's mask reaches back {size or 'all'} tokens, its attention is told {terms.window or 'all'}"
            )


_WATCHES: list[MaskWatch] = []


@contextlib.contextmanager
def watching_masks() -> Iterator[MaskWatch]:
    """Watch the masks of the forward passes inside, of a model that has our attention."""
    _WATCHES.append(MaskWatch())
    try:
        yield _WATCHES[-1]
    finally:
        _WATCHES.pop()


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask for `sdpa`; while it is watched it is made even where it says no more than "causal"."""
    from transformers.masking_utils import sdpa_mask

    if not _WATCHES:
        return sdpa_mask(*args, **kwargs)
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    if mask is not None:
        watch = _WATCHES[-1]
        watch.masks.append(mask)
        watch.sizes[mask.untyped_storage().data_ptr()] = kwargs.get("local_size")
    return mask
