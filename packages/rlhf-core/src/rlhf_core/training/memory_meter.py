"""What a pass of a model takes in memory, and how much there is: measured, on an accelerator and on the host."""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


class MemoryMeter:
    """Measures on one device.

    On CUDA the peak is that of torch's allocator. On the host there is no such account, and the resident memory of
    the process says little: the C library keeps what was freed, so a second pass of the same size shows nothing. So
    tensors are counted as operations make them and until they are freed, which gives the same number every time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def place(self) -> str:
        """A name that is equal for those that share this memory."""
        host = socket.gethostname()
        if self.device.type != "cuda":
            return host
        return f"{host} {torch.cuda.get_device_properties(self.device).uuid}"

    @property
    def size(self) -> int:
        """Bytes of the whole device, in use or not."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[1]
        return min([_meminfo("MemTotal"), *(limit for limit, _ in _cgroups())])

    def free(self) -> int:
        """Bytes of the device that nobody uses now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return min([_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroups())])

    def peak(self, run: Callable[[], None]) -> int:
        """Bytes by which `run` raises what is in use, at its highest."""
        if self.device.type != "cuda":
            with LivingTensors() as living:
                run()
            return living.peak
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def give_back(self) -> None:
        """Return the allocator's unused memory to the device, for others that share it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def optimizer_memory_to_come(optimizer: Any, device: torch.device) -> int:
    """Bytes of the moments that a torch optimizer makes in its first step, on the device of `device`'s type.

    Two for each parameter that has none yet, as Adam has.
    """
    return sum(
        2 * parameter.numel() * parameter.element_size()
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
        if parameter.device.type == device.type and not optimizer.state.get(parameter)
    )


class LivingTensors(TorchDispatchMode):
    """Adds up the memory of tensors that operations of this thread make, from their making to their end."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Bytes of living tensors, at their most."""
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile, which takes seconds to import, has nothing to do with it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._note(storage, size=0)  # it was there before
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            self._note(storage, size=storage.nbytes())
        return found

    def _note(self, storage: Any, *, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self._now -= size

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self.peak = max(self.peak, self._now)

    def begin_again(self) -> None:
        """Let the peak be that from now on."""
        self.peak = self._now


def _storages(values: Any) -> list[Any]:
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a sparse tensor has none
                found.append(leaf.untyped_storage())
    return found


def _meminfo(name: str) -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 1 << 62
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 1 << 62)


def _cgroups() -> list[tuple[int, int]]:
    """The limits of the control groups that hold this process, with what of each is in use."""
    try:
        line = next(line for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    own = _CGROUP / line.removeprefix("0::").lstrip("/")
    found = []
    for folder in (own, *own.parents):
        if not folder.is_relative_to(_CGROUP):
            break
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            found.append((limit, used - _reclaimable(folder)))
    return found


def _reclaimable(folder: Path) -> int:
    """Bytes of files in memory that the system drops when it needs room."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
