from __future__ import annotations

import copy

import pytest
import torch
from rlhf_core import Batch, ConfigError, LoraConfig, add_adapters, model_outputs, tile_mlps, try_model
from rlhf_core.errors import CapabilityError
from rlhf_core.model.tiled_mlp import tiled_mlps, tiles_of
from rlhf_core.training.memory_meter import LivingTensors
from torch import nn

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
OLD = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32, "initializer_range": 0.2}
FAMILIES = {
    "Qwen2": SIZES,
    "Llama": {**SIZES, "mlp_bias": True},
    "Gemma2": SIZES,
    "Phi3": {**SIZES, "pad_token_id": 0},
    "GPTNeoX": {**OLD, "intermediate_size": 48},
    "GPT2": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
}


def model_of(family, *, kind="ForCausalLM", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    name = (
        {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}{kind}") if kind == "ForCausalLM" else f"{family}{kind}"
    )
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES.get(family, SIZES), **changes})
    return getattr(transformers, name)(config).to(dtype).train()


def batch():
    ids = torch.arange(4 * 24).view(4, 24) * 7 % 61 + 1
    mask = torch.arange(24) < torch.tensor([[24], [15], [20], [9]])
    return Batch(token_ids=ids * mask, attention_mask=mask, response_mask=mask & (torch.arange(24) >= 3))


def passed(model, field="log_probs"):
    """The outputs and the gradients of all trained parameters."""
    found = getattr(model_outputs(model, batch(), (field,)), field)
    (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return found.detach(), grads


def same(found, expected, relative=1e-6):
    """To so much of the largest number of each tensor."""
    assert found[1].keys() == expected[1].keys()
    pairs = [(found[0], expected[0]), *((found[1][name], expected[1][name]) for name in expected[1])]
    assert all(float((left - right).abs().max()) <= relative * float(right.abs().max()) for left, right in pairs)


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_whole_mlps(family, tokens):
    whole = model_of(family, dtype=torch.float64)
    tiled = copy.deepcopy(whole)
    names = tile_mlps(tiled, tokens)
    assert len(names) == 2
    assert all(name in dict(whole.named_modules()) for name in names)
    same(passed(tiled), passed(whole), relative=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "field"), [("ForCausalLM", "log_probs"), ("ForSequenceClassification", "values"), ("F", "scores")]
)
def test_every_role_packed_and_padded(kind, field, checkpointing, padded):
    kind = "ForSequenceClassification" if kind == "F" else kind
    more = {} if field == "log_probs" else {"num_labels": 1, "pad_token_id": 0}
    models = [model_of("Qwen2", kind=kind, **more) for _ in range(2)]
    tile_mlps(models[1], 10)
    role = {"log_probs": "policy", "values": "critic", "scores": "reward"}[field]
    for model in models:
        assert try_model(model, role, packing=not padded).packing is not padded
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same(passed(models[1], field), passed(models[0], field), relative=2e-6)


def test_adapters_and_the_random_numbers_they_draw():
    """Dropout of a tile is the same in its two passes, and draws what a plain pass tile by tile draws."""
    models = [model_of("Qwen2", dtype=torch.float64) for _ in range(2)]
    for model in models:
        lora = LoraConfig(rank=4, dropout=0.3, target_modules=("gate_proj", "up_proj", "down_proj"))
        add_adapters(model, lora, seed=0, extra="")
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    tile_mlps(models[0], 11)

    def by_hand(mlp, whole):
        def forward(hidden):
            flat = hidden.flatten(0, 1)
            return torch.cat([whole(part[None])[0] for part in flat.split(11)]).view(hidden.shape)

        mlp.forward = forward

    for layer in models[1].model.layers:
        by_hand(layer.mlp, layer.mlp.forward)
    results = []
    for model in models:
        torch.manual_seed(5)
        results.append((*passed(model), torch.rand(3)))
    same(results[0], results[1], relative=1e-12)
    assert torch.equal(results[0][2], results[1][2]), "the backward pass leaves the caller's stream alone"
    assert all("lora" in name for name in results[0][1])


def test_gradients_of_16_bits_are_added_up_in_float32():
    exact = model_of("Qwen2", dtype=torch.bfloat16).double()
    models = [model_of("Qwen2", dtype=torch.bfloat16) for _ in range(2)]
    tile_mlps(models[1], 1)
    expected = passed(exact)[1]
    gaps = []
    for model in models:
        grads = passed(model)[1]
        names = [name for name in grads if "mlp" in name]
        gaps.append([float((grads[name] - expected[name]).norm() / expected[name].norm()) for name in names])
    assert all(tiled < 1.1 * whole for whole, tiled in zip(*gaps, strict=True))


def test_a_tile_is_all_that_an_mlp_takes():
    peaks = []
    for tokens in (None, 64):
        model = model_of("Qwen2", intermediate_size=1024, num_hidden_layers=1)
        if tokens is not None:
            tile_mlps(model, tokens)
        ids = torch.arange(2048)[None] % 61
        mask = torch.ones_like(ids, dtype=torch.bool)
        last = mask & (torch.arange(2048) == 2047)
        try_model(model, "policy")
        with LivingTensors() as living:
            rows = Batch(token_ids=ids, attention_mask=mask, response_mask=last)
            model_outputs(model.train(), rows, ("log_probs",)).log_probs.sum().backward()
        peaks.append(living.peak)
    inside = 2048 * 1024 * 4
    assert peaks[0] > 4 * inside
    assert peaks[1] < 1.5 * inside


def test_gradients_of_the_input_are_made_where_nothing_below_is_trained():
    """ZeRO-3 takes the gradients of a module it gathers whole when that of its input is there."""
    model = model_of("Qwen2")
    tile_mlps(model, 5)
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    order = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    mlp.register_full_backward_hook(lambda *_: order.append("module"))
    passed(model)
    assert order == ["weight", "module"]


def test_tiles_can_be_left_for_a_while():
    model = model_of("Qwen2")
    tile_mlps(model, 5)
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    with tiles_of(model, None), torch.no_grad():
        model_outputs(model, batch(), ("log_probs",))
    assert len(calls) == 1
    with torch.no_grad():
        model_outputs(model, batch(), ("log_probs",))
    assert len(calls) == 1 + -(-96 // 5)
    assert len(tiled_mlps(model)) == 2
    assert tiled_mlps(model_of("Qwen2")) == ()


@pytest.mark.parametrize(
    ("family", "sizes", "complaint"),
    [
        ("OPT", {**OLD, "ffn_dim": 48, "word_embed_proj_dim": 32}, r"layer 0 of OPTForCausalLM \(opt\) has no MLP"),
        (
            "Bloom",
            {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            "takes hidden_states, residual",
        ),
        ("Mixtral", {**SIZES, "num_local_experts": 4}, r"mlp of layer 0 .* routes tokens to experts \(experts\)"),
        ("Qwen3Moe", {**SIZES, "num_experts": 4, "moe_intermediate_size": 16}, "routes tokens to experts"),
    ],
)
def test_what_cannot_run_so_is_refused_by_name(family, sizes, complaint):
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    with pytest.raises(ConfigError, match=f"max_tokens_per_mlp_tile.*{complaint}"):
        tile_mlps(model, 8)


class Mixing(nn.Module):
    """Is told of the token before, as no MLP should be."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])


def test_an_mlp_that_looks_at_other_tokens_is_found_by_the_trial():
    model = model_of("Qwen2")
    for layer in model.model.layers:
        layer.mlp = Mixing(layer.mlp)
    assert try_model(model, "policy").declined, "packed rows show it too; padded ones do not"
    tile_mlps(model, 5)
    with pytest.raises(ConfigError, match=r"cannot run its MLPs over tiles: tiled rows differ .* by up to"):
        try_model(model, "policy")


def test_more_than_hidden_states_is_refused_when_it_is_given():
    model = model_of("Qwen2")
    tile_mlps(model, 5)
    with pytest.raises(CapabilityError, match="Qwen2MLP is given more than hidden states"):
        model.model.layers[0].mlp(torch.zeros(1, 8, 32), torch.zeros(1))
