import math

import pytest
import torch
from rlhf_algos.mismatch import mismatch_metrics
from rlhf_algos.off_policy import OffPolicyCorrection, correct_off_policy, effective_sample_size
from rlhf_core import Batch, ConfigError

MASK = torch.tensor([[False, True, True], [False, True, False]])
RATIOS = torch.tensor([[5.0, 4.0, 0.25], [5.0, 3.0, 5.0]])
LOG_RATIO = RATIOS.log().masked_fill(~MASK, 0)


def weights(**options):
    return OffPolicyCorrection(**options).weights(LOG_RATIO, MASK)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"high": 2.0}, [[0, 2, 0.25], [0, 2, 0]]),
        ({"high": 3.5, "low": 0.5}, [[0, 3.5, 0.5], [0, 3, 0]]),
        ({"high": None}, [[0, 4, 0.25], [0, 3, 0]]),
        ({"mode": "mask", "low": 0.2, "high": 3.5}, [[0, 0, 0.25], [0, 3, 0]]),
        ({"mode": "reject", "low": 0.2, "high": 3.5}, [[0, 0, 1], [0, 1, 0]]),
        ({"level": "sequence", "high": 2.0}, [[0, 1, 1], [0, 2, 0]]),
        ({"level": "sequence", "mode": "mask", "high": 2.0}, [[0, 1, 1], [0, 0, 0]]),
        ({"level": "geometric", "mode": "reject", "low": 0.9, "high": 1.1}, [[0, 1, 1], [0, 0, 0]]),
        ({"high": 2.0, "normalize": True}, [[0, 2 / (4.25 / 3), 0.25 / (4.25 / 3)], [0, 2 / (4.25 / 3), 0]]),
        ({"level": "sequence", "high": None, "normalize": True}, [[0, 0.5, 0.5], [0, 1.5, 0]]),
    ],
)
def test_weights_by_hand(options, expected):
    torch.testing.assert_close(weights(**options), torch.tensor(expected, dtype=torch.float32))


# d = log 4, log 1/4; log 3. k2: 0.961, 0.961; 0.604. k3: 1.614, 0.636; 0.901.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"statistic": "k2", "high": 0.7}, [[0, 0, 0], [0, 1, 0]]),
        ({"statistic": "k3", "high": 1.0}, [[0, 0, 1], [0, 1, 0]]),
        ({"statistic": "k2", "level": "sequence", "high": 1.93}, [[0, 1, 1], [0, 1, 0]]),
        ({"statistic": "k2", "level": "sequence", "high": 1.9}, [[0, 0, 0], [0, 1, 0]]),
        ({"statistic": "k3", "level": "sequence", "high": 2.2}, [[0, 0, 0], [0, 1, 0]]),
        ({"statistic": "k3", "level": "geometric", "high": 1.1}, [[0, 0, 0], [0, 1, 0]]),
        ({"statistic": "k3", "level": "geometric", "high": 1.2}, [[0, 1, 1], [0, 1, 0]]),
        ({"statistic": "k3", "level": "max", "high": 1.5}, [[0, 0, 0], [0, 1, 0]]),
        ({"statistic": "k2", "level": "max", "high": 1.0}, [[0, 1, 1], [0, 1, 0]]),
    ],
)
def test_rejection_by_divergence(options, expected):
    torch.testing.assert_close(weights(mode="reject", **options), torch.tensor(expected, dtype=torch.float32))


def test_diagnostics_by_hand():
    """Token ratios 4, 1/4 and 3; ratios of the responses 1 and 3; of their perplexities 1 and 1/3."""
    metrics = mismatch_metrics(LOG_RATIO, MASK)
    assert metrics["mismatch_chi2_token"].value == pytest.approx((16 + 1 / 16 + 9) / 3 - 1)
    assert metrics["mismatch_chi2_sequence"].value == pytest.approx((1 + 9) / 2 - 1)
    assert metrics["mismatch_perplexity_ratio"].value == pytest.approx((1 + 1 / 3) / 2)


def batch(old, rollout):
    return Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": old, "rollout_log_probs": rollout},
    )


def test_corrections_multiply_and_dropped_tokens_leave_the_mask():
    corrections = [
        OffPolicyCorrection(level="geometric", mode="reject", low=0.9, high=1.1, drop=True),
        OffPolicyCorrection(high=2.0),
    ]
    got, metrics = correct_off_policy(batch(LOG_RATIO, torch.zeros(2, 3)), corrections)
    torch.testing.assert_close(got["importance_weights"], torch.tensor([[0, 2, 0.25], [0, 0, 0]]))
    assert got.response_mask.tolist() == [[False, True, True], [False, False, False]]
    assert metrics["off_policy_masked"].value == pytest.approx(1 / 3)
    assert metrics["off_policy_weight"].value == pytest.approx(0.75)
    assert metrics["effective_sample_size"].value == pytest.approx(2.25**2 / (3 * (4 + 1 / 16)))
    assert metrics["mismatch_kl"].value == pytest.approx(-math.log(3) / 3)
    assert metrics["mismatch_k3"].value == pytest.approx((4 + 0.25 + 3) / 3 - 1 - math.log(3) / 3)


def test_same_policy_changes_nothing():
    same = torch.randn(2, 3)
    for mode in ("truncate", "mask", "reject"):
        got, metrics = correct_off_policy(batch(same, same), [OffPolicyCorrection(mode=mode, low=0.5, high=2.0)])
        torch.testing.assert_close(got["importance_weights"], MASK.float())
        assert metrics["effective_sample_size"].value == pytest.approx(1.0)


def test_without_corrections_only_diagnostics():
    got, metrics = correct_off_policy(batch(LOG_RATIO, torch.zeros(2, 3)), [])
    assert "importance_weights" not in got
    assert "mismatch_kl" in metrics


def test_unknown_rollout_log_prob_counts_as_ratio_one():
    rollout = torch.tensor([[math.nan, math.nan, 0.0], [0.0, 0.0, 0.0]])
    got, _ = correct_off_policy(batch(torch.zeros(2, 3), rollout), [OffPolicyCorrection()])
    torch.testing.assert_close(got["importance_weights"], MASK.float())


@pytest.mark.parametrize("gap", [-100.0, 100.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_gaps(gap, level):
    log_ratio = torch.full((2, 3), gap).masked_fill(~MASK, 0)
    free = OffPolicyCorrection(level=level, high=None).weights(log_ratio, MASK)
    assert torch.isfinite(free).all()
    masked = OffPolicyCorrection(level=level, mode="mask", low=0.5).weights(log_ratio, MASK)
    assert not masked.any()
    for statistic in ("k2", "k3"):
        assert (
            not OffPolicyCorrection(level=level, mode="reject", statistic=statistic).weights(log_ratio, MASK).any()
        )
    assert all(math.isfinite(mean.value) for mean in mismatch_metrics(log_ratio, MASK).values())


def test_effective_sample_size_of_nothing():
    assert effective_sample_size(torch.zeros(2, 3), MASK) == 0.0


def test_refused_settings():
    with pytest.raises(ConfigError, match="geometric"):
        OffPolicyCorrection(level="row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="truncate, mask, reject"):
        OffPolicyCorrection(mode="clip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode: reject"):
        OffPolicyCorrection(statistic="k3")
    with pytest.raises(ConfigError, match="mode: reject"):
        OffPolicyCorrection(statistic="k3", mode="reject", low=0.1)
    with pytest.raises(ConfigError, match="k2 or k3"):
        OffPolicyCorrection(level="max", mode="reject")
    with pytest.raises(ConfigError, match="low <= high"):
        OffPolicyCorrection(low=3.0, high=2.0)
