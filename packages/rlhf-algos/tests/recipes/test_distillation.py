"""On-policy distillation: what the teacher says of each token, beside the task's score or alone."""

import pytest
import torch
from rlhf_algos import (
    GRPO,
    LearnsFromTeacher,
    OnPolicyDistillation,
    OnPolicyDistillationConfig,
    PreparesInParts,
    Recipe,
    make_recipe,
    on_policy_distillation,
)
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True, True], [False, True, False, True], [False, True, True, False]])
OLD = torch.tensor([[-1.0, -1.0, -2.0, -3.0], [-1.0, -0.5, -9.0, -1.5], [-1.0, -2.0, -2.0, -9.0]])
TEACHER = torch.tensor([[-9.0, -0.5, -2.5, -1.0], [-9.0, -1.0, -9.0, -1.5], [-9.0, -40.0, -1.0, -1.0]])
IDS = torch.tensor([0, 0, 0])
NO_SCORES = torch.zeros(3)


def batch(**columns):
    return Batch(
        token_ids=torch.zeros(3, 4, dtype=torch.long),
        attention_mask=torch.ones(3, 4, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": OLD, "rollout_log_probs": OLD, "teacher_log_probs": TEACHER, **columns},
    )


def test_the_advantage_is_the_gap_to_the_teacher_at_each_sampled_token():
    recipe = make_recipe("on_policy_distillation")
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe, LearnsFromTeacher)
    assert not isinstance(GRPO(), LearnsFromTeacher)
    assert (recipe.needs_scores, recipe.min_samples_per_prompt, recipe.needs_reference) == (False, 1, False)
    ready, metrics = recipe.prepare(batch(), NO_SCORES, IDS, 0.0)
    # by hand: teacher - student; the gap of -38 is clamped at -20; nothing where no token was sampled
    assert ready["advantages"].tolist() == [[0, 0.5, -0.5, 2], [0, -0.5, 0, 0], [0, -20, 1, 0]]
    assert metrics["teacher/reverse_kl"].value == pytest.approx(-(0.5 - 0.5 + 2 - 0.5 + 0 - 38 + 1) / 7)
    assert metrics["teacher/log_prob"].value == pytest.approx(-(0.5 + 2.5 + 1 + 1 + 1.5 + 40 + 1) / 7)
    assert "advantage_task_abs" not in metrics
    assert "score" not in metrics


def test_gaps_of_later_tokens_count_with_teacher_gamma():
    recipe = make_recipe("on_policy_distillation", {"teacher_gamma": 0.5, "teacher_coef": 2.0})
    ready, _ = recipe.prepare(batch(), NO_SCORES, IDS, 0.0)
    # row 0: 2, -0.5 + 1 = 0.5, 0.5 + 0.25 = 0.75; row 1 skips the token that the environment wrote
    assert ready["advantages"].tolist() == [[0, 1.5, 1.0, 4.0], [0, -1.0, 0, 0], [0, -39.0, 2.0, 0]]


def test_the_task_s_advantage_is_added_by_its_coefficient():
    scores = torch.tensor([3.0, 0.0, 0.0])
    options = {"reward_coef": 0.25, "advantage_options": {"scale": "none"}}
    recipe = make_recipe("on_policy_distillation", options)
    assert (recipe.needs_scores, recipe.min_samples_per_prompt) == (True, 2)
    ready, metrics = recipe.prepare(batch(), scores, IDS, 0.0)
    alone, _ = make_recipe("on_policy_distillation").prepare(batch(), scores, IDS, 0.0)
    task, _ = GRPO(advantage_options={"scale": "none"}).prepare(batch(), scores, IDS, 0.0)
    torch.testing.assert_close(ready["advantages"], alone["advantages"] + 0.25 * task["advantages"])
    assert metrics["advantage_task_abs"].value == pytest.approx((2 * 3 + 1 * 2 + 1 * 2) / 7)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_its_gradient_is_that_of_the_loss_of_that_name(gamma):
    """Two ways to the same step: the gap as an advantage of the clipped loss, or as the cost of the loss."""
    recipe = make_recipe("on_policy_distillation", {"teacher_gamma": gamma})
    ready, _ = recipe.prepare(batch(), NO_SCORES, IDS, 0.0)
    gradients = []
    for loss, given in (
        (recipe.policy_loss(), ready),
        (lambda o, b: on_policy_distillation(o, b, OnPolicyDistillationConfig(gamma=gamma)), batch()),
    ):
        log_probs = OLD.clone().requires_grad_()
        terms = loss(ModelOutputs(log_probs=log_probs, entropy=torch.ones(3, 4)), given)
        (terms.total / terms.weight).backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"reward_coef": 1.0, "teacher_gamma": 0.9}])
def test_groups_prepared_apart_are_those_prepared_together(options):
    recipe = make_recipe("on_policy_distillation", options)
    assert recipe.prepares_by_group
    assert isinstance(recipe, PreparesInParts)
    assert recipe.whitening is None
    groups, scores = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 2.0, 5.0])
    columns = {name: torch.cat([column, column[:1]]) for name, column in batch().columns.items()}
    four = Batch(
        token_ids=torch.zeros(4, 4, dtype=torch.long),
        attention_mask=torch.ones(4, 4, dtype=torch.bool),
        response_mask=torch.cat([MASK, MASK[:1]]),
        columns=columns,
    )
    together, _ = recipe.prepare(four, scores, groups, 0.0)
    parts = [recipe.prepare(four.select(rows), scores[rows], groups[rows], 0.0)[0] for rows in ([0, 1], [2, 3])]
    torch.testing.assert_close(torch.cat([part["advantages"] for part in parts]), together["advantages"])


def test_the_sampler_s_log_probs_can_stand_in():
    recipe = make_recipe("on_policy_distillation", {"old_log_probs": "sampler"})
    assert recipe.old_outputs == ()
    ready, _ = recipe.prepare(batch(rollout_log_probs=OLD - 1), NO_SCORES, IDS, 0.0)
    assert ready["advantages"][0].tolist() == [0, 1.5, 0.5, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_coef": 0.0}, "teacher_coef must be positive, got 0.0; without a teacher write grpo"),
        ({"reward_coef": -1.0}, "reward_coef must not be negative"),
        ({"teacher_gamma": 1.5}, r"teacher_gamma must be in \[0, 1\], got 1.5"),
        ({"teacher_log_ratio_limit": 0.0}, "teacher_log_ratio_limit must be positive"),
        ({"reward_coef": 1.0, "whiten": True}, "whiten would take the scale"),
        ({"likelihood_coef": 0.1}, "likelihood_coef is about scores, and with reward_coef=0"),
        ({"shaping": {"truncation_penalty": 1.0}}, "shaping is about scores"),
        ({"kl_coef": 0.1, "kl_in": "score"}, "kl_in is about scores"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_recipe("on_policy_distillation", options)


def test_it_is_a_recipe_of_its_own_fields():
    assert OnPolicyDistillation(teacher_coef=2.0) == make_recipe("on_policy_distillation", {"teacher_coef": 2.0})
