"""About thirty model families, each against its own full logits; `nox -s families` runs every type there is."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import tiny_model
from family_verdicts import Verdict, judge, rows
from rlhf_core import CapabilityError, model_outputs
from rlhf_core.model.trial import try_model

PACKED = {
    "llama": "",
    "gpt2": "",
    "qwen2": "window",
    "qwen3_moe": "window",
    "mistral": "window",
    "mixtral": "window",
    "phi3": "window",
    "starcoder2": "window",
    "gemma2": "window, soft cap",
    "gemma3_text": "window",
    "olmo3": "window",
    "cohere2": "window, head",
    "gpt_oss": "window, sinks",
    "granite": "head",
    "deepseek_v3": "",
    "minicpm3": "head",
    "hyperclovax": "head",
    "modernbert-decoder": "window, own head",
}
"""Families whose rows run packed, and what is special about them."""

PADDED = {
    "jamba": "carries a state",
    "mamba2": "carries a state",
    "falcon_h1": "carries a state",
    "recurrent_gemma": "carries a state",
    "llama4_text": "reaches back 8192 tokens, its attention is told all",
    "phimoe": "reaches back 4 tokens, its attention is told all",
    "lfm2": "packed rows differ",
    "deepseek_v32": "uses indices",
    "nemotron": "is not given the layout",
    "inkling_text": "takes no other attention",
    "rembert": "takes no other attention",
}
"""Families whose rows run padded, and why."""

ENCODERS = ["bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"]


def assert_equal(verdict: Verdict, outputs: str) -> None:
    assert verdict.outcome == "equal", verdict.reason
    assert set(verdict.differences) == {*outputs.split(), "gradient"}
    assert max(verdict.differences.values()) < 1e-4


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_with_shared_prompts_give_the_models_own_numbers(kind):
    verdict = judge(tiny_model(kind), "policy", packing=True)
    assert_equal(verdict, "log_probs entropy")
    assert verdict.own_head == ("own head" in PACKED[kind])


@pytest.mark.parametrize("kind", PADDED)
def test_families_that_cannot_be_packed_say_why_and_are_right_padded(kind):
    model = tiny_model(kind)
    verdict = judge(model, "policy", packing=True)
    assert verdict.outcome == "declined"
    assert PADDED[kind] in verdict.reason
    assert_equal(judge(model, "policy", packing=False), "log_probs entropy")


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_models_that_see_later_tokens_are_refused_by_name(kind):
    model = tiny_model(kind, is_decoder=False) if kind == "bert" else tiny_model(kind)
    verdict = judge(model, "policy", packing=True)
    assert verdict.outcome == "refused"
    assert f"({kind})" in verdict.reason
    assert "depend on later tokens" in verdict.reason


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma2", "gpt_oss"])
def test_values_of_critics(kind):
    model = tiny_model(kind, scalar=True)
    for packing in (True, False):
        assert_equal(judge(model, "critic", packing=packing), "values")


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_reward_models_give_their_own_scores_and_no_values(kind):
    model = tiny_model(kind, scalar=True)
    verdict = judge(model, "reward", packing=False)
    assert_equal(verdict, "scores")
    assert verdict.own_head
    assert judge(model, "reward", packing=True).reason == "its scores are made by its own forward pass"
    assert judge(model, "critic", packing=False).outcome == "refused"
    ours = copy.deepcopy(model)
    try_model(ours, "reward")
    with pytest.raises(CapabilityError, match="no value for each token"):
        model_outputs(ours, rows(), ("values",))


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_scores_of_causal_reward_models(kind):
    model = tiny_model(kind, scalar=True)
    for packing in (True, False):
        assert_equal(judge(model, "reward", packing=packing), "scores")


def test_a_soft_cap_that_sdpa_leaves_out_is_kept_in_padded_rows():
    """Transformers' `sdpa`, the default of Gemma 2, drops it without a word."""
    model = tiny_model("gemma2")
    assert model.config._attn_implementation == "sdpa"
    ids = rows().token_ids[:1]
    with torch.no_grad():
        dropped = model(input_ids=ids).logits
        trial = try_model(model, "policy", packing=False)
        assert not trial.packing
        kept = model(input_ids=ids).logits
    assert (dropped - kept).abs().max() > 1e-2
    assert model.config._attn_implementation == "eager"
