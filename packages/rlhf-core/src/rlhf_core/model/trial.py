"""The trial of a model that was just loaded: our outputs against the model's own forward pass, on a few short rows.

Packed rows, chunked heads and padding are ours; what the model's numbers are is said by its own code, one row at a
time, with Transformers' `eager` attention, which is the definition of each model. What differs is done in a slower
way that does not, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from rlhf_core.errors import CapabilityError, ConfigError
from rlhf_core.model.attention.enable import disable_packing, enable_packing, watch_attention, with_attention
from rlhf_core.model.attention.packed import MaskWatch
from rlhf_core.model.heads import Heads, kind_of
from rlhf_core.model.hidden_states import padded_states
from rlhf_core.model.own_numbers import OwnImageNumbers, OwnNumbers
from rlhf_core.model.tiled_mlp import tiled_mlps, tiles_of
from rlhf_core.model.vision import Vision, sees_in_every_pass

_FAILURES = (
    AttributeError,
    CapabilityError,
    ImportError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model that does not fit raises somewhere inside."""


_TILE = 3
"""Tokens of a tile in the trial."""
_PLAIN = Heads()
_HEADS: dict[str, tuple[Heads, ...]] = {
    "policy": (_PLAIN, Heads(own_logits=True)),
    "reference": (_PLAIN, Heads(own_logits=True)),
    "critic": (_PLAIN,),
    "reward": (_PLAIN, Heads(own_scores=True)),
}
"""The ways of making a role's outputs, the fastest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How a model's outputs are had, as its trial found it."""

    packing: bool
    """Whether rows run unpadded, with the prompts they share run once."""
    declined: str = ""
    """Why rows run padded although packing was asked for; empty where it was not, or they do not."""
    own_head: bool = False
    """Whether logits or scores are made by the model's own code, as its head is not a plain one."""
    images: bool = False
    """Whether rows may have images; these run padded."""
    differences: Mapping[str, float] = field(default_factory=dict)
    """Largest difference from the model's own numbers, of the way taken and of those that were not."""

    @property
    def notice(self) -> str:
        """What whoever runs the model should be told, once; empty if all is as asked for."""
        if self.declined:
            return f"rows run padded, not packed: {self.declined}"
        if self.packing and self.images:
            return (
                "micro-batches with images run padded, not packed: the model computes positions and masks from the "
                "images"
            )
        return ""


def try_model(
    model: nn.Module,
    role: Literal["policy", "critic", "reference", "reward"],
    *,
    packing: bool = True,
    agree: Callable[[bool], bool] = lambda fine: fine,
) -> Trial:
    """Find out how `model_outputs` gives this model's numbers, and settle it for the model.

    It runs about eight short rows forward, and six with images if the model was loaded for these. The ranks of a
    sharded model call it together.

    Args:
        model: a Transformers model on its device, with weights.
        role: `policy` and `reference` are tried for log-probs and entropies, a `critic` for values, `reward` for
            scores.
        packing: whether rows may run unpadded.
        agree: whether all ranks found something fine; asked for each verdict, in the same order on all ranks.

    Raises:
        ConfigError: no way gives the model's own numbers; names the model and the difference.
    """
    training = model.training
    disable_packing(model)
    model.eval()
    try:
        with torch.no_grad():
            trial = _Trial(model, role, agree)
            with tiles_of(model, None):
                found = trial.run(packing)
            trial.check_tiles()
            return replace(found, images=trial.check_images())
    finally:
        model.train(training)


class _Trial:
    def __init__(self, model: Any, role: str, agree: Callable[[bool], bool]) -> None:
        self._model, self._role, self._agree = model, role, agree
        self._differences: dict[str, float] = {}

    def run(self, packing: bool) -> Trial:
        with with_attention(self._model, "eager"):
            try:
                self._own = OwnNumbers(self._model, self._role)
            except CapabilityError as error:
                raise self._refusal(str(error)) from error
            except _FAILURES as error:
                raise self._refusal(f"its own forward pass fails: {type(error).__name__}: {error}") from error
        if not self._agree(not (fault := self._own.not_causal())):
            raise self._refusal(fault or "another rank found that it attends to later tokens")
        watch = self._watch()
        eager = self._settle_padded(watch)
        heads, declined = Heads.of(self._model), ""
        if packing and heads.own_scores:
            declined = "its scores are made by its own forward pass"
        elif packing and sees_in_every_pass(self._model):
            declined = "all ranks run the image encoder in every micro-batch, and rows with images are padded"
        elif packing:
            declined = enable_packing(self._model, watch, lambda: self._fault("packed"))
        if eager and (declined or not packing):
            self._model.set_attn_implementation("eager")
        return Trial(
            packing=packing and not declined,
            declined=declined,
            own_head=heads.own_logits or heads.own_scores,
            differences=self._differences,
        )

    def check_tiles(self) -> None:
        """Refuse tiles of MLPs that do not work on each token by itself: a few tokens at a time tell."""
        if not tiled_mlps(self._model):
            return
        with tiles_of(self._model, _TILE):
            fault = self._fault("tiled")
        if fault:
            raise ConfigError(
                f"{kind_of(self._model)} cannot run its MLPs over tiles: {fault}. Leave max_tokens_per_mlp_tile "
                "out for this model"
            )

    def check_images(self) -> bool:
        """Whether the model was loaded for images; refuse one whose numbers with images would not be its own."""
        vision = Vision.of(self._model)
        if vision is None:
            return False
        fault = ""
        try:
            with with_attention(self._model, "eager"):
                own = OwnImageNumbers(self._model, vision)
                if own.unseen():
                    fault = "its own forward pass says the same of other images"
            gap = own.gap()
            self._differences["images"] = gap.largest
            if not gap.fine:
                fault = f"rows with images differ from the model's own forward pass by {gap}"
            if sees_in_every_pass(self._model) and own.calls_differ():
                fault = (
                    "it runs its image encoder more often for more images, so ranks with different numbers of "
                    "images would wait for each other for ever"
                )
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            fault = f"its forward pass with images fails: {type(error).__name__}: {error}"
        if not self._agree(not fault):
            raise ConfigError(
                f"{kind_of(self._model)} cannot be used for rows with images: "
                f"{fault or 'another rank found a difference'}. Use a model of another family, or rows of text"
            )
        return True

    def _watch(self) -> MaskWatch:
        try:
            return watch_attention(self._model, lambda: padded_states(self._model, self._own.rows))
        except _FAILURES as error:
            return MaskWatch(unlike=f"{type(error).__name__}: {error}")

    def _settle_padded(self, watch: MaskWatch) -> bool:
        """Choose how the outputs of padded rows are made; True if they need `eager` attention."""
        loaded: str = getattr(self._model.config, "_attn_implementation", None) or "eager"
        # Transformers' `sdpa` leaves out what torch's has no argument for; a few tokens might hide that.
        lossy = loaded == "sdpa" and (watch.soft_cap is not None or watch.sinks)
        fault = ""
        for attention in ("eager",) if lossy else dict.fromkeys((loaded, "eager")):
            with with_attention(self._model, attention):
                for heads in _HEADS[self._role]:
                    heads.settle(self._model)
                    if not (found := self._fault("padded")):
                        return attention != loaded
                    fault = fault or found
        raise self._refusal(fault)

    def _fault(self, name: str) -> str:
        """What is wrong with the outputs as they are made now; the same verdict on all ranks."""
        try:
            gap = self._own.gap()
            fault = "" if gap.fine else f"{name} rows differ from the model's own forward pass by {gap}"
            self._differences[name] = gap.largest
        except torch.OutOfMemoryError:
            raise
        except CapabilityError as error:
            fault = str(error)
        except _FAILURES as error:
            fault = f"{type(error).__name__}: {error}"
            if self._role == "critic":
                fault = f"its head gives no value for a single token ({fault})"
        return "" if self._agree(not fault) else fault or "another rank found a difference"

    def _refusal(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{kind_of(self._model)} cannot be used as {self._role}: {fault}. Its numbers here would not be those "
            "of the model; use a model of another family"
        )
