from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rlhf_core.data.batch import Batch
from rlhf_core.model.attention.packed import NAME, has_dropout, is_packing
from rlhf_core.model.forward import model_outputs, top_k_log_probs
from rlhf_core.model.trial import try_model

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def causal(kind: str, **changes):
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, kind + "Config"))
    config = config_class(**{**COMMON, **changes})
    torch.manual_seed(0)
    return getattr(transformers, kind + "ForCausalLM")(config).double().eval()


def scalar(**changes):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**COMMON, **changes}, num_labels=1, pad_token_id=0)
    return transformers.Qwen2ForSequenceClassification(config).double().eval()


def packs(model, role=None):
    role = role or ("critic" if hasattr(model, "score") else "policy")
    return try_model(model, role).packing


def make_batch(prompts=((3, 4), (3, 4), (3, 4), (1, 1)), seed=0) -> Batch:
    """Rows 0 to 2 share a prompt of 7 tokens; the last one has its own of 4."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randint(1, 64, (7,), generator=random)
    lengths = [12, 9, 8, 11]
    ids = torch.randint(1, 64, (4, 12), generator=random)
    ids[:3, :7] = shared
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    response = mask & (torch.arange(12) >= torch.tensor([7, 7, 7, 4])[:, None])
    return Batch(token_ids=ids.masked_fill(~mask, 0), attention_mask=mask, response_mask=response)


def outputs_and_gradients(model, batch, fields):
    outputs = model_outputs(model, batch, fields)
    total = torch.zeros(())
    for index, name in enumerate(fields):
        value = getattr(outputs, name)
        total = total + (
            value * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
        ).sum() * (index + 1)
    model.zero_grad()
    total.backward()
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_packed_equals_padded(model, fields):
    """In float32: `eager`, the only attention that knows soft caps and sinks, gives NaN for padding in float64."""
    packed, tolerance = copy.deepcopy(model.float()), 2e-5
    model.set_attn_implementation("eager")
    assert packs(packed)
    batch = make_batch()
    expected, expected_gradients = outputs_and_gradients(model, batch, fields)
    found, found_gradients = outputs_and_gradients(packed, batch, fields)
    for name in fields:
        assert torch.allclose(getattr(found, name), getattr(expected, name), atol=tolerance), name
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert (found_gradients[name] - gradient).abs().max() < tolerance * max(gradient.abs().max(), 0.1), name


SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen2", {}),
        ("Llama", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 4}),
        ("Mixtral", {"sliding_window": 5, "num_local_experts": 4}),
        ("Phi3", {"sliding_window": 4, "pad_token_id": 0}),
        ("Starcoder2", {"sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
        ("Qwen2", {**SLIDING_AND_FULL, "use_sliding_window": True}),
        ("Gemma2", {**SLIDING_AND_FULL, "head_dim": 8, "attn_logit_softcapping": 1.5}),
        ("Gemma3", {**SLIDING_AND_FULL, "head_dim": 8}),
        ("Olmo3", SLIDING_AND_FULL),
        ("Cohere2", SLIDING_AND_FULL),
        ("GptOss", {**SLIDING_AND_FULL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("sliding_window", "")),
)
def test_log_probs_entropies_and_gradients_equal_the_padded_ones(kind, changes):
    assert_packed_equals_padded(causal(kind, **changes), ("log_probs", "entropy"))


def test_learned_positions():
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    torch.manual_seed(0)
    assert_packed_equals_padded(transformers.GPT2LMHeadModel(config).double().eval(), ("log_probs",))


def test_values_and_scores_equal_the_padded_ones():
    assert_packed_equals_padded(scalar(), ("values", "scores"))


def test_under_gradient_checkpointing():
    model = causal("Qwen2").train()
    packed = copy.deepcopy(model)
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert packs(packed)
    _, expected = outputs_and_gradients(model, make_batch(), ("log_probs",))
    _, found = outputs_and_gradients(packed, make_batch(), ("log_probs",))
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-6 * gradient.abs().max(), name


def test_a_packed_model_still_runs_padded_batches_and_generates():
    model = causal("Qwen2")
    packed = copy.deepcopy(model)
    assert packs(packed)
    batch = make_batch()
    left = {"input_ids": batch.token_ids.flip(1), "attention_mask": batch.attention_mask.flip(1).long()}
    assert torch.allclose(packed(**left).logits[:, -1], model(**left).logits[:, -1])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(**left, **settings), model.generate(**left, **settings))


def test_dropout_switches_sharing_off_in_training_only():
    model = causal("Qwen2", attention_dropout=0.1)
    assert not has_dropout(model.eval())
    assert has_dropout(model.train())
    assert not has_dropout(causal("Qwen2").train())


def test_a_chosen_attention_is_kept_and_rows_run_padded():
    model = causal("Qwen2", attn_implementation="eager")
    trial = try_model(model, "policy")
    assert not trial.packing
    assert "chosen to be 'eager'" in trial.declined
    assert model.config._attn_implementation == "eager" != NAME
    assert_log_probs_are_the_models_own(model)


def test_packing_can_be_switched_off():
    model = causal("Qwen2")
    trial = try_model(model, "policy", packing=False)
    assert (trial.packing, trial.declined, trial.notice) == (False, "", "")
    assert model.config._attn_implementation == "sdpa"


def assert_log_probs_are_the_models_own(model):
    batch = make_batch()
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    expected = logits[:, :-1].log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    found = model_outputs(model, batch, ("log_probs",)).log_probs[:, 1:]
    assert torch.allclose(found, expected * batch.response_mask[:, 1:], atol=1e-8)


def test_enabling_twice_is_harmless_and_the_saved_config_does_not_mention_it(tmp_path):
    model = causal("Qwen2")
    assert packs(model)
    assert packs(model)
    assert is_packing(model)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("kind", ["Cohere", "Granite", "Gemma2"])
def test_what_models_do_to_their_logits_is_part_of_the_log_probs(kind):
    changes = {"Cohere": {"logit_scale": 0.3}, "Granite": {"logits_scaling": 3.0}, "Gemma2": {"head_dim": 8}}[kind]
    if kind == "Gemma2":
        changes["final_logit_softcapping"] = 2.0
    assert_log_probs_are_the_models_own(causal(kind, **changes))


def test_router_loss_of_a_mixture_of_experts():
    model = causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None).float()
    batch = make_batch()
    expected = model(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask.long(), output_router_logits=True
    ).aux_loss
    found = model_outputs(model, batch, ("log_probs", "aux_loss")).aux_loss
    assert torch.allclose(found.double(), expected.double(), atol=1e-6)
    assert packs(model)
    # A shared prompt is routed once, so it counts once.
    unshared = replace(batch, response_mask=batch.attention_mask)
    packed = model_outputs(model, unshared, ("log_probs", "aux_loss")).aux_loss
    assert torch.allclose(packed.double(), expected.double(), atol=1e-5)


def test_candidates_and_the_top_k_of_a_teacher():
    model = causal("Qwen2")
    assert packs(model)
    batch = make_batch()
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    everything = torch.zeros_like(logits)
    everything[:, 1:] = (logits[:, :-1] / 2).log_softmax(-1)
    batch = replace(batch, temperature=2.0)
    log_probs, ids = top_k_log_probs(model, batch, 3)
    expected = everything[batch.response_mask].topk(3)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(log_probs.double(), expected.values, atol=1e-6)
    candidates = torch.zeros(*batch.token_ids.shape, 3, dtype=torch.long)
    candidates[batch.response_mask] = ids
    found = model_outputs(model, batch.with_columns(candidate_ids=candidates), ("candidate_log_probs",))
    assert found.candidate_log_probs is not None
    assert torch.allclose(found.candidate_log_probs[batch.response_mask], expected.values, atol=1e-6)
    assert found.candidate_log_probs[~batch.response_mask].abs().max() == 0
    found.candidate_log_probs.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_the_probability_of_drawing_the_same_token_twice():
    model = causal("Qwen2")
    assert packs(model)
    batch = replace(make_batch(), temperature=2.0)
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits
    expected = torch.zeros_like(logits[..., 0])
    expected[:, 1:] = (logits[:, :-1] / 2).softmax(-1).square().sum(-1).log()
    found = model_outputs(model, batch, ("log_probs", "log_collision")).log_collision
    assert found is not None
    assert not found.requires_grad
    assert torch.allclose(found[batch.response_mask].double(), expected[batch.response_mask].double(), atol=1e-6)
    assert found[~batch.response_mask].abs().max() == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_kernel_whose_trial_fails_gives_way_to_the_next(monkeypatch):
    import rlhf_core.model.attention.enable as module
    from rlhf_core.model.attention.kernels import SEGMENT_ATTENTION, block_segments

    def broken(*_, **__):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(module, "kernels_for", lambda *_: ("varlen", "blocks", "sdpa"))
    monkeypatch.setitem(SEGMENT_ATTENTION, "varlen", broken)
    monkeypatch.setitem(SEGMENT_ATTENTION, "blocks", lambda *a, **k: block_segments(*a, **k, compiled=False))
    model = causal("Qwen2").float()
    assert packs(model)
    assert is_packing(model)
    assert model.config._attn_implementation == NAME + "_blocks"
    batch = make_batch()
    with torch.no_grad():  # FlexAttention has no gradient on a CPU
        plain = model_outputs(causal("Qwen2").float(), batch, ("log_probs",)).log_probs
        found = model_outputs(model, batch, ("log_probs",)).log_probs
    assert torch.allclose(found, plain, atol=1e-5)
    monkeypatch.setitem(SEGMENT_ATTENTION, "blocks", broken)
    fallen_back = causal("Qwen2")
    assert packs(fallen_back)
    assert fallen_back.config._attn_implementation == NAME
