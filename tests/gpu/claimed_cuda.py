"""Tensors with real numbers on a CPU that claim to be on a GPU: torch's own rules about devices hold for them.

Each operation runs twice: on fake CUDA tensors, which says on which device the results are and raises
FakeTensorDeviceMismatchError where a CPU's and a GPU's tensors meet, and on the numbers. So code that looks at its
numbers (lengths of rows, which tokens count) runs as it would on a GPU. Forward only: torch's backward pass asks
the driver for a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_BY_NUMBERS = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)
"""What fake tensors raise where the shape of the result depends on numbers."""


class Claimed(Tensor):
    """A tensor whose numbers are `inner`'s, on a GPU as far as torch can tell."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Claimed:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        """The numbers; torch's own refuses subclasses."""
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} met a tensor that claims to be on a GPU outside of `claiming_cuda`")


class _Claiming(TorchDispatchMode):
    """Runs every operation; counts those that had a tensor on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += any(isinstance(leaf, Claimed) for leaf in tree_leaves((args, kwargs)))
        devices = _devices(func, args, kwargs)
        with unset_fake_temporarily():
            plain = tree_map(lambda leaf: leaf.inner if isinstance(leaf, Claimed) else leaf, (args, kwargs))
            real = tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, plain)
            found = func(*real[0], **real[1])
        if (written := _written(func, args, kwargs)) is not None:
            return written
        places = iter(devices)
        return tree_map(lambda leaf: _claimed(leaf, next(places)) if isinstance(leaf, Tensor) else leaf, found)


def _claimed(tensor: Tensor, device: torch.device) -> Tensor:
    return Claimed(tensor) if device.type == "cuda" else tensor


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that an operation writes into and gives back."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs.get(argument.name)
    return None


def _devices(func: Any, args: Any, kwargs: Any) -> list[torch.device]:
    """Where the results are, as fake tensors say; where they cannot, with the first tensor among equals."""

    def faked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        size, stride = leaf.size(), leaf.stride()
        return torch.empty_strided(size, stride, dtype=leaf.dtype, device=leaf.device)

    try:
        given = tree_map(faked, (args, kwargs))
        found = func(*given[0], **given[1])
    except _BY_NUMBERS:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A GPU's tensor may be picked from by a CPU's indices, and numbers without dimensions go anywhere.
        device = given[0].device
        others = [one.device for one in given if one.dim() and one.device != device]
        if others and func.overloadpacket is not torch.ops.aten.index:
            raise FakeTensorDeviceMismatchError(func, device, others[0]) from None
        return [device] * 8
    return [leaf.device for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


@contextmanager
def claiming_cuda() -> Iterator[_Claiming]:
    """A context in which `to("cuda")` and `device="cuda"` give tensors that claim to be there."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Claiming() as claiming:
        yield claiming


def on_cuda(model: nn.Module) -> nn.Module:
    """Move a model: its parameters and buffers claim to be on the GPU, shared ones stay shared."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: Claimed(one.detach()) for name, one in held.items() if one is not None})  # type: ignore
    return model
