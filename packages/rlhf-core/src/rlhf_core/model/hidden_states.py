"""The backbone's run over a batch: states of the last layer, and where each token of the batch has its own.

Where packing is enabled the rows run unpadded and prompts that rows share run once; otherwise they run padded. Rows
with images, and all rows of their micro-batch, run padded: the model computes positions of its own from the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.model.attention.packed import has_dropout, is_packing
from rlhf_core.model.expert_routing import Routers, has_routers, to_tokens
from rlhf_core.model.heads import backbone
from rlhf_core.model.packing import PackedRows, pack
from rlhf_core.model.vision import Vision, image_arguments, sees_in_every_pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HiddenStates:
    """States of the last layer, and where each token of the batch has its own."""

    states: Float[Tensor, "tokens hidden"]
    places: Int[Tensor, "rows length"]
    router_logits: Any = None
    """Per layer, of a mixture-of-experts model that was asked for them."""
    counted: Tensor | None = None
    """[rows, length] tokens the router logits belong to; None if to all."""

    def at(self, mask: Bool[Tensor, "rows length"]) -> Float[Tensor, "picked hidden"]:
        """States of the True positions, row by row."""
        return self.states.index_select(0, self.places[mask])

    def before(self, mask: Bool[Tensor, "rows length"]) -> Float[Tensor, "picked hidden"]:
        """States of the tokens that precede the True positions."""
        return self.states.index_select(0, self.places[:, :-1][mask[:, 1:]])


def hidden_states(
    model: nn.Module, batch: Batch, *, routed: bool = False, record: bool = False, replay: bool = False
) -> HiddenStates:
    """States of the last layer, packed if the model can; `record` and `replay` concern its routers."""
    padded = bool(batch.images) or sees_in_every_pass(model) or not is_packing(model)
    packed = None if padded else pack(batch, share_prompts=not has_dropout(model))
    if record or has_routers(model) or (replay and "routed_experts" in batch):
        places = _padded_places(batch) if packed is None else packed.places
        count = batch.token_ids.numel() if packed is None else packed.token_ids.numel()
        wanted = None
        if replay and "routed_experts" in batch:
            wanted = to_tokens(batch["routed_experts"], places, batch.attention_mask, count)
        Routers.of(model).begin(record=record, wanted=wanted)
    if packed is not None:
        return packed_states(model, packed, routed=routed)
    return padded_states(model, batch, routed=routed)


def _padded_places(batch: Batch) -> Int[Tensor, "rows length"]:
    return torch.arange(batch.token_ids.numel(), device=batch.token_ids.device).view(batch.token_ids.shape)


def padded_states(model: Any, batch: Batch, *, routed: bool = False) -> HiddenStates:
    """Run the backbone on the padded rows, with their images."""
    vision = Vision.of(model)
    shown = batch if vision is None or not sees_in_every_pass(model) else vision.filled(batch)
    body = backbone(model)
    # The backbone, not the model: its head would make logits of every token. ZeRO-3's hooks sit on every
    # submodule, so this gathers what it needs there too.
    outputs = body(
        input_ids=shown.token_ids,
        attention_mask=shown.attention_mask.long(),
        use_cache=False,
        **image_arguments(model, body, shown),
        **({"output_router_logits": True} if routed else {}),
    )
    states = outputs.last_hidden_state
    if shown is not batch:
        # Zero times the states of the row that was added, so that its image encoder has a backward pass, too.
        own, added = states.split([batch.rows, shown.rows - batch.rows])
        states = own[:, : batch.token_ids.shape[1]] + 0.0 * added.sum()
    return HiddenStates(
        states=states.flatten(0, 1),
        places=_padded_places(batch),
        router_logits=outputs.router_logits if routed else None,
        counted=_own_tokens(batch, shown),
    )


def _own_tokens(batch: Batch, shown: Batch) -> Bool[Tensor, "rows length"]:
    """The tokens of a batch among those that were run."""
    counted = shown.attention_mask.clone()
    counted[batch.rows :] = False
    return counted


def packed_states(model: Any, packed: PackedRows, *, routed: bool = False) -> HiddenStates:
    """Run the backbone on packed rows."""
    outputs = backbone(model)(
        input_ids=packed.token_ids,
        # A mask of four dimensions is passed on as it is: no [tokens, tokens] mask is built.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.token_ids.device),
        position_ids=packed.position_ids,
        use_cache=False,
        layout=packed.layout,
        **({"output_router_logits": True} if routed else {}),
    )
    return HiddenStates(
        states=outputs.last_hidden_state[0],
        places=packed.places,
        router_logits=outputs.router_logits if routed else None,
    )
