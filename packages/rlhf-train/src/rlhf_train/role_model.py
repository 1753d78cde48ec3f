"""The module that DeepSpeed wraps: one forward call per micro-batch, the same collectives on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core import Batch, model_outputs
from torch import Tensor, nn
from torch.nn import functional


class RoleModel(nn.Module):
    """A Transformers model whose `forward` is `rlhf_core.model_outputs`.

    ZeRO counts micro-batches, resets its prefetch trace and finds the start of a backward pass by the hooks of the
    *root* module and its outputs, so whatever runs the backbone and the head has to happen inside the root's
    forward.

    Under ZeRO-3 (`sharded`) every call of a module gathers its parameters. The head runs once per chunk of tokens,
    and ranks have different numbers of chunks: their collectives would not match. So the root itself gathers the
    head once per micro-batch, and the head is applied without its own hooks.
    """

    def __init__(self, model: Any, *, sharded: bool) -> None:
        super().__init__()
        self.model = model
        self._direct_head = sharded and isinstance(model.get_output_embeddings(), nn.Linear)
        if self._direct_head:
            import deepspeed

            for parameter in model.get_output_embeddings().parameters():
                deepspeed.zero.register_external_parameter(self, parameter)

    def forward(self, *, batch: Batch, fields: Sequence[str]) -> dict[str, Tensor]:
        """The `fields` of ModelOutputs for the rows of `batch`. A dict, because ZeRO looks for tensors in it."""
        outputs = model_outputs(self, batch, fields)
        return {name: value for name in fields if (value := getattr(outputs, name)) is not None}

    @property
    def base_model(self) -> nn.Module:
        """The backbone."""
        return self.model.base_model

    @property
    def config(self) -> Any:
        """The Transformers configuration."""
        return self.model.config

    @property
    def score(self) -> nn.Module | None:
        """The scalar head of a critic or reward model."""
        return getattr(self.model, "score", None)

    @property
    def classifier(self) -> nn.Module | None:
        """The scalar head under its other usual name."""
        return getattr(self.model, "classifier", None)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """The language-model head."""
        head = self.model.get_output_embeddings()
        if not self._direct_head:
            return head
        return lambda hidden: functional.linear(hidden, head.weight, head.bias)
