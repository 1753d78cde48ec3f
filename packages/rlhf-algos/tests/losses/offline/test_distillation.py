import math

import pytest
import torch
from rlhf_algos.losses.offline.distillation import (
    DivergenceConfig,
    OnPolicyDistillationConfig,
    chunked_divergence,
    distillation_terms,
    divergence_from_logits,
    divergence_from_top_k,
    on_policy_distillation,
)
from rlhf_core import Batch, ConfigError, ModelOutputs

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
STUDENT, TEACHER = Q.log(), P.log()


def kl(p, q):
    return float((p * (p / q).log()).sum())


def test_divergences_by_hand():
    assert float(divergence_from_logits(STUDENT + 3, TEACHER - 1, DivergenceConfig())) == pytest.approx(kl(P, Q))
    reverse = DivergenceConfig(divergence="reverse_kl")
    assert float(divergence_from_logits(STUDENT, TEACHER, reverse)) == pytest.approx(kl(Q, P))
    mixture = 0.3 * P + 0.7 * Q
    jsd = DivergenceConfig(divergence="jsd", beta=0.3)
    expected = 0.3 * kl(P, mixture) + 0.7 * kl(Q, mixture)
    assert float(divergence_from_logits(STUDENT, TEACHER, jsd)) == pytest.approx(expected)


def test_temperature():
    hot = DivergenceConfig(temperature=2.0)
    p, q = P.sqrt() / P.sqrt().sum(), Q.sqrt() / Q.sqrt().sum()
    assert float(divergence_from_logits(STUDENT, TEACHER, hot)) == pytest.approx(kl(p, q))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_zero_only_for_equal_distributions_and_never_negative(divergence):
    config = DivergenceConfig(divergence=divergence)
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64)
    assert divergence_from_logits(logits, logits, config).abs().max() < 1e-12
    assert (divergence_from_logits(logits, logits.flip(0) * 2, config)[[0, 1, 3, 4]] > 0).all()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("other", ["lump", "renormalize"])
def test_all_tokens_as_top_k_is_the_full_divergence(divergence, other):
    config = DivergenceConfig(divergence=divergence, other_tokens=other)
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4, 6, dtype=torch.float64)
    top = teacher.log_softmax(-1).sort(dim=-1, descending=True)
    got = divergence_from_top_k(student, top.values, top.indices, config)
    torch.testing.assert_close(got, divergence_from_logits(student, teacher, config), atol=1e-6, rtol=0)


def test_top_k_by_hand():
    ids = torch.tensor([0, 1])
    lumped = divergence_from_top_k(STUDENT, TEACHER[:2], ids, DivergenceConfig())
    assert float(lumped) == pytest.approx(kl(P, Q))  # the one token left out is the lump
    renormal = divergence_from_top_k(STUDENT, TEACHER[:2], ids, DivergenceConfig(other_tokens="renormalize"))
    p, q = P[:2] / P[:2].sum(), Q[:2] / Q[:2].sum()
    assert float(renormal) == pytest.approx(kl(p, q))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck_and_excluded_tokens(divergence):
    config = DivergenceConfig(divergence=divergence)
    student = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: divergence_from_logits(x, teacher, config), (student,))
    masked = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    value = divergence_from_logits(masked, masked.detach(), config).sum()
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(masked.grad).all()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_chunks_give_the_same_values_and_gradients(divergence, tokens):
    config = DivergenceConfig(divergence=divergence, temperature=1.5)
    torch.manual_seed(0)
    head, teacher_head = torch.nn.Linear(4, 11).double(), torch.nn.Linear(6, 11).double()
    states = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    teacher_states = torch.randn(tokens, 6, dtype=torch.float64)
    whole = divergence_from_logits(head(states), teacher_head(teacher_states).detach(), config)
    chunked = chunked_divergence((states, head), (teacher_states, teacher_head), config, chunk=3)
    torch.testing.assert_close(chunked, whole)
    if tokens:
        weights = torch.randn(tokens, dtype=torch.float64)
        leaves = (states, head.weight, head.bias)
        expected = torch.autograd.grad((whole * weights).sum(), leaves)
        for got, want in zip(torch.autograd.grad((chunked * weights).sum(), leaves), expected, strict=True):
            torch.testing.assert_close(got, want)
        assert teacher_head.weight.grad is None


def test_terms_mix_in_the_likelihood():
    mask = torch.tensor([[False, True, True]])
    divergence, log_probs = torch.tensor([[9, 1.0, 2.0]]), torch.tensor([[9, -1.0, -3.0]])
    terms = distillation_terms(divergence, mask, kd_coef=0.25, log_probs=log_probs)
    assert float(terms.total) == pytest.approx(0.25 * 3 + 0.75 * 4)
    assert float(terms.weight) == 2
    with pytest.raises(ConfigError, match="log_probs"):
        distillation_terms(divergence, mask, kd_coef=0.5)


def test_on_policy_by_hand():
    mask = torch.tensor([[False, True, True]])
    log_probs = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    batch = Batch(
        token_ids=torch.zeros(1, 3, dtype=torch.long),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        response_mask=mask,
        columns={"teacher_log_probs": torch.tensor([[0.0, -3.0, -1.0]])},
    )
    terms = on_policy_distillation(ModelOutputs(log_probs=log_probs), batch, OnPolicyDistillationConfig())
    terms.total.backward()
    assert log_probs.grad[0].tolist() == [0, 2, -1]  # less of what the teacher finds unlikely
    assert terms.metrics["reverse_kl"].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "costs"),
    [
        ({"gamma": 0.5}, [2 + 0.5 * (-1 + 0.5 * 4), -1 + 0.5 * 4, 4]),
        ({"gamma": 0.5, "length_normalized": True}, [2.5 / 1.75, 1 / 1.5, 4]),
        ({"gamma": 1.0, "length_normalized": True}, [5 / 3, 3 / 2, 4]),
    ],
)
def test_a_token_is_charged_with_what_follows(options, costs):
    """Gaps 2, -1 and 4 at the sampled tokens, between them a token of the environment."""
    mask = torch.tensor([[True, True, False, True]])
    log_probs = torch.tensor([[-1.0, -2.0, 9.0, -1.0]], requires_grad=True)
    batch = Batch(
        token_ids=torch.zeros(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        response_mask=mask,
        columns={"teacher_log_probs": torch.tensor([[-3.0, -1.0, 9.0, -5.0]])},
    )
    terms = on_policy_distillation(ModelOutputs(log_probs=log_probs), batch, OnPolicyDistillationConfig(**options))
    terms.total.backward()
    assert log_probs.grad[0].tolist() == pytest.approx([costs[0], costs[1], 0, costs[2]])
    assert terms.metrics["reverse_kl"].value == pytest.approx(5 / 3)


def test_refused():
    with pytest.raises(ConfigError, match="forward_kl"):
        DivergenceConfig(divergence="jsd", beta=0.0)
    with pytest.raises(ConfigError, match="temperature"):
        DivergenceConfig(temperature=0.0)
    with pytest.raises(ConfigError, match="lump"):
        DivergenceConfig(other_tokens="drop")  # type: ignore[arg-type]
