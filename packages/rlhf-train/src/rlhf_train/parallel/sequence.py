"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509) for packed rows.

    tokens 0-3 on rank 0  --all-to-all-->  all tokens, heads 0-1 on rank 0  --all-to-all-->  tokens 0-3 on rank 0
    tokens 4-7 on rank 1                   all tokens, heads 2-3 on rank 1                   tokens 4-7 on rank 1

The ranks of a group run the same packed row, each a slice of its tokens: activations per rank shrink by the size of
the group. Attention sees all tokens of its share of the heads. The hidden states are put together at the end, and
the head, which runs on response tokens only and in chunks, is computed by every rank of the group.

Scaling: each rank of a group of s computes the same loss, so gradients summed over all W ranks are s times too
large. The engine's loss weight is summed over all ranks too, hence also s times too large, and this cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf_core import Batch, ConfigError, Layout, Segment, backbone, concatenate, is_packing
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_train.parallel.ranks import TrainingRanks


class SequenceGroup:
    """The ranks that share rows: `size` consecutive ones."""

    def __init__(self, ranks: TrainingRanks, *, size: int, setting: str = "sequence_parallel_size") -> None:
        if ranks.size % size:
            raise ConfigError(f"engine: {setting} {size} does not divide the {ranks.size} training ranks")
        self.size = size
        self.index = ranks.info.rank % size
        self.group = self._make_group(ranks)
        on_host = torch.distributed.get_backend(self.group) == "gloo"
        self._control_group = self.group if on_host else self._make_group(ranks, backend="gloo")

    def _make_group(self, ranks: TrainingRanks, **options: Any) -> Any:
        """The process group of this rank's group; every rank takes part in making every one."""
        starts = range(0, ranks.size, self.size)
        groups = [torch.distributed.new_group(list(range(at, at + self.size)), **options) for at in starts]
        return groups[ranks.info.rank // self.size]

    def share(self, batch: Batch) -> tuple[Batch, slice]:
        """The rows of all ranks of the group as one batch, and where this rank's own rows are in it."""
        batches: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(batches, batch.to("cpu"), group=self._control_group)
        start = sum(one.rows for one in batches[: self.index])
        return concatenate(batches), slice(start, start + batch.rows)

    def attach(self, model: Any) -> None:
        """Make the backbone run slices of packed rows.

        Raises:
            ConfigError: the model cannot run packed rows, or its heads cannot be dealt to the ranks.
        """
        config = model.config.get_text_config()
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        if not is_packing(model):
            raise ConfigError(
                f"engine: sequence_parallel_size needs packed rows, and {type(model).__name__} with "
                f"attention {config._attn_implementation!r} cannot run them; use a plain attention model with sdpa"
            )
        if heads % self.size or (key_heads % self.size and self.size % key_heads):
            raise ConfigError(
                f"engine: sequence_parallel_size {self.size} does not fit {heads} attention and "
                f"{key_heads} key/value heads; it must divide the former, and divide or be a multiple of the latter"
            )
        body = backbone(model)
        body.register_forward_pre_hook(self._before, with_kwargs=True)
        body.register_forward_hook(self._after, with_kwargs=True)

    # ------------------------------------------------------------ the backbone's hooks

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs["input_ids"].shape[1]
        missing = -tokens % self.size
        layout: Layout = kwargs["layout"]
        if missing:
            # Padding tokens attend to themselves and are cut off again.
            layout = Layout(segments=(*layout.segments, Segment(start=tokens, stop=tokens + missing)))
        width = (tokens + missing) // self.size
        own = slice(self.index * width, (self.index + 1) * width)
        cut = {name: pad(kwargs[name], (0, missing))[:, own] for name in ("input_ids", "position_ids")}
        return args, {**kwargs, **cut, "layout": layout, "exchange": self, "whole_tokens": tokens}

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        whole = _Gather.apply(outputs.last_hidden_state, self)
        outputs.last_hidden_state = whole[:, : kwargs["whole_tokens"]]
        return outputs

    # ------------------------------------------------------------ the attention's exchange

    def to_heads(self, states: Tensor) -> Tensor:
        """[1, heads, slice of tokens, dim] to [1, share of heads, all tokens, dim]."""
        heads = states.shape[1]
        if heads < self.size:  # fewer key heads than ranks: several ranks get the same one
            states = states.repeat_interleave(self.size // heads, dim=1)
        parts = states[0].unflatten(0, (self.size, -1))  # ranks, share of heads, slice of tokens, dim
        mine = _AllToAll.apply(parts, self)
        return mine.transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, all tokens, share of heads, dim] to [1, slice of tokens, heads, dim]."""
        parts = states[0].unflatten(0, (self.size, -1))  # ranks, slice of tokens, share of heads, dim
        mine = _AllToAll.apply(parts, self)
        return mine.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads] to this rank's share of them, in the order in which `to_heads` deals heads."""
        return values.unflatten(0, (self.size, -1))[self.index]


class _AllToAll(torch.autograd.Function):
    """An exchange in which part i of this rank's tensor goes to rank i; its derivative is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=group.group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """[1, slice of tokens, hidden] to [1, all tokens, hidden]; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size)]
        torch.distributed.all_gather(parts, own, group=group.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group: SequenceGroup = ctx.group
        parts = grads[0][0].unflatten(0, (group.size, -1)).contiguous()
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=group.group)
        return received.sum(dim=0)[None], None
