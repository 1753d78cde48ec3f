"""Letting a Transformers model run packed rows, with the fastest kernel that gives the right numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhf_core.errors import CapabilityError
from rlhf_core.model.attention.kernels import SEGMENT_ATTENTION, Kernel, kernels_for
from rlhf_core.model.attention.packed import MaskWatch, is_packing, register, watching_masks
from rlhf_core.model.attention.segments import AttentionTerms, sdpa_segments
from rlhf_core.model.heads import text_config
from rlhf_core.model.packing import Layout, Segment


def enable_packing(model: Any, watch: MaskWatch, fault: Callable[[], str]) -> str:
    """Let `model_outputs` run this model on packed rows; returns why not, or nothing if so.

    Args:
        model: a Transformers model; left as it was where packing is not for it.
        watch: what `watch_attention` saw of it.
        fault: what is wrong with the outputs of packed rows; empty if nothing is.
    """
    if reason := _chosen_attention(model) or watch.unlike:
        return reason
    before = model.config._attn_implementation
    weight = model.get_input_embeddings().weight
    for kernel in kernels_for(weight.device, weight.dtype, watch.head_dims):
        model.set_attn_implementation(register(kernel))
        if not (reason := _kernel_fault(model, kernel, watch) or fault()):
            return ""
    model.set_attn_implementation(before)
    return reason


def assume_packing(model: Any) -> bool:
    """Let the model run packed rows as far as its class says that it can, without a trial of its numbers.

    For models without numbers; whether they do is what `enable_packing` finds out.
    """
    if _unfit(model) or _chosen_attention(model):
        return False
    before, name = model.config._attn_implementation, register("sdpa")
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        model.set_attn_implementation(before)
    return is_packing(model)


def watch_attention(model: Any, run_padded: Callable[[], object]) -> MaskWatch:
    """What each layer's attention is told, and what is in its mask, while a few padded rows run.

    `unlike` of the result says why packed rows are not for the model, if that can be seen already.
    """
    if reason := _unfit(model):
        return MaskWatch(unlike=reason)
    before, name = model.config._attn_implementation, register("sdpa")
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            return MaskWatch(unlike="its code takes no other attention")
        with watching_masks() as watch:
            run_padded()
    finally:
        model.set_attn_implementation(before)
    if not watch.head_dims:
        watch.unlike = "its attention is code of its own"
    return watch


def _unfit(model: Any) -> str:
    """Why there is no use in trying."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return "it is no Transformers model"
    if getattr(model, "_is_stateful", False):
        return "it carries a state along the sequence"
    if getattr(text_config(model), "is_encoder_decoder", False):
        return "it has an encoder"
    if not getattr(model, "_supports_attention_backend", False):
        return "its code takes no other attention"
    return ""


def _chosen_attention(model: Any) -> str:
    """Why its attention stays what it is; a model that `sdpa` cannot compute has `eager` without a choice."""
    attention = model.config._attn_implementation
    if attention == "sdpa" or (attention == "eager" and not getattr(model, "_supports_sdpa", True)):
        return ""
    return f"its attention was chosen to be {attention!r}"


_SHORT = Layout(
    segments=(
        Segment(start=0, stop=9),
        Segment(start=9, stop=15, prompt_start=0, prompt_stop=9),
        Segment(start=15, stop=17, prompt_start=0, prompt_stop=9),
        Segment(start=17, stop=29),
    )
)


def _kernel_fault(model: Any, kernel: Kernel, watch: MaskWatch) -> str:
    """What is wrong with the kernel, on a few random states, under a window that they pass and the model's terms.

    A model's window has thousands of tokens; the rows of a trial never reach past it.
    """
    if kernel == "sdpa":
        return ""
    weight = model.get_input_embeddings().weight
    random = torch.Generator().manual_seed(0)
    width = max(watch.head_dims)
    states = [torch.randn(1, 2, 29, width, generator=random).to(weight.device, weight.dtype) for _ in range(3)]
    sinks = torch.tensor([0.5, -0.5], device=weight.device, dtype=weight.dtype) if watch.sinks else None
    terms = AttentionTerms(window=4 if watch.windows else None, soft_cap=watch.soft_cap, sinks=sinks)
    layout = Layout(segments=_SHORT.segments)
    with torch.no_grad():
        try:
            found = SEGMENT_ATTENTION[kernel](states[0], states[1], states[2], layout, terms)
        except (RuntimeError, ValueError, TypeError, ImportError, CapabilityError) as error:
            return f"the kernel {kernel!r} fails: {error}"
        query, key, value = (state.double() for state in states)
        expected = sdpa_segments(query, key, value, layout, _double(terms))
    gap = float((found.double() - expected).abs().max())
    tolerance = 1e-2 if weight.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return "" if gap <= tolerance * 10 else f"the kernel {kernel!r} is off by {gap:.2g}"


def _double(terms: AttentionTerms) -> AttentionTerms:
    sinks = None if terms.sinks is None else terms.sinks.double()
    return AttentionTerms(scale=terms.scale, window=terms.window, soft_cap=terms.soft_cap, sinks=sinks)


def disable_packing(model: Any) -> None:
    """Give the model back the attention it has without a choice, if its rows run packed."""
    if is_packing(model):
        model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")


@contextlib.contextmanager
def with_attention(model: Any, name: str) -> Iterator[None]:
    """The model with another of Transformers' attentions; as it is, if it cannot have that one."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before in (None, name) or not hasattr(model, "set_attn_implementation"):
        yield
        return
    with contextlib.suppress(ValueError, ImportError):
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
