import math

import pytest
import torch
from rlhf_algos.losses.offline.preference import DPOConfig, dpo, f_score, with_sft_divisor
from rlhf_core import Batch, ConfigError, DataError, ModelOutputs

MASK = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1]]).bool()
LOG_PROBS = torch.tensor([[0, -1.0, -0.5], [0, -2.0, 0], [0, -1.0, -1.0], [0, 0, -0.5]])
REFERENCE = torch.tensor([-2.0, -1.5, -1.0, -1.0])
# log-ratios: 0.5, -0.5, -1.0, 0.5


def batch(**columns):
    return Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"ref_log_probs_sum": REFERENCE, **columns},
        rows_per_unit=2,
    )


def run(rows=None, **options):
    return dpo(ModelOutputs(log_probs=LOG_PROBS), rows or batch(), DPOConfig(**options))


def softplus(x):
    return math.log1p(math.exp(x))


def test_dpo_by_hand():
    terms = run(beta=2.0)
    assert float(terms.total) == pytest.approx(softplus(-2.0) + softplus(3.0))
    assert float(terms.weight) == 2
    assert terms.metrics["accuracy"].value == 0.5
    assert terms.metrics["margin"].value == pytest.approx(2 * (1 - 1.5) / 2)
    assert terms.metrics["rewards_chosen"].value == pytest.approx(2 * (0.5 - 1) / 2)
    assert terms.metrics["log_probs_rejected"].value == pytest.approx(-1.25)


def test_label_smoothing():
    terms = run(beta=2.0, label_smoothing=0.25)
    expected = 0.75 * (softplus(-2.0) + softplus(3.0)) + 0.25 * (softplus(2.0) + softplus(-3.0))
    assert float(terms.total) == pytest.approx(expected)


def test_both_ipo_conventions():
    assert float(run(loss="ipo", beta=0.5).total) == pytest.approx((1 - 1) ** 2 + (-1.5 - 1) ** 2)
    normalized = run(loss="ipo", beta=0.5, length_normalized=True)
    assert float(normalized.total) == pytest.approx((0.75 - 1) ** 2 + (-1 - 1) ** 2)


def test_an_f_divergence_takes_the_whole_responses_ratio():
    """f'(log-ratio) / length, not f'(log-ratio / length): log-ratios 0.5, -0.5, -1, 0.5 of 2, 1, 2, 1 tokens."""
    f = [1 - math.exp(-h) for h in (0.5, -0.5, -1.0, 0.5)]
    means = [f[0] / 2, f[1], f[2] / 2, f[3]]
    options = {"beta": 0.5, "f_divergence": "forward_kl", "length_normalized": True}
    expected = (means[0] - means[1] - 1) ** 2 + (means[2] - means[3] - 1) ** 2
    assert float(run(loss="ipo", **options).total) == pytest.approx(expected)
    expected = softplus(-0.5 * (means[0] - means[1])) + softplus(-0.5 * (means[2] - means[3]))
    assert float(run(**options).total) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["nca", "bco", "sppo", "apo_zero", "apo_down", "aot", "aot_unpaired"])
def test_f_divergences_are_refused_by_losses_that_do_not_take_the_scores_difference(loss):
    with pytest.raises(ConfigError, match="reverse_kl"):
        DPOConfig(loss=loss, f_divergence="js_divergence")


def test_reference_free_reads_no_reference():
    rows = Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        rows_per_unit=2,
    )
    terms = run(rows, beta=1.0, reference_free=True)
    assert float(terms.total) == pytest.approx(softplus(-0.5) + softplus(1.5))
    assert not DPOConfig(reference_free=True).needs_reference


def test_sft_term_by_sequence_and_by_token():
    plain = run()
    sequence = run(sft_coef=2.0)
    assert float(sequence.total - plain.total) == pytest.approx(2 * (0.75 + 1.0))
    token = run(with_sft_divisor(batch()), sft_coef=2.0, sft_mean="token")
    mean = float((token.total - plain.total) / token.weight)
    assert mean == pytest.approx(2 * 3.5 / 4)  # 3.5 nats over the 4 chosen tokens


def test_f_divergences_by_hand():
    h = torch.tensor([0.3])
    assert float(f_score(h, "reverse_kl", 0.5)) == pytest.approx(0.3)
    assert float(f_score(h, "forward_kl", 0.5)) == pytest.approx(1 - math.exp(-0.3))
    assert float(f_score(h, "js_divergence", 0.5)) == pytest.approx(
        math.log(2 * math.exp(0.3) / (1 + math.exp(0.3)))
    )
    assert float(f_score(h, "alpha_divergence", 0.5)) == pytest.approx((math.exp(-0.15) - 1) / -0.5)
    assert float(f_score(h, "alpha_divergence", 1.0)) == pytest.approx(0.3)
    for kind in ("forward_kl", "js_divergence", "alpha_divergence"):
        assert torch.isfinite(f_score(torch.tensor([-100.0, 100.0]), kind, 0.5)).all()


def test_a_tail_beyond_the_shorter_response_counts_less():
    """Responses of 2 and 1 tokens twice: the second token of the longer one has weight 1/4, of the reference's
    too."""
    rows = batch(ref_log_probs_shared=torch.tensor([-1.2, -1.5, -0.4, -1.0]))
    h = [-1.0 + 1.2 + 0.25 * (-0.5 + 0.8), -0.5, -1.0 + 0.4 + 0.25 * (-1.0 + 0.6), 0.5]
    expected = softplus(-2 * (h[0] - h[1])) + softplus(-2 * (h[2] - h[3]))
    assert float(run(rows, beta=2.0, ld_alpha=0.25).total) == pytest.approx(expected, rel=1e-5)
    assert float(run(rows, beta=2.0, ld_alpha=1.0).total) == pytest.approx(float(run(beta=2.0).total))


def test_pairs_weigh_as_their_responses_are_likely():
    """Mean of log p - log sum p^2: -0.25 and -1.5 in the first pair, -0.5 and 0 in the second."""
    outputs = ModelOutputs(log_probs=LOG_PROBS, log_collision=torch.full((4, 3), -0.5))
    terms = dpo(outputs, batch(), DPOConfig(beta=2.0, weighted=True))
    expected = math.exp(-1.75) * softplus(-2.0) + math.exp(-0.5) * softplus(3.0)
    assert float(terms.total) == pytest.approx(expected)
    assert float(terms.weight) == 2
    assert DPOConfig(weighted=True).outputs == ("log_probs", "log_collision")
    with pytest.raises(ConfigError, match="log_collision"):
        run(weighted=True)


def test_exploration_makes_the_references_own_responses_less_likely():
    rows = batch(from_reference=torch.tensor([False, True, True, False]))
    more = run(rows, exploration_coef=0.5).total - run().total
    assert float(more) == pytest.approx(0.5 * (-2.0 - 2.0))


def test_rows_that_are_not_pairs_are_refused():
    rows = Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=MASK,
        response_mask=MASK,
        columns=batch().columns,
    )
    with pytest.raises(DataError, match="rows_per_unit=2"):
        run(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dpo"}, "sigmoid"),
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss": "exo"}, "0.001"),
        ({"f_divergence": "kl"}, "reverse_kl"),
        ({"ld_alpha": 1.5}, "ld_alpha"),
        ({"loss": "aot", "ld_alpha": 0.5}, "AOT"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        DPOConfig(**options)
