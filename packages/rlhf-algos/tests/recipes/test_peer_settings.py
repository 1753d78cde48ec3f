"""The settings that docs/algorithms.md gives for OpenRLHF and verl, against the formulas written out row by row."""

import pytest
import torch
from rlhf_algos.advantages.reward_shaping import RewardShaping
from rlhf_algos.losses.online.clipped import PPOClipConfig, ppo_clip
from rlhf_algos.off_policy import OffPolicyCorrection, correct_off_policy
from rlhf_algos.recipes.grpo import GRPO
from rlhf_algos.recipes.ppo import PPO
from rlhf_core import Batch, ModelOutputs

ROWS, LENGTH = 6, 5
MASK = torch.arange(LENGTH) < torch.tensor([5, 3, 2, 4, 5, 2])[:, None]
MASK = MASK & (torch.arange(LENGTH) > 0)
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
GROUPS = [[0, 1, 2], [3, 4, 5]]
BETA = 0.1


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCORES, OLD, REFERENCE = normal(ROWS), normal(ROWS, LENGTH, seed=1), normal(ROWS, LENGTH, seed=2)
VALUES, ROLLOUT = normal(ROWS, LENGTH, seed=3), normal(ROWS, LENGTH, seed=4)


def batch(**columns):
    columns = {"old_log_probs": OLD, "ref_log_probs": REFERENCE, "values": VALUES, **columns}
    return Batch(
        token_ids=torch.ones(ROWS, LENGTH, dtype=torch.long),
        attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def prepared(recipe):
    return recipe.prepare(batch(), SCORES, IDS, recipe.kl_coef)[0]["advantages"]


def group_mean(row):
    members = next(group for group in GROUPS if row in group)
    return SCORES[members].mean()


def rewards_to_go(row_scores):
    """OpenRLHF: the score at the last token, minus beta k1 at each, summed from the end."""
    result = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    for row in range(ROWS):
        running = row_scores[row]
        for t in reversed(MASK[row].nonzero().flatten().tolist()):
            running = running - BETA * (OLD[row, t] - REFERENCE[row, t])
            result[row, t] = running
    return result


def normalised(values, correction, eps, add):
    inside = values[MASK]
    variance = inside.var(correction=correction)
    variance = variance + eps if add else variance.clamp(min=eps)
    return (values - inside.mean()) / variance.sqrt() * MASK


def test_openrlhf_reinforce_plus_plus():
    recipe = GRPO(advantage="reinforce", whiten=True, kl_coef=BETA, kl_in="reward", kl_estimator="k1")
    torch.testing.assert_close(prepared(recipe), normalised(rewards_to_go(SCORES), 0, 1e-8, False))


def test_openrlhf_reinforce_baseline_clips_after_the_baseline():
    centred = torch.stack([SCORES[row] - group_mean(row) for row in range(ROWS)]).clamp(-0.5, 0.5)
    recipe = GRPO(
        advantage_options={"scale": "none"},
        whiten=True,
        kl_coef=BETA,
        kl_in="reward",
        kl_estimator="k1",
        shaping=RewardShaping(clip=(-0.5, 0.5), clip_after_baseline=True),
    )
    shaped = recipe.prepare(batch(), SCORES, IDS, BETA)[0]["advantages"]
    # The scores pass through float64 here, so the comparison is exact to rounding.
    torch.testing.assert_close(shaped, normalised(rewards_to_go(centred), 0, 1e-8, False))


def test_openrlhf_group_norm():
    recipe = GRPO(advantage_options={"eps": 1e-9})
    for group in GROUPS:
        expected = (SCORES[group] - SCORES[group].mean()) / (SCORES[group].std() + 1e-9)
        torch.testing.assert_close(prepared(recipe)[group], expected[:, None] * MASK[group])


def test_verl_reinforce_plus_plus_baseline():
    centred = torch.stack([SCORES[row] - group_mean(row) for row in range(ROWS)])
    options = {"unbiased": True, "eps": 1e-8, "eps_mode": "add"}
    recipe = GRPO(advantage_options={"scale": "none"}, whiten=True, whiten_options=options)
    torch.testing.assert_close(prepared(recipe), normalised(centred[:, None] * MASK, 1, 1e-8, True))


def test_verl_grpo_with_kl_in_the_reward():
    """verl's use_kl_in_reward: the group sees the score minus the summed KL."""
    recipe = GRPO(kl_coef=BETA, kl_in="score", kl_estimator="k1", advantage_options={"eps": 1e-6})
    totals = SCORES - BETA * ((OLD - REFERENCE) * MASK).sum(1)
    for group in GROUPS:
        expected = (totals[group] - totals[group].mean()) / (totals[group].std() + 1e-6)
        torch.testing.assert_close(prepared(recipe)[group], expected[:, None] * MASK[group])


def test_ppo_with_kl_reward():
    recipe = PPO(kl_coef=BETA, gamma=0.9, lam=0.8, whiten=False)
    expected = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    for row in range(ROWS):
        advantage = following = torch.zeros((), dtype=torch.float64)
        positions = MASK[row].nonzero().flatten().tolist()
        for t in reversed(positions):
            reward = -BETA * (OLD[row, t] - REFERENCE[row, t]) + (SCORES[row] if t == positions[-1] else 0)
            advantage = reward + 0.9 * following - VALUES[row, t] + 0.72 * advantage
            following = VALUES[row, t]
            expected[row, t] = advantage
    torch.testing.assert_close(prepared(recipe), expected)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_openrlhf_sampler_correction(kind):
    low, high = 0.5, 2.0
    corrections = {
        "tis": [OffPolicyCorrection(low=low, high=high)],
        "icepop": [OffPolicyCorrection(mode="mask", low=low, high=high)],
        "seq-mask-tis": [
            OffPolicyCorrection(level="geometric", mode="reject", low=low, high=high),
            OffPolicyCorrection(high=None),
        ],
    }[kind]
    rows, _ = correct_off_policy(batch(rollout_log_probs=ROLLOUT), corrections)
    log_probs, advantages = normal(ROWS, LENGTH, seed=5), normal(ROWS, LENGTH, seed=6)
    config = PPOClipConfig(aggregation="seq_mean_token_mean")
    terms = ppo_clip(ModelOutputs(log_probs=log_probs), rows.with_columns(advantages=advantages), config)
    means = []
    for row in range(ROWS):
        inside = MASK[row]
        ratio = (log_probs[row] - OLD[row]).exp()[inside]
        gain = torch.minimum(ratio * advantages[row][inside], ratio.clamp(0.8, 1.2) * advantages[row][inside])
        weight = (OLD[row] - ROLLOUT[row]).exp()[inside]
        if kind == "tis":
            weight = weight.clamp(low, high)
        elif kind == "icepop":
            weight = weight * ((weight >= low) & (weight <= high))
        else:
            weight = weight * (low <= float(weight.log().mean().exp()) <= high)
        means.append(-(weight * gain).mean())
    torch.testing.assert_close(terms.total / terms.weight, torch.stack(means).mean())
