"""The conformance kit of training engines on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from gpu_registry import gpu_check
from rlhf_core.testing.engine import TrainEngineConformance


class OnCuda(TrainEngineConformance):
    """Float32 without TF32, and sums in a fixed order: the checks of bits are those of the kit."""

    settings: ClassVar[dict[str, Any]] = {"device": "cuda"}

    @pytest.fixture(autouse=True)
    def _fixed_order(self) -> Iterator[None]:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


@gpu_check("engine kit: torch", "the torch engine passes the conformance kit of training engines on CUDA")
class TestTorch(OnCuda):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> Any:
        from rlhf_algos import TorchEngine

        return TorchEngine


class DeepSpeedOnCuda(OnCuda):
    """Every parameter is sharded, although the model is tiny."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> Any:
        from rlhf_train import DeepSpeedEngine

        return DeepSpeedEngine


@gpu_check("engine kit: ZeRO-3", "the DeepSpeed engine at stage 3 passes the kit on CUDA", packages=["deepspeed"])
class TestZero3(DeepSpeedOnCuda):
    settings: ClassVar[dict[str, Any]] = {
        "device": "cuda",
        "options": {"stage": 3, "param_persistence_threshold": 0},
    }


@gpu_check("engine kit: ZeRO-2", "the DeepSpeed engine at stage 2 passes the kit on CUDA", packages=["deepspeed"])
class TestZero2(DeepSpeedOnCuda):
    settings: ClassVar[dict[str, Any]] = {"device": "cuda", "options": {"stage": 2}}


@gpu_check("engine kit: ZeRO-0", "the DeepSpeed engine at stage 0 passes the kit on CUDA", packages=["deepspeed"])
class TestZero0(DeepSpeedOnCuda):
    settings: ClassVar[dict[str, Any]] = {"device": "cuda", "options": {"stage": 0}}
