import pytest
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_core.testing.engine import TrainEngineConformance

pytestmark = pytest.mark.stack


class TestTorchEngine(TrainEngineConformance):
    @pytest.fixture(scope="class")
    def engine_factory(self):
        return TorchEngine


class TestTorchEngineWithoutPacking(TrainEngineConformance):
    settings = {"packing": False}  # noqa: RUF012

    @pytest.fixture(scope="class")
    def engine_factory(self):
        return TorchEngine
