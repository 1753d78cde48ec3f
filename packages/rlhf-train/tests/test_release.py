import gc

import pytest
import torch
from rlhf_core import ConfigError, EngineConfig, LoraConfig, Loss, OptimizerConfig
from rlhf_core.testing.engine_ground import rows, supervised_loss
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_train import DeepSpeedEngine

pytestmark = pytest.mark.stack


def tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("trained", [True, False])
def test_a_closed_engine_gives_its_memory_back(tmp_path, stage, trained):
    path = save_tiny_model(tmp_path, tied=False)
    before = tensor_bytes()
    engine = DeepSpeedEngine(
        EngineConfig(
            model=path,
            role="policy" if trained else "reference",
            optimizer=OptimizerConfig() if trained else None,
            options={"stage": stage},
        )
    )
    if trained:
        engine.step(rows(), Loss(function=supervised_loss))
    engine.score(rows())
    model_bytes = sum(spec.nbytes for spec in engine.weights().manifest(0).tensors)
    engine.close()
    del engine
    assert tensor_bytes() - before < 0.1 * model_bytes


def test_a_critic_from_a_language_model_values_nothing_at_first(tmp_path):
    engine = DeepSpeedEngine(
        EngineConfig(model=save_tiny_model(tmp_path), role="critic", optimizer=OptimizerConfig())
    )
    values = engine.score(rows(), ("values",)).values
    assert values is not None
    assert torch.count_nonzero(values) == 0
    assert "score.weight" in {spec.name for spec in engine.weights().manifest(0).tensors}
    engine.close()


def test_adapters_for_layers_that_do_not_exist_are_refused(tmp_path):
    config = EngineConfig(
        model=save_tiny_model(tmp_path),
        optimizer=OptimizerConfig(),
        lora=LoraConfig(target_modules=("no_such_layer",)),
    )
    with pytest.raises(ConfigError, match="no_such_layer"):
        DeepSpeedEngine(config)
