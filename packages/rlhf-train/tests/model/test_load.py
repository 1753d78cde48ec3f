import pytest
import torch
from rlhf_core import CheckpointError, ConfigError, EngineConfig, OptimizerConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_train.model.load import load_model


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("policy"))


def test_a_critic_may_start_from_a_language_model_and_then_says_zero(policy_path):
    model = load_model(EngineConfig(model=policy_path, role="critic", optimizer=OptimizerConfig()), None)
    assert torch.count_nonzero(model.score.weight) == 0
    assert model.score.weight.shape == (1, model.config.hidden_size)


def test_frozen_roles_need_no_gradients(policy_path):
    model = load_model(EngineConfig(model=policy_path, role="reference"), None)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_frozen_reward_model_needs_a_trained_head(policy_path):
    with pytest.raises(ConfigError, match="no trained scalar head"):
        load_model(EngineConfig(model=policy_path, role="reward"), None)


def test_loading_leaves_the_random_stream_alone(policy_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_model(EngineConfig(model=policy_path, role="critic", optimizer=OptimizerConfig()), None)
    assert torch.equal(torch.rand(2), expected)


def test_a_path_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"without config\.json"):
        load_model(EngineConfig(model=str(tmp_path)), None)
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(EngineConfig(model=str(tmp_path / "nothing")), None)


def test_a_checkpoint_with_a_gap_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*model\.norm\.weight"):
        load_model(EngineConfig(model=str(tmp_path)), None)


def test_a_damaged_file_is_named(tmp_path):
    save_tiny_model(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged"):
        load_model(EngineConfig(model=str(tmp_path)), None)
