"""The memory of keys and values on a CPU, given back while an engine sleeps; on a GPU vLLM does so itself."""

from __future__ import annotations

from typing import Any

import torch

_LARGE = 64 << 20
"""The system hands out pieces of this size and more as fresh pages, which are zero until they are written to."""


def release(runner: Any) -> None:
    """Give the memory back; the tensors stay, without content."""
    if getattr(runner, "rlhf_released", None):
        return
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(runner.kv_caches)
    }
    runner.rlhf_released = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in runner.rlhf_released:
        storage.resize_(0)


def restore(runner: Any) -> None:
    """Take the memory again. All is zero: attention may read what no token has written, and discards it."""
    for storage, size in getattr(runner, "rlhf_released", None) or ():
        storage.resize_(size)
        if size < _LARGE:
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
    runner.rlhf_released = None


def _tensors(caches: Any) -> list[torch.Tensor]:
    """The tensors of all layers; a layer of some kinds has several."""
    return [t for cache in caches for t in ([cache] if isinstance(cache, torch.Tensor) else _tensors(cache))]
