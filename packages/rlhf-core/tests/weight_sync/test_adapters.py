"""A model's adapters as a weight source."""

import pytest
import torch
from rlhf_core import AdapterWeights, ConfigError, LoraConfig
from rlhf_core.adapters.lora import adapted_layers, add_adapters, merged_weight
from rlhf_core.testing.tiny import save_tiny_model


def adapted(path, **config):
    from transformers import AutoModelForCausalLM

    save_tiny_model(path, hidden_size=32, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.requires_grad_(False)
    add_adapters(model, LoraConfig(rank=2, alpha=6.0, **config), seed=0, extra="rlhf-train[lora]")
    return model


def test_an_adapter_leaves_with_the_names_and_values_of_pefts_files(tmp_path):
    from peft import get_peft_model_state_dict

    model = adapted(tmp_path)
    source = AdapterWeights(model)
    manifest = source.manifest(5, bucket_bytes=2000)
    assert (manifest.version, manifest.base_version) == (5, 0)
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.alpha) == (2, 6.0)
    found = {name: tensor for bucket in manifest.buckets() for name, tensor in source.gather(bucket)}
    expected = {f"base_model.model.{name}": t for name, t in get_peft_model_state_dict(model).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {spec.name: spec.shape for spec in manifest.tensors} == {n: tuple(t.shape) for n, t in found.items()}
    # The merged weight is the base plus alpha / rank times B A, of the same names.
    name = "model.layers.1.mlp.down_proj"
    b, a = (found[f"base_model.model.{name}.lora_{half}.weight"] for half in "BA")
    layer = adapted_layers(model)[name]
    base = layer.get_base_layer().weight
    torch.testing.assert_close(merged_weight(base, layer), base + 3.0 * b @ a)


def test_only_target_modules_travel(tmp_path):
    source = AdapterWeights(adapted(tmp_path, target_modules=("q_proj",)))
    assert all(".q_proj.lora_" in spec.name for spec in source.manifest(1).tensors)


def test_what_an_adapter_cannot_say_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    model = adapted(tmp_path)
    with pytest.raises(ConfigError, match="no adapters"):
        AdapterWeights(AutoModelForCausalLM.from_pretrained(tmp_path))
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is trained too"):
        AdapterWeights(model)
    model.model.norm.weight.requires_grad_(False)
    model.get_submodule("model.layers.0.mlp.up_proj").scaling["default"] = 1.0
    with pytest.raises(ConfigError, match=r"differ in rank or scale, \[\(2, 1\.0\), \(2, 3\.0\)\]"):
        AdapterWeights(model)
