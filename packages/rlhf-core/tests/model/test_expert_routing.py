"""The experts of an earlier forward pass, chosen again."""

import pytest
import torch
from rlhf_core import Batch, CapabilityError, model_outputs
from rlhf_core.model.expert_routing import NO_CHOICE, Routers, to_rows, to_tokens
from rlhf_core.model.trial import try_model
from rlhf_core.training.accumulation import score_in_micro_batches

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
KINDS = ["mixtral", "qwen3-moe", "qwen3-moe-plain", "jamba"]


def build(kind):
    import transformers as hf

    torch.manual_seed(0)
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=6)).eval()
    if kind == "jamba":
        layers = {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
        }
        state = {"mamba_d_state": 4, "mamba_dt_rank": 4}
        return hf.JambaForCausalLM(hf.JambaConfig(**SHAPE, num_experts=6, **layers, **state)).eval()
    sizes = {"num_experts": 6, "moe_intermediate_size": 8, "head_dim": 8, "norm_topk_prob": kind == "qwen3-moe"}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **sizes)).eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (4, 9), generator=generator)
    ids[1, :4] = ids[0, :4]  # a prompt that two rows share
    lengths = torch.tensor([9, 7, 8, 4])
    mask = torch.arange(9) < lengths[:, None]
    return Batch(token_ids=ids * mask, attention_mask=mask, response_mask=mask & (torch.arange(9) >= 4))


def perturb(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.copy_(parameter.flip(0))


def run(model, batch, **options):
    return model_outputs(model, batch, ("log_probs", "routed_experts"), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_routers_replay_to_the_same_numbers(kind, batch):
    model = build(kind)
    try_model(model, "policy")
    first = run(model, batch)
    again = run(model, batch.with_columns(routed_experts=first.routed_experts), replay=True)
    assert torch.equal(first.log_probs, again.log_probs)
    assert torch.equal(first.routed_experts, again.routed_experts)
    assert first.routed_experts.shape == (4, 9, 4)
    assert (first.routed_experts[~batch.attention_mask] == NO_CHOICE).all()
    assert len(first.routed_experts[batch.attention_mask].unique()) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_changed_routers_run_through_the_recorded_experts(kind, batch):
    model = build(kind)
    try_model(model, "policy")
    recorded = run(model, batch).routed_experts
    perturb(model)
    free = run(model, batch)
    replayed = run(model, batch.with_columns(routed_experts=recorded), replay=True)
    assert not torch.equal(free.routed_experts, recorded)
    assert torch.equal(replayed.routed_experts, recorded)
    assert (free.log_probs - replayed.log_probs).abs().max() > 1e-3
    replayed.log_probs.sum().backward()
    gates = [p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    assert len(gates) == 2
    assert all(gate.grad.abs().max() > 0 for gate in gates)


def test_the_weights_of_the_recorded_experts_are_differentiated(batch):
    """By finite differences, in a place where the choice stays what it was recorded to be."""
    model = build("qwen3-moe")
    column = batch.with_columns(routed_experts=run(model, batch).routed_experts)
    perturb(model)
    gate = model.model.layers[0].mlp.gate.weight

    def total():
        return model_outputs(model, column, ("log_probs",), replay=True).log_probs.sum()

    total().backward()
    step = torch.zeros_like(gate)
    step[2, 3] = 0.01
    with torch.no_grad():
        gate += step
        above = total()
        gate -= 2 * step
        below = total()
    assert float((above - below) / 0.02) == pytest.approx(float(gate.grad[2, 3]), rel=0.02)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_packed_and_padded_rows_have_their_choices_in_the_same_places(kind, batch):
    padded, packed = build(kind), build(kind)
    assert try_model(packed, "policy").packing
    first = run(padded, batch).routed_experts
    assert torch.equal(first, run(packed, batch).routed_experts)
    perturb(packed)
    column = batch.with_columns(routed_experts=first)
    perturb(padded)
    left, right = run(packed, column, replay=True), run(padded, column, replay=True)
    torch.testing.assert_close(left.log_probs, right.log_probs, rtol=1e-4, atol=1e-5)


def test_without_being_asked_the_column_is_ignored(batch):
    model = build("mixtral")
    recorded = run(model, batch).routed_experts
    perturb(model)
    free = run(model, batch)
    assert torch.equal(free.log_probs, run(model, batch.with_columns(routed_experts=recorded)).log_probs)


def test_gradient_checkpointing_replays_in_its_second_forward_pass(batch):
    model = build("mixtral")
    column = batch.with_columns(routed_experts=run(model, batch).routed_experts)
    perturb(model)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        model_outputs(model, column, ("log_probs",), replay=True).log_probs.sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


def test_micro_batches_are_put_together(batch):
    model = build("mixtral")
    whole = run(model, batch).routed_experts
    cut = score_in_micro_batches(
        batch, ("routed_experts",), forward=lambda part, fields: model_outputs(model, part, fields), max_tokens=9
    )
    assert torch.equal(cut.routed_experts, whole)


def test_rows_and_tokens():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    places = torch.tensor([[0, 1, 2], [0, 3, 0]])  # the first token is shared
    tokens = torch.arange(8).view(4, 2)
    rows = to_rows(tokens, places, mask)
    assert rows.tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 1], [6, 7], [-1, -1]]]
    assert torch.equal(to_tokens(rows, places, mask, 4), tokens)


def test_what_cannot_be_replayed_is_refused(batch):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    plain = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "num_experts_per_tok"}))
    with pytest.raises(CapabilityError, match="has no router"):
        Routers.of(plain)
    model = build("mixtral")
    with pytest.raises(CapabilityError, match="recorded with another model"):
        model_outputs(
            model,
            batch.with_columns(routed_experts=torch.zeros(4, 9, 3, dtype=torch.int16)),
            ("log_probs",),
            replay=True,
        )
    with pytest.raises(CapabilityError, match="chooses 2 for each"):
        model_outputs(
            model,
            batch.with_columns(routed_experts=torch.zeros(4, 9, 6, dtype=torch.int16)),
            ("log_probs",),
            replay=True,
        )


def test_another_kind_of_router_is_refused():
    class SigmoidTopKRouter(torch.nn.Module):
        def forward(self, hidden):
            top = hidden.sigmoid().topk(2)
            return hidden, top.values, top.indices

    router = SigmoidTopKRouter()
    routers = Routers.of(router)
    routers.begin(record=True)
    router(torch.randn(5, 4))
    choices = routers.recorded()
    assert choices.shape == (5, 2)
    routers.begin(record=False, wanted=choices)
    with pytest.raises(CapabilityError, match="something else than a softmax"):
        router(torch.randn(5, 4))
