"""Adapters merged into their model give the log-probs that they gave on top of it."""

import json

import numpy as np
import pytest
import torch
from rlhf_core import (
    ADAPTER_FOLDER,
    AdapterBase,
    Batch,
    ConfigError,
    EngineConfig,
    LoraConfig,
    adapter_parameters,
    add_adapters,
    find_adapter,
    image_row,
    load_processor,
    load_role,
    model_outputs,
    quantized_loading,
    settle_quantized,
    write_adapter,
)
from rlhf_core.testing.engine_ground import forward, gap, rows
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.vision import save_tiny_vision_model
from rlhf_train import MergeConfig, merge_adapter
from safetensors.torch import load_file

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"), tied=False)


def adapted(base, config):
    """The base model with adapters."""
    from transformers import AutoModelForCausalLM

    arguments = {}
    if config.quantize is not None:
        pytest.importorskip("bitsandbytes")
        cpu = torch.device("cpu")
        arguments = quantized_loading(config.quantize, dtype=torch.float32, device=cpu, extra="extra")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **arguments)
    if config.quantize is not None:
        settle_quantized(model)
    return with_some_adapters(model, config)


def scored(model):
    with torch.no_grad():
        return model_outputs(model, rows(0), ("log_probs",)).log_probs


def with_some_adapters(model, config):
    """The model with adapters that are not zero any more."""
    add_adapters(model, config, seed=0, extra="extra")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model.eval()


def written(model, config, base, folder):
    folder.mkdir(parents=True)
    write_adapter(folder, adapter_parameters(model), config, base=base)
    return folder


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_log_probs_are_the_same_before_and_after(base, tmp_path, quantize):
    config = LoraConfig(rank=4, quantize=quantize)
    model = adapted(base, config)
    export = written(model, config, base, tmp_path / "export" / ADAPTER_FOLDER).parent
    assert merge_adapter(MergeConfig(adapter=export, output=tmp_path / "merged")) == 14
    before, after = scored(model), forward(str(tmp_path / "merged"), rows(0))[0]
    untouched = forward(base, rows(0))[0]
    assert (before - after).abs().max() < 1e-4
    assert (before - untouched).abs().max() > 0.1
    assert AdapterBase.read(export / ADAPTER_FOLDER) == AdapterBase(model=base, quantize=quantize)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_what_peft_wrote_is_merged_too(base, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_rslora=True)
    wrapped = peft.get_peft_model(model, settings)
    before = scored(model.eval())
    wrapped.save_pretrained(str(tmp_path / "peft"))
    merge_adapter(MergeConfig(adapter=tmp_path / "peft", output=tmp_path / "merged", base=base))
    after = forward(str(tmp_path / "merged"), rows(0))[0]
    assert (before - after).abs().max() < 1e-4
    assert (before - forward(base, rows(0))[0]).abs().max() > 0.1


def test_peft_reads_what_we_write(base, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    config = LoraConfig(rank=4)
    model = adapted(base, config)
    folder = written(model, config, base, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(plain, str(folder))
    assert (scored(model) - scored(plain.eval())).abs().max() < 1e-5


def test_a_scalar_head_comes_along(tmp_path):
    from transformers import AutoModelForSequenceClassification

    base = save_tiny_model(tmp_path / "base", head="scalar", tied=False)
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(rank=2)
    add_adapters(model, config, seed=0, extra="extra")
    with torch.no_grad():
        model.score.weight.fill_(0.25)
    written(model, config, base, tmp_path / "adapter")
    merge_adapter(MergeConfig(adapter=tmp_path / "adapter", output=tmp_path / "merged"))
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert (stored["score.weight"] == 0.25).all()


def test_the_dtype_of_the_result(base, tmp_path):
    config = LoraConfig(rank=2)
    model = adapted(base, config)
    written(model, config, base, tmp_path / "adapter")
    for dtype in ("float32", "bfloat16"):
        merge_adapter(MergeConfig(adapter=tmp_path / "adapter", output=tmp_path / dtype, dtype=dtype))
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact), "merged before it is rounded"
    assert gap(exact, {name: tensor.float() for name, tensor in rounded.items()}) > 0


def test_what_cannot_be_merged_is_refused(base, tmp_path):
    with pytest.raises(ConfigError, match="no adapter in"):
        merge_adapter(MergeConfig(adapter=tmp_path, output=tmp_path / "merged"))
    config = LoraConfig(rank=2)
    folder = written(adapted(base, config), config, base, tmp_path / "adapter")
    assert find_adapter(folder) == folder
    with pytest.raises(ConfigError, match="exists and is not empty"):
        merge_adapter(MergeConfig(adapter=folder, output=folder))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        merge_adapter(MergeConfig(adapter=folder, output=tmp_path / "merged", base=str(tmp_path / "nothing")))
    other = save_tiny_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(ConfigError, match="does not fit"):
        merge_adapter(MergeConfig(adapter=folder, output=tmp_path / "merged", base=other))
    with pytest.raises(ConfigError, match="dtype must be one of"):
        MergeConfig(adapter=folder, output=tmp_path / "merged", dtype="fp8")
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, "peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="only LORA"):
        merge_adapter(MergeConfig(adapter=folder, output=tmp_path / "merged"))
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".merged")]


def test_a_vision_language_model_is_merged_and_has_its_processor(tmp_path):
    pytest.importorskip("torchvision")
    base = save_tiny_vision_model(tmp_path / "base")
    model, _ = load_role(EngineConfig(model=base, images=True), extra="extra")
    processor = load_processor(base)
    picture = np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    ids, images = image_row(processor, f"{processor.image_token} what?", [picture])
    tokens = torch.tensor([ids])
    everywhere = torch.ones_like(tokens).bool()
    shown = Batch(token_ids=tokens, attention_mask=everywhere, response_mask=everywhere, images=(images,))

    def seen(model):
        with torch.no_grad():
            return model_outputs(model.eval(), shown, ("log_probs",)).log_probs

    untouched = seen(model)
    config = LoraConfig(rank=4, target_modules=(r".*language_model.*\.(q_proj|v_proj)"))
    before = seen(with_some_adapters(model, config))
    export = written(model, config, base, tmp_path / "export" / ADAPTER_FOLDER).parent
    assert merge_adapter(MergeConfig(adapter=export, output=tmp_path / "merged")) == 4
    # Loading it for images needs its processor, too.
    merged, _ = load_role(EngineConfig(model=str(tmp_path / "merged"), images=True), extra="extra")
    assert (seen(merged) - before).abs().max() < 1e-5
    assert (before - untouched).abs().max() > 1e-3
