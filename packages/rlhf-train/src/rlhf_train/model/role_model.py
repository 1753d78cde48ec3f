"""The module that DeepSpeed wraps: one forward call per micro-batch, the same collectives on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rlhf_core import Batch, Heads, LinearHead, OwnHead, Trial, model_outputs
from torch import Tensor, nn

ModelTrial = Callable[[nn.Module], Trial]
"""Tries a model where its parameters can be used: inside the root's forward pass."""

_ALL = 1 << 30
"""A chunk that holds all tokens of a micro-batch."""


class RoleModel(nn.Module):
    """A Transformers model whose `forward` is `rlhf_core.model_outputs`.

    ZeRO counts micro-batches, resets its prefetch trace and finds the start of a backward pass by the hooks of the
    *root* module and its outputs, so whatever runs the backbone and the head has to happen inside the root's
    forward.

    Under ZeRO-3 (`sharded`) every call of a module gathers its parameters. The head runs once per chunk of tokens,
    and ranks have different numbers of chunks: their collectives would not match and the ranks would wait for each
    other for ever. So the root itself gathers a linear head once per micro-batch, and the head is applied without
    its own hooks; a head of another kind runs over all tokens at once.
    """

    def __init__(self, model: Any, *, sharded: bool, replay: bool = False) -> None:
        super().__init__()
        self.model = model
        self.trial = Trial(packing=False)
        """What the trial of the model found; before it, that nothing is known."""
        self.next_trial: ModelTrial | None = None
        """Run by a forward pass without a batch. No argument of it: DeepSpeed sends the arguments of the first pass
        to all tensor-parallel ranks, pickled, to compare them."""
        self.held_elements = 0
        """Elements of sharded parameters that are gathered all along a pass: those of a linear head."""
        self._replay, self._sharded = replay, sharded
        head = model.get_output_embeddings()
        self._width = head.in_features if isinstance(head, nn.Linear) else None
        if sharded and isinstance(head, nn.Linear):
            import deepspeed

            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(self, parameter)
                self.held_elements += getattr(parameter, "ds_numel", parameter.numel())
            gathered = LinearHead(head)
            model.get_output_embeddings = lambda: gathered

    def forward(self, *, batch: Batch | None = None, fields: Sequence[str] = ()) -> dict[str, Tensor]:
        """The `fields` of ModelOutputs for the rows of `batch`. A dict, because ZeRO looks for tensors in it.

        Without a batch, the trial that `next_trial` holds.
        """
        if batch is None:
            if self.next_trial is not None:
                self.trial, self.next_trial = self.next_trial(self.model), None
            return {}
        own = Heads.of(self.model).own_logits
        chunk = _ALL if self._sharded and own else None
        outputs = model_outputs(self.model, batch, fields, replay=self._replay, chunk=chunk)
        found = {name: value for name in fields if (value := getattr(outputs, name)) is not None}
        if torch.is_grad_enabled() and not bool(batch.response_mask[:, 1:].any()):
            self._touch_head(found)
        return found

    @property
    def config(self) -> Any:
        """The model's; DeepSpeed looks there for what tensor parallelism must know of its heads."""
        return self.model.config

    def _touch_head(self, found: dict[str, Tensor]) -> None:
        """Give the head a gradient of zero where no token needs it: the other ranks reduce theirs and wait."""
        for name in ("log_probs", "entropy", "candidate_log_probs"):
            if name in found and self._width is not None:
                nothing = torch.zeros(1, self._width, dtype=self.model.dtype, device=found[name].device)
                own = Heads.of(self.model).own_logits
                head = OwnHead(self.model) if own else self.model.get_output_embeddings()
                found[name] = found[name] + 0.0 * head(nothing).sum()
                return


def release_engine(engine: Any, module: nn.Module) -> None:
    """Destroy DeepSpeed's engine and free what it holds; neither can be used any more.

    Under ZeRO-3 DeepSpeed keeps process-wide references to every root module, hence to its parameters and, through
    their hooks, to the optimizer. So these are emptied by hand.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    engine.destroy()
    FWD_MODULE_STACK[:] = [entry for entry in FWD_MODULE_STACK if entry is not module]
    for parameter in module.parameters():
        shard: Any = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            shard.data = torch.empty(0, dtype=shard.dtype)
            parameter.data = torch.empty(0, dtype=parameter.dtype)
    for optimizer in (engine.optimizer, engine.basic_optimizer):
        if optimizer is not None:
            vars(optimizer).clear()
    engine.optimizer = engine.basic_optimizer = None
