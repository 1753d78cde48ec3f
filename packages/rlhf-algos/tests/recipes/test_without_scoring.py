"""One update per batch of samples: its own log-probs are the old ones, and no pass to score them is needed."""

import pytest
import torch
from rlhf_algos import NAMED_RECIPES, OffPolicyCorrection, PolicyTermsConfig, make_recipe
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_core import Batch, ConfigError, EngineConfig, OptimizerConfig
from rlhf_core.testing.tiny import save_tiny_model

IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
SCORES = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 1.0, 0.0, 3.0])
SCORED_FIRST = {
    "ppo",
    "vapo",
    "rloo",
    "reinforce_pp",
    "kl_cov",
    "clip_cov",
    "optimal_token",
    "on_policy_distillation",
    "self_distillation",
}
"""Those that must know the log-probs before the update; PPO and VAPO only with a reference."""
FROM_SAMPLER = {"scale_rl", "dppo"}
PAIRS = {"online_dpo"}
"""Those without any ratio to an older policy."""
PARTS = {"gdpo": {"advantage_options": {"parts": {"right": 1.0}}}}


def recipe_of(name, **options):
    return make_recipe(name, PARTS.get(name, {}) | options)


def spared(recipe):
    return recipe.old_outputs == ("log_probs",) and not recipe.needs_old_log_probs


def samples(*without):
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 12, (8,), generator=random)
    mask = torch.arange(12) < lengths[:, None]
    columns = {
        "rollout_log_probs": -5.3 + 0.1 * torch.randn(8, 12, generator=random),
        "ref_log_probs": -5.3 + 0.1 * torch.randn(8, 12, generator=random),
        "values": torch.randn(8, 12, generator=random),
        "greedy_scores": torch.ones(8),
        "score/right": SCORES,
        "truncated": torch.zeros(8).bool(),
    }
    return Batch(
        token_ids=torch.randint(5, 200, (8, 12), generator=random).masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=mask & (torch.arange(12) >= 3),
        columns={name: column for name, column in columns.items() if name not in without},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


def update(model, recipe, *, scored):
    """The weights after one step, and all that it has measured."""
    engine = TorchEngine(
        EngineConfig(
            model=str(model), optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-4), max_tokens_per_micro_batch=48
        )
    )
    batch = samples() if recipe.kl_in == "loss" else samples("ref_log_probs")
    if scored:
        batch = batch.with_columns(old_log_probs=engine.score(batch).log_probs)
    ready, metrics = recipe.prepare(batch, SCORES, IDS, recipe.kl_coef)
    report = engine.step(ready, recipe.policy_loss(recipe.kl_coef))
    weights = torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])
    return weights, {name: mean.value for name, mean in metrics.items()} | dict(report.metrics)


def test_which_algorithms_must_know_the_log_probs_before():
    found = {name for name in NAMED_RECIPES if not spared(recipe_of(name)) and name not in FROM_SAMPLER | PAIRS}
    assert found == SCORED_FIRST - {"ppo", "vapo"}
    for name in ("ppo", "vapo"):
        assert not spared(recipe_of(name, kl_coef=0.1))  # the penalty goes into the rewards of tokens


@pytest.mark.parametrize("name", sorted(set(NAMED_RECIPES) - SCORED_FIRST - FROM_SAMPLER - PAIRS | {"ppo"}))
def test_a_step_is_the_same_with_and_without_a_scoring_pass(model, name):
    recipe = recipe_of(name)
    weights, measured = update(model, recipe, scored=False)
    expected, before = update(model, recipe, scored=True)
    assert (weights - expected).abs().max() <= 1e-6
    measured.pop("mismatch/log_prob_max")
    assert measured == pytest.approx(before, abs=1e-5, rel=1e-4)
    assert {"mismatch_kl", "mismatch_chi2_sequence"} <= measured.keys()
    assert ("reference_kl" in measured) == (recipe.kl_in == "loss")


def test_the_largest_gap_to_the_sampler_is_that_of_all_micro_batches(model):
    recipe = make_recipe("grpo")
    _, measured = update(model, recipe, scored=False)
    batch = samples()
    scored = TorchEngine(EngineConfig(model=str(model))).score(batch).log_probs
    gap = (scored - batch["rollout_log_probs"]).abs()[batch.response_mask].max()
    assert measured["mismatch/log_prob_max"] == pytest.approx(float(gap), abs=1e-5)


def test_the_kl_to_the_reference_is_measured_by_the_recipes_own_estimator(model):
    recipe = make_recipe("grpo", {"kl_coef": 0.0, "track_kl": True, "kl_estimator": "k1"})
    measured, before = (update(model, recipe, scored=scored)[1] for scored in (False, True))
    assert measured["reference_kl"] == pytest.approx(before["reference_kl"], abs=1e-5)


def test_the_samplers_log_probs_never_stand_in_unasked():
    for name in ("grpo", "ppo"):
        ready, metrics = make_recipe(name).prepare(samples("ref_log_probs"), SCORES, IDS, 0.0)
        assert "old_log_probs" not in ready
        assert "mismatch_kl" not in metrics


def test_corrections_and_penalties_without_log_probs_are_refused():
    corrected = make_recipe("dapo", {"off_policy": [{"high": 2.0}]})
    assert corrected.off_policy == (OffPolicyCorrection(high=2.0),)
    assert not spared(corrected)
    with pytest.raises(ConfigError, match="old_log_probs"):
        corrected.prepare(samples(), SCORES, IDS, 0.0)
    with pytest.raises(ConfigError, match="score the batch with the policy"):
        make_recipe("rloo").prepare(samples(), SCORES, IDS, 0.05)


def own_loss(outputs, batch, config: PolicyTermsConfig):
    raise NotImplementedError


def own_advantage(scores, group_ids, batch, config):
    raise NotImplementedError


def test_of_the_users_own_functions_nothing_is_known():
    assert not spared(make_recipe("grpo", {"loss": f"{__name__}:own_loss", "loss_options": {}, "kl_coef": 0.0}))
    assert not spared(make_recipe("grpo", {"advantage": f"{__name__}:own_advantage", "advantage_options": {}}))
