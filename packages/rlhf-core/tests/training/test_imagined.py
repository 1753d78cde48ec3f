from dataclasses import replace

import pytest
import torch
from rlhf_core import (
    Batch,
    ConfigError,
    EngineConfig,
    LoraConfig,
    Loss,
    LossTerms,
    OptimizerConfig,
    model_outputs,
    quantized_loading,
)
from rlhf_core.adapters.quantized import is_quantized
from rlhf_core.model import linear_head, log_probs
from rlhf_core.training import imagined
from rlhf_core.training.accumulation import accumulate
from rlhf_core.training.imagined import ImaginedModel
from rlhf_core.training.imagining import built, config_of
from rlhf_core.training.memory_meter import LivingTensors
from transformers import AutoModelForCausalLM, LlamaConfig


def loss_of(outputs, batch, config):
    mask = batch.response_mask
    total = -(outputs.log_probs * batch["advantages"]).masked_fill(~mask, 0).sum()
    assert float(total.detach()) == float(total.detach())  # a loss may look at its numbers
    return LossTerms(total=total, weight=mask.sum().float())


LOSS = Loss(function=loss_of)


@pytest.fixture
def rows():
    random = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 192, dtype=torch.bool)
    responses = mask.clone()
    responses[:, :64] = False
    return Batch(
        token_ids=torch.randint(5, 500, (4, 192), generator=random),
        attention_mask=mask,
        response_mask=responses,
        columns={"advantages": torch.randn(4, 192, generator=random)},
    )


def model_at(path, layers):
    LlamaConfig(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=600,
    ).save_pretrained(path)
    return EngineConfig(model=str(path), optimizer=OptimizerConfig())


def real_peak(config, rows):
    """Of a second step with real tensors; gradients of parameters are dropped when they are there."""
    model = built(config, config_of(config)).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))

    def run():
        accumulate(
            rows,
            LOSS,
            forward=lambda batch, fields: model_outputs(model, batch, fields),
            backward=lambda total, last: total.backward(),
            max_tokens=1 << 30,
        )

    run()
    with LivingTensors() as living:
        run()
    return living.peak


@pytest.mark.parametrize("tile", [None, 100])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_step_is_that_of_the_real_one(tmp_path, rows, checkpointing, tile):
    config = replace(model_at(tmp_path, 3), gradient_checkpointing=checkpointing, max_tokens_per_mlp_tile=tile)
    found = ImaginedModel(config).step(rows, LOSS)
    assert found.peak == pytest.approx(real_peak(config, rows), rel=0.1)


def test_a_plan_for_a_gpu_has_a_gpus_chunks_of_the_head(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(log_probs, "_ON_HOSTS", 600 * 100)
    sizes, log_softmax = [], linear_head._log_softmax

    def watched(hidden, *rest):
        sizes.append(len(hidden))
        return log_softmax(hidden, *rest)

    monkeypatch.setattr(linear_head, "_log_softmax", watched)
    for device in ("cpu", "cuda:0"):
        ImaginedModel(replace(model_at(tmp_path, 3), device=device)).score(rows)
    assert sizes == [100, 100, 100, 100, 100, 12, 512]


def test_checkpointing_makes_a_deep_model_smaller(tmp_path, rows):
    config = model_at(tmp_path, 6)
    plain = ImaginedModel(config).step(rows, LOSS)
    kept = ImaginedModel(replace(config, gradient_checkpointing=True)).step(rows, LOSS)
    assert kept.peak < plain.peak / 2
    assert kept.flops > 1.25 * plain.flops


@pytest.mark.parametrize("tile", [None, 100])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_deep_model_is_planned_from_a_shallow_one_as_it_is_whole(
    tmp_path, rows, monkeypatch, checkpointing, tile
):
    config = replace(model_at(tmp_path, 9), gradient_checkpointing=checkpointing, max_tokens_per_mlp_tile=tile)
    short = ImaginedModel(config)
    monkeypatch.setattr(imagined, "deepening_of", lambda its: None)
    whole = ImaginedModel(config)
    assert short.parameters == whole.parameters
    assert (short.head, short.layers) == (whole.head, 9)
    assert short.step(rows, LOSS) == whole.step(rows, LOSS)
    assert short.score(rows) == whole.score(rows)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.1)])
def test_tiles_of_mlps_make_a_long_row_smaller_and_their_weights_are_there_together(tmp_path, lora):
    config = replace(model_at(tmp_path, 3), gradient_checkpointing=True, lora=lora)
    mask = torch.ones(1, 4096, dtype=torch.bool)
    row = Batch(
        token_ids=torch.zeros(1, 4096, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask & (torch.arange(4096) > 4090),
        columns={"advantages": torch.zeros(1, 4096)},
    )
    whole, tiled = ImaginedModel(config), ImaginedModel(replace(config, max_tokens_per_mlp_tile=256))
    before, after = whole.step(row, LOSS), tiled.step(row, LOSS)
    inside = 4096 * 320 * 4
    assert after.peak < before.peak - 3 * inside
    assert tiled.score(row).peak < whole.score(row).peak - inside
    assert after.flops > before.flops
    names = [one.name for one in tiled.parameters]
    calls = [{names[place] for place in one.used} for one in after.moments if len(one.used) > 1]
    assert {name for name in names if ".1.mlp." in name} in calls
    seen = [(one.begins, one.backward) for one in after.moments if len(one.used) > 2]
    forwards, again = [(True, False), (False, False)], [(True, True), (True, False), (False, True)]
    assert seen == forwards * 3 + again * 3, "once in each pass, however many tiles, and there to the end of it"


def test_parameters_and_flops_are_the_models(tmp_path, rows):
    config = model_at(tmp_path, 3)
    model = ImaginedModel(config)
    elements = sum(one.elements for one in model.parameters)
    layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 320 + 2 * 128
    assert elements == 3 * layer + 2 * 600 * 128 + 128
    # Two operations for each parameter of a matrix and token; the head runs where a token is predicted.
    matrices = 3 * (layer - 256)
    products = 2 * (matrices * 4 * 192 + 600 * 128 * 4 * 128)
    attention = 2 * 3 * 4 * 128 * 192 * 192
    # Some versions multiply matrices for the angles of positions, too.
    assert model.score(rows).flops == pytest.approx(products + attention, rel=1e-4)


def test_a_model_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no configuration at hand"):
        ImaginedModel(EngineConfig(model=str(tmp_path / "none")))


def test_weights_that_a_pass_keeps_for_its_backward_are_none_of_its_own_memory(tmp_path):
    """Twice the tokens take twice the memory: nothing beside them that is as large as the weights."""
    LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=4, vocab_size=600
    ).save_pretrained(tmp_path)
    model = ImaginedModel(EngineConfig(model=str(tmp_path), dtype="bfloat16", optimizer=OptimizerConfig()))
    weights = sum(one.bytes for one in model.parameters)

    def peak(length):
        mask = torch.ones(1, length, dtype=torch.bool)
        columns = {"advantages": torch.zeros(1, length)}
        ids = torch.zeros(1, length, dtype=torch.long)
        batch = Batch(token_ids=ids, attention_mask=mask, response_mask=mask, columns=columns)
        return model.step(batch, LOSS).peak

    assert abs(2 * peak(64) - peak(128)) < weights / 4


def test_frozen_layers_of_4_bits_are_as_large_as_bitsandbytes_makes_them(tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    config = model_at(tmp_path, 2)
    plain, coded = (
        ImaginedModel(replace(config, lora=LoraConfig(rank=4, quantize=kind))) for kind in (None, "nf4")
    )
    built(config, config_of(config)).save_pretrained(tmp_path)
    settings = quantized_loading("nf4", dtype=torch.float32, device=torch.device("cpu"), extra="extra")
    held = 0
    for parameter in AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **settings).parameters():
        held += parameter.numel() * parameter.element_size()
        if is_quantized(parameter):
            scales = parameter.quant_state
            held += scales.absmax.numel() + 4 * scales.state2.absmax.numel()
    frozen = sum(one.bytes for one in coded.parameters if not one.trained)
    assert frozen == pytest.approx(held, rel=0.01)
    assert frozen < 0.6 * sum(one.bytes for one in plain.parameters if not one.trained)
    assert max(one.values_bytes for one in coded.parameters) == 4 * 128 * 320  # of the widest layer, in float32
    assert not any(one.values_bytes for one in plain.parameters)
