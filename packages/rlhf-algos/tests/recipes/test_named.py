import pytest
import torch
from rlhf_algos.losses.online.registry import POLICY_LOSSES, make_policy_loss
from rlhf_algos.off_policy import OffPolicyCorrection
from rlhf_algos.recipes.grpo import GRPO
from rlhf_algos.recipes.named import NAMED_RECIPES, make_recipe
from rlhf_algos.recipes.ppo import PPO
from rlhf_algos.recipes.recipe import Recipe
from rlhf_core import Batch, ConfigError, ModelOutputs, PluginError

MASK = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, True, True]])


NEEDED = {
    "pass_at_k": {"advantage_options": {"k": 1}},
    "gdpo": {"advantage_options": {"parts": {"right": 1.0, "short": 0.5}}},
}
"""Options without which a recipe cannot be made, or not for two samples per prompt."""


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
            "teacher_log_probs": log_probs + torch.tensor([[0.5], [-0.5], [-0.5], [0.5]]),
            "old_log_collision": torch.full((4, 3), -1.0),
            "score/right": torch.tensor([1.0, 0.0, 0.0, 1.0]),
            "score/short": torch.tensor([0.3, 0.3, 0.1, 0.2]),
        },
    )


@pytest.mark.parametrize("name", sorted(set(NAMED_RECIPES) - {"online_dpo"}))  # of pairs: test_online_dpo.py
def test_every_recipe_raises_the_better_answers(name):
    """From scores to a gradient: the best response of a group becomes likelier, the worst less likely."""
    recipe = make_recipe(name, NEEDED.get(name))
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
        ("daapo", {}, "did you mean 'dapo'"),
        ("grpo", {"advantag": "rloo"}, "did you mean 'advantage'"),
        ("ppo", {"advantage": "rloo"}, "unknown key"),
        ("grpo", {"kl_coef": "much"}, "kl_coef must be a number"),
        ("grpo", {"loss_options": {"clip_rang": 0.1}}, "did you mean 'clip_range'"),
        ("gdpo", {}, "parts is empty"),
        ("gdpo", NEEDED["gdpo"] | {"shaping": {"normalize": True}}, "penalties as parts"),
        ("gdpo", NEEDED["gdpo"] | {"kl_coef": 0.1, "kl_in": "score"}, "kl_in: loss"),
        ("grpo", {"off_policy": [{"levl": "token"}]}, r"off_policy\[0\].levl"),
        ("grpo", {"shaping": {"clipp": (0, 1)}}, "did you mean 'shaping.clip'"),
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


def test_nested_settings_as_a_file_gives_them():
    recipe = make_recipe(
        "dapo",
        {
            "kl_coef": 0.01,
            "loss_options": {"dual_clip": 3.0},
            "shaping": {"overlong_max_length": 100, "overlong_buffer": 20},
            "off_policy": [{"mode": "mask", "low": 0.5, "high": 2.0}],
        },
    )
    assert isinstance(recipe, GRPO)
    config = recipe.policy_loss().config
    assert (config.clip_range_high, config.dual_clip, config.kl_coef) == (0.28, 3.0, 0.01)
    assert recipe.off_policy == (OffPolicyCorrection(mode="mask", low=0.5, high=2.0),)
    assert recipe.shaping.overlong_buffer == 20


def test_options_of_another_estimator_than_the_presets_do_not_linger():
    assert make_recipe("dr_grpo", {"advantage": "rloo"}).advantage_options == {}  # type: ignore[attr-defined]
    kept = make_recipe("dr_grpo", {"advantage_options": {"singleton": "score"}})
    assert kept.advantage_options == {"scale": "none", "singleton": "score"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(NAMED_RECIPES))
def test_recipes_say_how_many_samples_and_what_else_they_need(name):
    recipe = make_recipe(name, NEEDED.get(name))
    alone = {
        "on_policy_distillation",
        "self_distillation",
        "ppo",
        "vapo",
        "nash_md",
        "reinforce",
        "reinforce_pp",
        "remax",
    }
    sampler = {"scale_rl", "dppo"}
    collision = ("log_collision",) if name == "optimal_token" else ()
    without = name in sampler or name == "online_dpo"
    assert recipe.old_outputs == (collision if without else ("log_probs", *collision))
    assert recipe.min_samples_per_prompt == (1 if name in alone else 2)
    assert recipe.needs_greedy_scores == (name == "remax")
    assert recipe.score_parts == (("right", "short") if name == "gdpo" else ())


def test_one_sample_per_prompt_where_a_lone_response_keeps_its_score():
    recipe = make_recipe("rloo", {"advantage_options": {"singleton": "score"}, "kl_coef": 0.0})
    assert recipe.min_samples_per_prompt == 1
    ready, _ = recipe.prepare(batch(), torch.tensor([3.0, 0.0, 1.0, 2.0]), torch.arange(4), 0.0)
    assert ready["advantages"].max(dim=1).values.tolist() == [3, 0, 1, 2]


OWN = """
from dataclasses import dataclass
from rlhf_algos import GRPO

@dataclass(frozen=True, kw_only=True, slots=True)
class Doubled(GRPO):
    factor: float = 2.0

    def prepare(self, batch, scores, group_ids, kl_coef):
        return GRPO.prepare(self, batch, self.factor * scores, group_ids, kl_coef)

@dataclass(frozen=True)
class Half:
    needs_critic: bool = False

class Plain:
    pass
"""


def test_a_recipe_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "own_recipes.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"factor": 3.0, "advantage": "reinforce", "shaping": {"truncation_penalty": 0.0}}
    recipe = make_recipe("own_recipes:Doubled", options)
    assert isinstance(recipe, Recipe)
    ready, _ = recipe.prepare(batch(), torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1]), 0.0)
    assert ready["advantages"].max(dim=1).values.tolist() == [3, 0, 0, 6]
    with pytest.raises(ConfigError, match="did you mean 'factor'"):
        make_recipe("own_recipes:Doubled", {"facto": 1.0})
    with pytest.raises(ConfigError, match=r"lacks kl_controller.*PolicyRecipe"):
        make_recipe("own_recipes:Half")
    with pytest.raises(ConfigError, match="write a dataclass"):
        make_recipe("own_recipes:Plain")
    with pytest.raises(PluginError):
        make_recipe("no_such_module:Recipe")
