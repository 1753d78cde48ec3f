"""Low-rank adapters, over plain and over 4-bit weights."""

import pytest
import torch
from rlhf_core import ConfigError, LoraConfig
from rlhf_core.adapters.lora import adapted_layers, add_adapters, merged_weight, name_without_adapters
from rlhf_core.adapters.quantized import dequantized, outline, quantized_loading, settle_quantized
from rlhf_core.testing.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 4.0}, "rank must be a whole number"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"alpha": float("nan")}, "alpha must be a finite number, got nan"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"quantize": "int4"}, "quantize must be one of nf4, fp4"),
    ],
)
def test_impossible_adapters_are_refused(fields, complaint):
    with pytest.raises(ConfigError, match=complaint):
        LoraConfig(**fields)


def test_names_without_adapters():
    layers = {"a.q": object()}
    assert name_without_adapters("a.q.base_layer.weight", layers) == "a.q.weight"
    assert name_without_adapters("a.q.lora_A.default.weight", layers) is None
    assert name_without_adapters("a.qq.weight", layers) == "a.qq.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=False, tokenizer=False)


def load(path, kind=None):
    from transformers import AutoModelForCausalLM

    arguments = {}
    if kind is not None:
        pytest.importorskip("bitsandbytes")
        arguments = quantized_loading(kind, dtype=torch.float32, device=torch.device("cpu"), extra="extra")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
    if kind is not None:
        settle_quantized(model)
    return model


def test_the_update_by_hand(path):
    pytest.importorskip("peft")
    model = load(path)
    add_adapters(model, LoraConfig(rank=2, alpha=6.0, target_modules=("q_proj",)), seed=0, extra="extra")
    layers = adapted_layers(model)
    assert sorted(layers) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    layer = layers["model.layers.0.self_attn.q_proj"]
    base = layer.base_layer.weight.detach()
    assert torch.equal(merged_weight(base, layer), base), "a fresh adapter changes nothing"
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
        expected = base + 3.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
        torch.testing.assert_close(merged_weight(base, layer), expected)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if ".lora_" in n
    }


def test_layers_that_are_not_there_are_named(path):
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="no_such_layer"):
        add_adapters(load(path), LoraConfig(target_modules=("no_such_layer",)), seed=0, extra="extra")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_stand_for_nearly_the_same_weights(path, kind):
    plain, quantized = load(path), load(path, kind)
    whole, coded = dict(plain.named_parameters()), dict(quantized.named_parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert coded[name].dtype is torch.uint8
    assert coded[name].numel() == whole[name].numel() // 2
    assert outline(coded[name]).shape == whole[name].shape
    assert outline(coded[name]).dtype is torch.float32
    error = (dequantized(coded[name]) - whole[name]).abs().max()
    assert 0 < error < 0.25 * whole[name].abs().max()
    for kept in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(dequantized(coded[kept]), whole[kept])


def test_a_quantised_model_trains_after_it_was_evaluated(path):
    """bitsandbytes' own repacking for inference would leave the second pass without gradients."""
    model = load(path, "nf4")
    add_adapters(model, LoraConfig(rank=2, quantize="nf4"), seed=0, extra="extra")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model.eval()(ids).logits
    after = model.train()(ids).logits
    torch.testing.assert_close(before, after.detach(), rtol=1e-4, atol=1e-4)
    after.square().mean().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    assert not hasattr(model.config, "quantization_config")
    assert not [name for name in model.state_dict() if "absmax" in name or "quant_state" in name]
