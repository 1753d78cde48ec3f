from typing import Any, ClassVar

import pytest
from rlhf_core.testing.engine import TrainEngineConformance
from rlhf_train import DeepSpeedEngine

pytestmark = pytest.mark.stack


class TestZero3(TrainEngineConformance):
    # 0: nothing is exempt from sharding, although the model is tiny.
    settings: ClassVar[dict[str, Any]] = {"options": {"stage": 3, "param_persistence_threshold": 0}}

    @pytest.fixture(scope="class")
    def engine_factory(self):
        return DeepSpeedEngine


class TestZero3WithPersistentParameters(TestZero3):
    settings: ClassVar[dict[str, Any]] = {"options": {"stage": 3}}


class TestZero2(TestZero3):
    settings: ClassVar[dict[str, Any]] = {"options": {"stage": 2}}


class TestZero1(TestZero3):
    settings: ClassVar[dict[str, Any]] = {"options": {"stage": 1}}


class TestZero0(TestZero3):
    settings: ClassVar[dict[str, Any]] = {"options": {"stage": 0}}
