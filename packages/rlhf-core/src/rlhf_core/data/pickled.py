"""Pickles of tensors out of band: as arrays that another process reads where they are, not as files in a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor


def reduced(value: Any, protocol: Any) -> tuple[Any, ...]:
    """What `__reduce_ex__` of a dataclass with tensors, and mappings of tensors, returns.

    With protocol 5 each tensor in host memory is one buffer out of band, of its own bytes alone also where it is a
    view. The tensors that come out are copies, which may be written.
    """
    if protocol < 5:
        return object.__reduce_ex__(value, protocol)  # type: ignore[return-value]
    state = {item.name: _each(_packed, getattr(value, item.name)) for item in fields(value)}
    return _restored, (type(value), state)


def _restored(cls: type[Any], state: Mapping[str, Any]) -> Any:
    return cls(**{name: _each(_unpacked, value) for name, value in state.items()})


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: convert(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return convert(value)


class _Bytes:
    """A tensor as bytes."""

    __slots__ = ("dtype", "memory", "shape")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], memory: Any) -> None:
        self.dtype, self.shape, self.memory = dtype, shape, memory

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bytes, (self.dtype, self.shape, self.memory)


def _packed(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    if not plain or value.requires_grad:
        return value
    flat = value.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one number that was cut out of a matrix, which counts as contiguous
        flat = flat.new_empty(flat.shape).copy_(flat)
    memory: Any = flat.view(torch.uint8).numpy()
    return _Bytes(value.dtype, tuple(value.shape), pickle.PickleBuffer(memory))


def _unpacked(value: Any) -> Any:
    if not isinstance(value, _Bytes):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(value.memory, dtype=np.uint8)
    return tensor
