from __future__ import annotations

import copy

import pytest
import torch
from rlhf_core import Batch, ConfigError, model_outputs
from rlhf_core.model.attention.kernels import SEGMENT_ATTENTION
from rlhf_core.model.attention.packed import is_packing
from rlhf_core.model.attention.segments import sdpa_segments
from rlhf_core.model.trial import try_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def qwen(model_class=transformers.Qwen2ForCausalLM, **changes):
    torch.manual_seed(0)
    return model_class(transformers.Qwen2Config(**{**SIZES, **changes})).eval()


def scalar(model_class=transformers.Qwen2ForSequenceClassification, **changes):
    return qwen(model_class, num_labels=1, pad_token_id=0, **changes)


def batch():
    ids = torch.tensor([[5, 9, 7, 20, 31, 8], [5, 9, 7, 11, 0, 0]])
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    return Batch(token_ids=ids, attention_mask=mask, response_mask=mask & (torch.arange(6) >= 3))


def own_log_probs(model, rows):
    found = torch.zeros(rows.token_ids.shape)
    for row, length in enumerate(rows.lengths.tolist()):
        logits = model(input_ids=rows.token_ids[row : row + 1, :length]).logits[0, :-1]
        found[row, 1:length] = logits.log_softmax(-1).gather(-1, rows.token_ids[row, 1:length, None]).squeeze(-1)
    return found * rows.response_mask


class Doubled(transformers.Qwen2ForCausalLM):
    """Its own code does something to the logits that no list knows."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2 + torch.arange(64) / 10
        return outputs


class Shifted(transformers.Qwen2ForCausalLM):
    """Its own code does something before its backbone."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=(input_ids + 1) % 64, **kwargs)


def test_a_plain_model_packs_and_its_differences_are_those_of_rounding():
    trial = try_model(qwen(), "policy")
    assert (trial.packing, trial.own_head, trial.declined, trial.notice) == (True, False, "", "")
    assert set(trial.differences) == {"padded", "packed"}
    assert max(trial.differences.values()) < 1e-5


@pytest.mark.parametrize("packing", [True, False])
def test_what_a_model_does_after_its_backbone_is_done_by_its_own_code(packing):
    model, rows = qwen(Doubled), batch()
    assert (model_outputs(model, rows, ("log_probs",)).log_probs - own_log_probs(model, rows)).abs().max() > 0.1
    trial = try_model(model, "policy", packing=packing)
    assert (trial.packing, trial.own_head) == (packing, True)
    outputs = model_outputs(model, rows, ("log_probs", "entropy"), chunk=2)
    expected = own_log_probs(model, rows)
    torch.testing.assert_close(outputs.log_probs, expected, atol=1e-5, rtol=1e-5)
    outputs.log_probs.sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_candidates_and_teachers_use_the_models_own_head_too():
    from rlhf_core.model.forward import top_k_log_probs

    model, rows = qwen(Doubled), batch()
    try_model(model, "reference")
    best, ids = top_k_log_probs(model, rows, 64)
    logits = model(input_ids=rows.token_ids[:1]).logits[0, 2:5].log_softmax(-1)
    torch.testing.assert_close(best[:3].gather(1, ids[:3].argsort(1)), logits, atol=1e-5, rtol=1e-5)
    candidates = torch.zeros(2, 6, 2, dtype=torch.long)
    candidates[rows.response_mask] = ids[:, :2]
    found = model_outputs(model, rows.with_columns(candidate_ids=candidates), ("candidate_log_probs",))
    torch.testing.assert_close(found.candidate_log_probs[rows.response_mask], best[:, :2], atol=1e-5, rtol=1e-5)


def test_a_model_whose_numbers_cannot_be_had_is_refused_with_the_difference():
    with pytest.raises(ConfigError, match=r"Shifted \(qwen2\) cannot be used as policy: padded rows .* by up"):
        try_model(qwen(Shifted), "policy")


def test_packed_rows_that_differ_run_padded_and_say_so(monkeypatch):
    def forgetful(query, key, value, layout, terms):
        """Branches without their prompts."""
        import dataclasses

        cut = [dataclasses.replace(s, prompt_start=0, prompt_stop=0) for s in layout.segments]
        return sdpa_segments(query, key, value, dataclasses.replace(layout, segments=tuple(cut)), terms)

    monkeypatch.setitem(SEGMENT_ATTENTION, "sdpa", forgetful)
    model, rows = qwen(), batch()
    trial = try_model(model, "policy")
    assert not trial.packing
    assert not is_packing(model)
    assert model.config._attn_implementation == "sdpa"
    assert trial.notice.startswith("rows run padded, not packed: packed rows differ from the model's own")
    assert trial.differences["packed"] > 0.1
    found = model_outputs(model, rows, ("log_probs",)).log_probs
    torch.testing.assert_close(found, own_log_probs(model, rows), atol=1e-5, rtol=1e-5)


def test_a_window_that_the_mask_has_and_the_attention_is_not_told_is_seen_beyond_the_rows_of_the_trial():
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    model = qwen(**layers, sliding_window=4096)
    assert try_model(copy.deepcopy(model), "policy").packing
    model.model.layers[0].self_attn.sliding_window = None
    trial = try_model(model, "policy")
    assert trial.declined == "a layer's mask reaches back 4096 tokens, its attention is told all"


def test_a_window_that_the_attention_is_told_and_the_mask_has_not():
    model = qwen()
    model.model.layers[1].self_attn.sliding_window = 4096
    assert "reaches back all tokens, its attention is told 4096" in try_model(model, "policy").declined


def test_sixteen_bits_pass_and_a_wrong_factor_in_sixteen_bits_does_not():
    assert try_model(qwen().bfloat16(), "policy").packing
    wrong = qwen(Doubled).bfloat16()
    assert try_model(wrong, "policy").own_head


def test_a_fresh_critic_is_tried_by_what_its_head_is_given():
    """Its head is zero, and says nothing about the states it is given."""

    class Scaled(transformers.Qwen2ForSequenceClassification):
        def forward(self, input_ids=None, **kwargs):
            return super().forward(inputs_embeds=2 * self.model.embed_tokens(input_ids) + 1)

    for model_class, fine in ((transformers.Qwen2ForSequenceClassification, True), (Scaled, False)):
        model = scalar(model_class)
        torch.nn.init.zeros_(model.score.weight)
        if fine:
            assert try_model(model, "critic").packing
        else:
            with pytest.raises(ConfigError, match="cannot be used as critic"):
                try_model(model, "critic")


def test_a_model_without_the_head_of_its_role_is_refused():
    with pytest.raises(ConfigError, match="has no scalar head"):
        try_model(qwen(), "reward")
    with pytest.raises(ConfigError, match="cannot be used as policy"):
        try_model(scalar(), "policy")


def test_all_ranks_go_by_one_verdict():
    verdicts = []

    def agree(fine, *, doubtful):
        verdicts.append(fine)
        return fine and len(verdicts) != doubtful

    # The third question is about packed rows, after causality and padded rows.
    trial = try_model(qwen(), "policy", agree=lambda fine: agree(fine, doubtful=3))
    assert verdicts == [True, True, True]
    assert trial.declined == "another rank found a difference"
    verdicts.clear()
    with pytest.raises(ConfigError, match="another rank"):
        try_model(qwen(), "policy", agree=lambda fine: agree(fine, doubtful=1))


def test_a_trial_leaves_mode_weights_and_gradients_alone():
    model = qwen().train()
    before = copy.deepcopy(model.state_dict())
    try_model(model, "policy")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_second_trial_finds_the_same():
    model = qwen()
    first = try_model(model, "policy")
    assert try_model(model, "policy") == first
    assert try_model(model, "policy", packing=False).packing is False
    assert not is_packing(model)
