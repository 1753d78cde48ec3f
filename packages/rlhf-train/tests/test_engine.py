from typing import Any, ClassVar

import pytest
import torch
from rlhf_core import EngineConfig
from rlhf_core.testing.engine import TrainEngineConformance
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_train import DeepSpeedEngine
from transformers import AutoModelForCausalLM

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


@pytest.mark.parametrize("stage", [2, 3])
def test_a_16_bit_model_keeps_its_rotary_frequencies(stage, tmp_path):
    """Rounded to 8 bits they are off by 0.2 %: a whole turn at position 4,000."""
    path = save_tiny_model(tmp_path)
    plain = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).named_buffers())
    options = {"stage": stage, "param_persistence_threshold": 0}
    engine = DeepSpeedEngine(EngineConfig(model=path, dtype="bfloat16", device="cpu", options=options))
    try:
        found = {name.removeprefix("model.model."): buffer for name, buffer in engine._module.named_buffers()}
        assert plain
        for name, expected in plain.items():
            assert torch.equal(found[name.removeprefix("model.")], expected), name
    finally:
        engine.close()
