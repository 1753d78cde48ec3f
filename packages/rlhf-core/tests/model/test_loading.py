from __future__ import annotations

import pytest
import torch
from rlhf_core import ConfigError, EngineConfig, OptimizerConfig
from rlhf_core.model.loading import check_model_path, load_role, zero_linear_head
from rlhf_core.testing.tiny import save_tiny_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("policy"), tokenizer=False)


def load(path, role, *, trained=False, **settings):
    optimizer = OptimizerConfig() if trained else None
    return load_role(EngineConfig(model=str(path), role=role, optimizer=optimizer, **settings), extra="x")


def test_a_language_model_is_no_frozen_reward_model(policy):
    with pytest.raises(ConfigError, match=r"no trained scalar head \(score.weight is missing\)"):
        load(policy, "reward")


def test_a_reward_model_or_critic_to_be_trained_may_start_from_one(policy):
    model, fresh = load(policy, "reward", trained=True)
    assert fresh == ["score.weight"]
    assert model.score.weight.abs().max() > 0
    again, _ = load(policy, "reward", trained=True)
    assert torch.equal(model.score.weight, again.score.weight)
    assert zero_linear_head(model, fresh)[0] is model.score.weight
    assert zero_linear_head(model, []) == []


def test_an_encoders_pooler_belongs_to_its_head(tmp_path):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    model, fresh = load(tmp_path, "reward", trained=True)
    assert fresh == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
    assert zero_linear_head(model, fresh) == []
    with pytest.raises(ConfigError, match="no trained scalar head"):
        load(tmp_path, "reward")


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_checkpoint_with_a_gap_is_refused(tmp_path, role):
    from safetensors.torch import load_file, save_file

    save_tiny_model(tmp_path, tokenizer=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*model\.norm\.weight"):
        load(tmp_path, role, trained=True)


def test_random_numbers_of_the_caller_are_left_alone(policy):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load(policy, "critic", trained=True)
    assert torch.equal(torch.rand(2), expected)


def test_paths_that_are_no_model(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in [
        (tmp_path, r"without config\.json"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "none", "does not exist"),
        ("./none", "does not exist"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_model_path(str(path))
    check_model_path("Qwen/Qwen2.5-0.5B")


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="cannot be loaded as a policy"):
        load(tmp_path, "policy")
