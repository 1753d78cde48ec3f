import pytest
import torch
from rlhf_algos.losses.online.registry import POLICY_LOSSES, make_policy_loss
from rlhf_algos.recipes.named import NAMED_RECIPES, make_recipe
from rlhf_algos.recipes.policy_recipe import Recipe
from rlhf_algos.recipes.recipes import GRPO, PPO
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, True, True]])


def batch():
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(4, 3, generator=generator)
    return Batch(
        token_ids=torch.ones(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={
            "old_log_probs": log_probs,
            "rollout_log_probs": log_probs,
            "ref_log_probs": log_probs - 0.1,
            "values": torch.zeros(4, 3),
            "greedy_scores": torch.full((4,), 0.5),
        },
    )


@pytest.mark.parametrize("name", sorted(NAMED_RECIPES))
def test_every_recipe_raises_the_better_answers(name):
    """From scores to a gradient: the best response of a group becomes likelier, the worst less likely."""
    recipe = make_recipe(name)
    assert isinstance(recipe, Recipe)
    ready, metrics = recipe.prepare(
        batch(), torch.tensor([3.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 1]), recipe.kl_coef
    )
    assert metrics["advantage_abs"].value > 0
    log_probs = ready["old_log_probs"].clone().requires_grad_()
    loss = recipe.policy_loss()
    terms = loss(ModelOutputs(log_probs=log_probs, entropy=torch.ones(4, 3)), ready)
    terms.total.backward()
    per_row = log_probs.grad.sum(1)
    if name == "reinforce":  # no baseline: a score of 0 has no gradient
        assert (per_row[[0, 3]] < 0).all()
    elif name != "clip_cov":
        assert (per_row[[0, 3]] < per_row[[1, 2]]).all()
    value_loss = recipe.value_loss()
    assert (value_loss is not None) == recipe.needs_critic
    if value_loss is not None:
        values = torch.zeros(4, 3, requires_grad=True)
        value_loss(ModelOutputs(values=values), ready).total.backward()
        assert (values.grad[MASK] <= 0).all()


def test_options_replace_and_merge():
    dapo = make_recipe("dapo", {"loss_options": {"clip_range_high": 0.3}, "kl_coef": 0.1})
    config = dapo.policy_loss().config
    assert config.bounds == (0.8, 1.3)
    assert config.kl_coef == 0.1
    other = make_recipe("grpo", {"loss": "gspo"})
    assert other.policy_loss().config.clip_range == 3e-4
    shaped = make_recipe("grpo", {"shaping": {"truncation_penalty": 0.5}})
    assert shaped.shaping.truncation_penalty == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dappo", {}, "did you mean 'dapo'"),
        ("grpo", {"advantag": "rloo"}, "did you mean 'advantage'"),
        ("ppo", {"advantage": "rloo"}, "unknown key"),
        ("grpo", {"shaping": {"clipp": (0, 1)}}, "did you mean 'clip'"),
    ],
)
def test_mistakes_name_the_nearest(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_recipe(name, options)


def test_named_losses():
    for name in POLICY_LOSSES:
        loss = make_policy_loss(name, {}, report_entropy=True)
        assert loss.outputs == ("log_probs", "entropy")
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        make_policy_loss("cipso", {})


def test_defaults_are_plain():
    assert make_recipe("ppo") == PPO()
    assert make_recipe("gspo") == GRPO(loss="gspo")
