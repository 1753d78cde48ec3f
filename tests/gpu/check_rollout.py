"""The conformance kit of rollout backends on CUDA."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from gpu_registry import gpu_check
from rlhf_core import RolloutConfig
from rlhf_core.testing.rollout import RolloutBackendConformance


class OnCuda(RolloutBackendConformance):
    """Kernels on CUDA may multiply float32 in TF32: log-probs are near those of a forward pass, not equal."""

    tolerance: ClassVar[float] = 0.02
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def rollout_config(cls, model_path: str) -> RolloutConfig:
        return RolloutConfig(
            model=model_path,
            device="cuda",
            max_model_len=cls.max_model_len,
            max_num_seqs=32,
            options=cls.options,
        )


@gpu_check("rollout kit: Transformers", "the Transformers backend passes the kit of rollout backends on CUDA")
class TestTransformers(OnCuda):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls) -> Any:
        from rlhf_rollout import TransformersBackend

        return TransformersBackend


class VLLMOnCuda(OnCuda):
    """A part of the memory: the engine is in the process of the checks."""

    options: ClassVar[dict[str, Any]] = {"gpu_memory_utilization": 0.3}
    timeout_s: ClassVar[float] = 300.0

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls) -> Any:
        from rlhf_rollout import VLLMBackend

        return VLLMBackend


@gpu_check("rollout kit: vLLM", "the vLLM backend passes the kit with CUDA graphs", packages=["vllm"])
class TestVLLM(VLLMOnCuda):
    """Tied embeddings."""


@gpu_check("rollout kit: vLLM, eager", "the same without CUDA graphs, untied embeddings", packages=["vllm"])
class TestVLLMEager(VLLMOnCuda):
    tied = False
    options: ClassVar[dict[str, Any]] = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
