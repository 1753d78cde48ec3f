import pickle

import pytest
import torch
from rlhf_algos.advantages.reward_shaping import RewardShaping
from rlhf_algos.kl import AdaptiveKL, FixedKL
from rlhf_algos.losses.online.clipped import ppo_clip
from rlhf_algos.off_policy import OffPolicyCorrection
from rlhf_algos.recipes.grpo import GRPO
from rlhf_algos.recipes.recipe import Recipe
from rlhf_core import Batch, ConfigError, PluginError

MASK = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, False, False]])
SCORES = torch.tensor([1.0, 3.0, 5.0, 5.0])
IDS = torch.tensor([0, 0, 1, 1])


def batch(**columns):
    columns = {"old_log_probs": torch.full((4, 3), -1.0), "rollout_log_probs": torch.full((4, 3), -1.0), **columns}
    return Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def test_grpo_spreads_group_advantages():
    recipe = GRPO(advantage_options={"scale": "none"})
    assert isinstance(recipe, Recipe)
    assert not recipe.needs_critic
    assert not recipe.needs_reference
    ready, metrics = recipe.prepare(batch(), SCORES, IDS, 0.0)
    assert ready["advantages"].tolist() == [[0, -1, -1], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert metrics["equal_score_groups"].value == pytest.approx(0.5)
    assert metrics["score_group_std"].value == pytest.approx(2**0.5 / 2)
    assert metrics["score"].value == pytest.approx(3.5)
    assert metrics["response_length"].value == pytest.approx(5 / 4)
    assert "importance_weights" not in ready


def test_kl_in_the_loss_follows_the_controller():
    recipe = GRPO(kl_coef=0.1)
    assert recipe.needs_reference
    assert recipe.policy_loss().config.kl_coef == 0.1
    loss = recipe.policy_loss(0.05)
    assert loss.config.kl_coef == 0.05
    assert loss.config.kl_estimator == "k3"
    assert loss.outputs == ("log_probs", "entropy")
    assert pickle.loads(pickle.dumps(loss)).function is ppo_clip
    _, metrics = recipe.prepare(batch(ref_log_probs=torch.full((4, 3), -1.0)), SCORES, IDS, 0.1)
    assert metrics["reference_kl"].value == 0


def test_kl_in_the_score_comes_before_the_baseline():
    recipe = GRPO(kl_coef=0.5, kl_in="score", kl_estimator="k1", advantage="rloo")
    assert recipe.policy_loss().config.kl_coef == 0
    ref = torch.full((4, 3), -2.0)
    ready, _ = recipe.prepare(batch(ref_log_probs=ref), SCORES, IDS, 0.5)
    # KL of 2, 1, 2 and 0 nats: scores 0, 2.5, 4, 5
    assert ready["advantages"].tolist() == [[0, -2.5, -2.5], [0, 2.5, 0], [0, -1, -1], [0, 0, 0]]


def test_kl_in_the_reward_comes_after_the_baseline():
    recipe = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k1", advantage_options={"scale": "none"})
    ready, metrics = recipe.prepare(batch(ref_log_probs=torch.full((4, 3), -2.0)), SCORES, IDS, 0.5)
    assert ready["advantages"].tolist() == [[0, -2, -1.5], [0, 0.5, 0], [0, -1, -0.5], [0, 0, 0]]
    assert metrics["kl"].value == pytest.approx(1.0)


def test_whitening_over_tokens():
    ready, _ = GRPO(advantage="reinforce", whiten=True).prepare(batch(), SCORES, IDS, 0.0)
    values = ready["advantages"][MASK]
    assert float(values.mean()) == pytest.approx(0, abs=1e-6)
    assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_off_policy_correction():
    recipe = GRPO(off_policy=(OffPolicyCorrection(high=2.0),))
    rollout = torch.full((4, 3), -3.0)
    ready, metrics = recipe.prepare(batch(rollout_log_probs=rollout), SCORES, IDS, 0.0)
    torch.testing.assert_close(ready["importance_weights"], 2.0 * MASK)
    assert metrics["mismatch_kl"].value == pytest.approx(-2.0)


def test_truncated_rows_leave_the_loss_but_not_the_group():
    recipe = GRPO(shaping=RewardShaping(mask_truncated=True), advantage_options={"scale": "none"})
    ready, _ = recipe.prepare(batch(truncated=torch.tensor([True, False, False, False])), SCORES, IDS, 0.0)
    assert ready["advantages"].tolist()[:2] == [[0, 0, 0], [0, 1, 0]]


def test_controllers():
    assert isinstance(GRPO(kl_coef=0.1).kl_controller(), FixedKL)
    adaptive = GRPO(kl_coef=0.1, kl_target=2.0).kl_controller()
    assert isinstance(adaptive, AdaptiveKL)
    assert adaptive.value == 0.1


def test_own_functions(monkeypatch, tmp_path):
    (tmp_path / "my_algorithm.py").write_text(
        "def loss(outputs, batch, config):\n    return config\n"
        "loss.outputs = ('log_probs', 'entropy')\n"
        "def advantage(scores, group_ids, batch, config):\n    return scores * config['factor']\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = GRPO(
        loss="my_algorithm:loss",
        loss_options={"a": 1},
        advantage="my_algorithm:advantage",
        advantage_options={"factor": 2.0},
    )
    loss = recipe.policy_loss()
    assert loss.config == {"a": 1}
    assert loss.outputs == ("log_probs", "entropy")
    ready, _ = recipe.prepare(batch(), SCORES, IDS, 0.0)
    assert ready["advantages"].tolist()[0] == [0, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppo"}, "ppo_clip"),
        ({"loss_options": {"clip_rang": 0.1}}, "clip_range"),
        ({"loss_options": {"kl_coef": 0.1}}, "beside"),
        ({"advantage": "grpoo"}, "grpo"),
        ({"kl_in": "nowhere"}, "score"),
        ({"kl_coef": -1.0}, "negative"),
        ({"kl_target": 0.1}, "positive kl_coef"),
    ],
)
def test_mistakes_are_found_when_the_recipe_is_written(options, message):
    with pytest.raises(ConfigError, match=message):
        GRPO(**options)


def test_own_function_that_is_not_there():
    with pytest.raises(PluginError, match="no_such_module"):
        GRPO(loss="no_such_module:loss")


def test_scores_that_are_not_finite_stop_here():
    with pytest.raises(ValueError, match="not finite"):
        GRPO().prepare(batch(), torch.tensor([1.0, float("nan"), 0.0, 0.0]), IDS, 0.0)


@pytest.mark.parametrize("kl_in", ["loss", "score", "reward"])
def test_the_clamps_of_the_kl_reach_it_wherever_it_goes(kl_in):
    """An unclamped KL of 4 nats per token, clamped at 0.5; the estimator k1 knows no other clamp."""
    ref = batch(ref_log_probs=torch.full((4, 3), -5.0))
    options = {"kl_coef": 0.1, "kl_in": kl_in, "kl_estimator": "k1", "advantage": "reinforce"}
    recipe = GRPO(kl_value_limit=0.5, kl_log_ratio_limit=3.0, **options)
    config = recipe.policy_loss().config
    if kl_in == "loss":
        assert (config.kl_value_limit, config.kl_log_ratio_limit) == (0.5, 3.0)
        return
    assert config.kl_coef == 0
    ready, _ = recipe.prepare(ref, SCORES, IDS, 0.1)
    first = 1 - 0.1 * 0.5 * 2  # two tokens
    assert ready["advantages"][0].tolist() == pytest.approx([0, first, first if kl_in == "score" else 1 - 0.05])
    free, _ = GRPO(**options).prepare(ref, SCORES, IDS, 0.1)
    assert float(free["advantages"][0, 1]) == pytest.approx(1 - 0.1 * 4 * 2)


def turns(rewards):
    """Two responses to one prompt with two turns of one token each, an environment token between them."""
    mask = torch.tensor([[False, True, False, True]] * 2)
    columns = {"rollout_log_probs": torch.zeros(2, 4)}
    if rewards is not None:
        columns["rewards"] = torch.tensor(rewards)
    return Batch(
        token_ids=torch.ones(2, 4, dtype=torch.long),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=mask,
        columns=columns,
    )


def test_rewards_of_turns_keep_their_places():
    """Both earn 1 in the first turn, the second one 1 more in its last: only that turn is told apart there."""
    recipe = GRPO(advantage_options={"scale": "none"})
    ids = torch.tensor([0, 0])
    steps = turns([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    ready, _ = recipe.prepare(steps, torch.tensor([1.0, 2.0]), ids, 0.0)
    assert ready["advantages"].tolist() == [[0, -0.5, 0, -0.5], [0, 0.5, 0, 0.5]]
    # The first response earned more in the first turn, as much in the second: its second turn is no better.
    steps = turns([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    ready, _ = recipe.prepare(steps, torch.tensor([3.0, 1.0]), ids, 0.0)
    assert ready["advantages"].tolist() == [[0, 1, 0, 0], [0, -1, 0, 0]]
    plain, _ = recipe.prepare(turns(None), torch.tensor([3.0, 1.0]), ids, 0.0)
    assert plain["advantages"].tolist() == [[0, 1, 0, 1], [0, -1, 0, -1]]


def test_rewards_of_turns_with_discount_and_kl():
    """REINFORCE with rewards to go: 2 and 1 to go, a KL of 0.5 at each token, both discounted by 0.5."""
    recipe = GRPO(advantage="reinforce", gamma=0.5, kl_coef=1.0, kl_in="reward", kl_estimator="k1")
    rows = turns([[0.0, 1.0, 0.0, 1.0]] * 2).with_columns(
        ref_log_probs=torch.full((2, 4), -0.5), old_log_probs=torch.zeros(2, 4)
    )
    ready, _ = recipe.prepare(rows, torch.tensor([2.0, 2.0]), torch.tensor([0, 0]), 1.0)
    assert ready["advantages"][0].tolist() == [0, 1 - 0.5 + 0.5 * (1 - 0.5), 0, 1 - 0.5]


@pytest.mark.parametrize("source", ["trainer", "sampler"])
def test_whose_log_probs_the_ratios_start_from(source):
    rows = batch(old_log_probs=torch.full((4, 3), -1.0), rollout_log_probs=torch.full((4, 3), -1.5))
    recipe = GRPO(old_log_probs=source)
    ready, metrics = recipe.prepare(rows, SCORES, IDS, 0.0)
    assert float(ready["old_log_probs"][0, 1]) == {"trainer": -1.0, "sampler": -1.5}[source]
    assert metrics["mismatch_kl"].value == pytest.approx({"trainer": -0.5, "sampler": 0.0}[source])
    assert recipe.old_outputs == {"trainer": ("log_probs",), "sampler": ()}[source]


def test_the_samplers_log_probs_must_be_there():
    unknown = torch.full((4, 3), float("nan"))
    with pytest.raises(ConfigError, match="old_log_probs: trainer"):
        GRPO(old_log_probs="sampler").prepare(batch(rollout_log_probs=unknown), SCORES, IDS, 0.0)
    with pytest.raises(ConfigError, match="leave one of the two out"):
        GRPO(old_log_probs="sampler", off_policy=(OffPolicyCorrection(),))


def test_the_most_uncertain_tokens_alone():
    """Two of the five tokens have an entropy above the 60 % quantile."""
    recipe = GRPO(loss_options={"top_entropy": 0.4})
    assert recipe.old_outputs == ("log_probs", "entropy")
    entropy = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 9.0], [9.0, 4.0, 5.0], [9.0, 9.0, 9.0]])
    ready, _ = recipe.prepare(batch(old_entropy=entropy), SCORES, IDS, 0.0)
    assert ready["entropy_selected"].int().tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_tokens_of_each_prompt():
    ready, _ = GRPO(loss_options={"aggregation": "prompt_mean"}).prepare(batch(), SCORES, IDS, 0.0)
    assert ready["prompt_tokens"].tolist() == [3, 3, 2, 2]
