"""The Transformers backend: the conformance kit, and what is particular to it."""

import pytest
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_rollout.transformers_backend import TransformersBackend


class TestConformance(RolloutBackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return TransformersBackend


class TestConformanceUntied(RolloutBackendConformance):
    tied = False

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return TransformersBackend
