import pytest
import torch
from rlhf_algos.recipes.named import make_recipe
from rlhf_algos.recipes.ppo import PPO
from rlhf_core import Batch, ConfigError

MASK = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, False, False]])
SCORES = torch.tensor([1.0, 3.0, 5.0, 5.0])
IDS = torch.tensor([0, 0, 1, 1])


def batch(**columns):
    columns = {"old_log_probs": torch.full((4, 3), -1.0), "values": torch.zeros(4, 3), **columns}
    return Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def test_ppo_adds_returns_and_old_values():
    recipe = PPO(whiten=False, lam=1.0, kl_coef=0.5)
    assert recipe.needs_critic
    assert recipe.needs_reference
    values = torch.full((4, 3), 0.5)
    ready, metrics = recipe.prepare(batch(values=values, ref_log_probs=torch.full((4, 3), -2.0)), SCORES, IDS, 0.5)
    assert ready["returns"].tolist() == [[0, 0, 0.5], [0, 2.5, 0], [0, 4, 4.5], [0, 0, 0]]
    assert ready["advantages"].tolist() == [[0, -0.5, 0], [0, 2, 0], [0, 3.5, 4], [0, 0, 0]]
    assert ready["old_values"] is values
    assert metrics["kl"].value == pytest.approx(1.0)
    assert recipe.value_loss().outputs == ("values",)  # type: ignore[union-attr]
    assert recipe.policy_loss().config.kl_coef == 0


def test_ppo_whitens():
    ready, _ = PPO().prepare(batch(values=torch.zeros(4, 3)), SCORES, IDS, 0.0)
    assert float(ready["advantages"][MASK].mean()) == pytest.approx(0, abs=1e-6)
    assert PPO().needs_reference is False


def test_ppo_gives_rewards_of_turns_where_they_fell():
    """Two turns of one token, an environment token between: 0.5 for the first, the other 1.5 of 2 at the end."""
    mask = torch.tensor([[False, True, False, True]])
    batch = Batch(
        token_ids=torch.ones(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        response_mask=mask,
        columns={
            "values": torch.zeros(1, 4),
            "old_log_probs": torch.zeros(1, 4),
            "rewards": torch.tensor([[0.0, 0.5, 0.0, 0.0]]),
        },
    )
    recipe = PPO(gamma=1.0, lam=1.0, whiten=False)
    prepared, _ = recipe.prepare(batch, torch.tensor([2.0]), torch.tensor([0]), kl_coef=0.0)
    assert prepared["returns"].tolist() == [[0.0, 2.0, 0.0, 1.5]]


def test_kl_in_the_score_is_given_at_the_end():
    recipe = PPO(whiten=False, lam=1.0, kl_coef=0.5, kl_in="score")
    ready, metrics = recipe.prepare(batch(ref_log_probs=torch.full((4, 3), -2.0)), SCORES, IDS, 0.5)
    assert ready["returns"].tolist() == [[0, 0, 0], [0, 2.5, 0], [0, 4, 4], [0, 0, 0]]
    assert metrics["reference_kl"].value == pytest.approx(1.0)


def test_the_clamps_of_the_kl_reach_the_rewards():
    rows = batch(ref_log_probs=torch.full((4, 3), -5.0))
    recipe = PPO(whiten=False, lam=1.0, kl_coef=1.0, kl_value_limit=0.5)
    ready, _ = recipe.prepare(rows, SCORES, IDS, 1.0)
    assert ready["returns"][0].tolist() == [0, 0, 0.5]
    recipe = PPO(whiten=False, lam=1.0, kl_coef=1.0, kl_estimator="k3", kl_log_ratio_limit=1.0)
    ready, _ = recipe.prepare(rows, SCORES, IDS, 1.0)
    k3 = torch.tensor(-1.0).exp().item()
    assert ready["returns"][0].tolist() == pytest.approx([0, 1 - 2 * k3, 1 - k3])


def test_rewards_can_be_whitened_around_their_mean():
    """Rewards 0, 1, 3, 0, 5 at the sampled tokens: mean 1.8."""
    recipe = PPO(whiten=False, whiten_rewards=True, gamma=0.0)
    ready, _ = recipe.prepare(batch(), SCORES, IDS, 0.0)
    rewards = torch.tensor([0.0, 1.0, 3.0, 0.0, 5.0])
    expected = (rewards - 1.8) / rewards.std(correction=0) + 1.8
    torch.testing.assert_close(ready["advantages"][MASK], expected)


def test_the_critic_may_decay_otherwise_than_the_policy():
    rows = batch(values=torch.full((4, 3), 0.5))
    recipe = PPO(whiten=False, lam=0.0, lam_critic=1.0)
    ready, _ = recipe.prepare(rows, SCORES, IDS, 0.0)
    assert ready["advantages"].tolist()[0] == [0, 0, 0.5]  # 0 + 0.5 - 0.5, then 1 - 0.5
    assert ready["returns"].tolist() == [[0, 1, 1], [0, 3, 0], [0, 5, 5], [0, 0, 0]]


def test_the_decay_may_follow_the_length():
    """With alpha 0.8 a response of two tokens has lam 1 - 1 / 1.6, one of a token 0."""
    recipe = PPO(whiten=False, length_alpha=0.8)
    ready, _ = recipe.prepare(batch(), SCORES, IDS, 0.0)
    lam = 1 - 1 / 1.6
    assert ready["advantages"][0].tolist() == pytest.approx([0, lam, 1])
    assert ready["returns"][2].tolist() == pytest.approx([0, 5 * lam, 5])


def test_refused_settings():
    with pytest.raises(ConfigError, match="lam"):
        PPO(lam=2.0)
    with pytest.raises(ConfigError, match="length_alpha"):
        PPO(length_alpha=0.0)
    with pytest.raises(ConfigError, match="clip_range"):
        PPO(value_loss_options={"clip": 0.1})
    with pytest.raises(ConfigError, match="did you mean 'kind'"):
        PPO(whiten_options={"kin": "center"})
    with pytest.raises(ConfigError, match="kl_value_limit"):
        PPO(kl_value_limit=0.0)


def test_vapo_learns_its_right_answers_by_heart():
    """Rows 0 to 2 count 2 + 1 + 2 tokens, rows 1 and 2 are right before shaping: 0.1 * 5 / 3 for each of theirs."""
    recipe = make_recipe("vapo", {"right_above": 2.0, "shaping": {"normalize": True}})
    ready, _ = recipe.prepare(batch(), SCORES, IDS, 0.0)
    assert ready["likelihood_weight"].tolist() == pytest.approx([0.0, 0.1 * 5 / 3, 0.1 * 5 / 3, 0.1 * 5 / 3])


def test_a_turn_is_one_action():
    """Turns of two tokens and of one; 0.5 for the first, the other 1.5 of 2 at the end; the critic says 1."""
    mask = torch.tensor([[True, True, False, True]])
    turns = Batch(
        token_ids=torch.ones(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        response_mask=mask,
        columns={
            "values": torch.ones(1, 4),
            "old_log_probs": torch.zeros(1, 4),
            "rewards": torch.tensor([[0.0, 0.5, 0.0, 0.0]]),
        },
    )
    recipe = PPO(action="turn", gamma=0.5, lam=1.0, whiten=False)
    ready, _ = recipe.prepare(turns, torch.tensor([2.0]), torch.tensor([0]), kl_coef=0.0)
    assert ready["advantages"].tolist() == [[0.25, 0.25, 0.0, 0.5]]
    assert ready["returns"].tolist() == [[1.25, 1.25, 0.0, 1.5]]
    with pytest.raises(ConfigError, match="count per turn"):
        PPO(action="turn", length_alpha=0.05)


def test_the_discount_between_turns_is_not_that_between_tokens():
    """One token a turn, rewards 0 and 1 at the end: discounted once, by the turn and not by the word."""
    mask = torch.tensor([[True, True, False, True]])
    turns = Batch(
        token_ids=torch.ones(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        response_mask=mask,
        columns={"values": torch.zeros(1, 4), "old_log_probs": torch.zeros(1, 4)},
    )
    recipe = PPO(gamma=1.0, lam=1.0, turn_gamma=0.5, whiten=False)
    ready, _ = recipe.prepare(turns, torch.tensor([1.0]), torch.tensor([0]), kl_coef=0.0)
    assert ready["advantages"].tolist() == [[0.5, 0.5, 0.0, 1.0]]
    ready, _ = PPO(turn_lam=0.5, lam=1.0, whiten=False).prepare(turns, torch.tensor([1.0]), torch.tensor([0]), 0.0)
    assert ready["returns"].tolist() == [[0.5, 0.5, 0.0, 1.0]]
