"""Memory of a training rank: its parts now, and the peak of each phase."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rlhf_core import MemoryReport
from torch import Tensor, nn


class PhaseMemory:
    """Peak memory by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peaks: dict[str, int] = {}
        self._after_offload: int | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose peak memory counts for the phase `name`."""
        self._reset()
        try:
            yield
        finally:
            self.peaks[name] = max(self._peak(), self.peaks.get(name, 0))

    def note_offloaded(self) -> None:
        """Note what stayed on the accelerator; call it at the end of an offload."""
        self._after_offload = self._in_use()

    def _in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def report(self, engine: Any, module: nn.Module, average: Any) -> MemoryReport:
        """Count the tensors of an engine (`engine` is DeepSpeed's, or None for a plain frozen model)."""
        optimizer = getattr(engine, "optimizer", None)
        return MemoryReport(
            parameters=_bytes(_weights(module)),
            gradients=_bytes(_gradients(module, optimizer)),
            optimizer=_bytes(_optimizer_state(module, optimizer, getattr(engine, "basic_optimizer", None))),
            average=0 if average is None else average.bytes,
            resident=_status("VmRSS"),
            peaks=dict(self.peaks),
            device=self._in_use(),
            after_offload=self._after_offload,
        )

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Linux lowers the high-water mark to the present use; elsewhere the peak is that of the process.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _status("VmHWM")


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            yield shard.data
        yield parameter.data


def _gradients(module: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    yield from _tensors(getattr(optimizer, "averaged_gradients", None))
    flat = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None)
    yield from _tensors(flat)


def _optimizer_state(module: nn.Module, optimizer: Any, basic: Any) -> Iterator[Tensor]:
    weights = {tensor.untyped_storage().data_ptr() for tensor in _weights(module)}
    for state in getattr(basic, "state", {}).values():
        yield from _tensors(state)
    for group in getattr(basic, "param_groups", ()):  # ZeRO puts its master weights there
        for master in group["params"]:
            if master.data.untyped_storage().data_ptr() not in weights:
                yield master.data


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; those that are the same piece of memory count once."""
    sizes: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        sizes[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
