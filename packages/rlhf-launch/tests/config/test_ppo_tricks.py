"""Every trick of docs/ppo.md from the key of a file to what it does to numbers that were worked out by hand."""

import math
from pathlib import Path

import pytest
import torch
from rlhf_core import Batch, ModelOutputs
from rlhf_launch.online.setup import plan_of
from rlhf_launch.placement.plans import model_of, training_plans
from rlhf_launch.placement.resolve import resolve_backends

SCORES = torch.tensor([2.0, -1.0])
PLAIN = {"name": "ppo", "kl_coef": 0.0, "lam": 1.0, "whiten": False}


def batch(**columns):
    """Two answers of three and two tokens after a prompt of one."""
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    given = {"values": torch.zeros(2, 4), "truncated": torch.tensor([False, True]), **columns}
    return Batch(token_ids=tokens, attention_mask=tokens > 0, response_mask=mask, columns=given)


@pytest.fixture
def prepared(settings, make_config):
    """A function from keys of `algorithm` to the batch that the run's algorithm makes of two answers."""

    def prepare(*, scores=SCORES, columns=None, **keys):
        settings["rollout"]["samples_per_prompt"] = 1
        recipe = make_config(settings, algorithm={**PLAIN, **keys}).recipe
        rows, metrics = recipe.prepare(batch(**(columns or {})), scores, torch.arange(2), recipe.kl_coef)
        return recipe, rows, {name: metric.value for name, metric in metrics.items()}

    return prepare


def rows_of(column):
    return [[round(float(x), 4) for x in row] for row in column]


def test_1_the_kl_of_each_token_is_taken_off_its_reward(prepared):
    old = torch.zeros(2, 4)
    reference = torch.tensor([[0.0, -1.0, 0.0, -2.0], [0.0, 0.0, 1.0, 0.0]])
    columns = {"old_log_probs": old, "ref_log_probs": reference}
    _, rows, metrics = prepared(kl_coef=0.1, columns=columns)
    # k1 = old - reference: 1, 0, 2 and 0, -1; the return at a token is the score less what is still to come.
    assert rows_of(rows["returns"]) == [[0, 1.7, 1.8, 1.8], [0, -0.9, -0.9, 0]]
    assert metrics["kl"] == pytest.approx((1 + 0 + 2 + 0 - 1) / 5)


def test_2_the_score_falls_at_the_last_token(prepared):
    _, rows, _ = prepared(gamma=0.5)
    assert rows_of(rows["returns"]) == [[0, 0.5, 1.0, 2.0], [0, -0.5, -1.0, 0]]


def test_3_advantages_are_gae_over_tokens(prepared):
    columns = {"values": torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])}
    _, rows, _ = prepared(lam=0.5, columns=columns)
    # deltas: 0 - 1, 1 - 0, 2 - 1
    assert rows_of(rows["advantages"])[0] == [0, -1 + 0.5 * (1 + 0.5), 1 + 0.5, 1]
    assert rows_of(prepared(lam=0.0, columns=columns)[1]["advantages"])[0] == [0, -1, 1, 1]


def test_4_advantages_are_whitened_over_the_batch(prepared):
    _, rows, metrics = prepared(whiten=True, whiten_options={"unbiased": False})
    counted = rows["advantages"][rows.response_mask]
    assert float(counted.mean()) == pytest.approx(0, abs=1e-6)
    assert float(counted.std(correction=0)) == pytest.approx(1, abs=1e-3)
    assert metrics["advantage_before_whitening"] == pytest.approx((3 * 2 - 2 * 1) / 5)


def test_5_scores_are_normalised_by_numbers_given_or_measured(settings, make_config):
    asked = {"function": {"source": "given", "mean": 1.0, "std": 2.0}}
    found = make_config(settings, reward__normalize=asked).reward.normalize["function"]
    assert (found.given.mean, found.given.std) == (1.0, 2.0)
    assert (
        make_config(settings, reward__normalize={"function": "measured"}).reward.normalize["function"].given is None
    )
    # What they do to scores, and that a resumed run keeps them: tests/samples/test_reward_scale.py.


def test_6_scores_are_clipped(prepared):
    _, rows, metrics = prepared(scores=torch.tensor([20.0, -1.0]), shaping={"clip": [-5, 5]})
    assert rows_of(rows["returns"]) == [[0, 5, 5, 5], [0, -1, -1, 0]]
    assert metrics["score_clipped"] == 0.5


@pytest.mark.parametrize(("limit", "error"), [(0.5, 1.5**2), (None, 0.0)])
def test_7_values_are_clipped(prepared, limit, error):
    recipe, rows, _ = prepared(value_loss_options={"clip_range": limit}, scores=torch.tensor([2.0, 2.0]))
    values = torch.full((2, 4), 2.0)  # where they should be, 2 from where they were
    terms = recipe.value_loss()(ModelOutputs(values=values), rows)
    assert float(terms.total / terms.weight) == pytest.approx(error / 2)
    assert ("value_clip_fraction" in terms.metrics) == (limit is not None)


def test_8_the_critic_begins_as_the_reward_model(settings, make_config, folder):
    settings["rollout"]["samples_per_prompt"] = 1
    ppo = {"algorithm": "ppo"}
    judged = make_config(settings, **ppo, reward={"model": str(folder / "reward")})
    assert model_of(judged, "critic") == str(folder / "reward")
    assert model_of(make_config(settings, **ppo), "critic") == str(folder / "policy")
    given = make_config(settings, **ppo, model={"path": str(folder / "policy"), "critic": "its/own"})
    assert model_of(given, "critic") == "its/own"


def test_9_policy_and_critic_have_optimizers_of_their_own_and_the_critic_a_start(settings, make_config, folder):
    settings["rollout"]["samples_per_prompt"] = 1
    optimizer = {"learning_rate": 1e-6, "betas": [0.8, 0.9], "schedule": "cosine", "warmup": 1}
    critic = {"learning_rate": 9e-6, "betas": [0.9, 0.95], "schedule": "linear", "warmup": 2}
    train = {
        **settings["train"],
        "optimizer": optimizer,
        "critic_optimizer": critic,
        "critic_warmup_steps": 2,
        "steps": 6,
    }
    config = make_config(settings, algorithm="ppo", train=train)
    backends = resolve_backends(config)
    for role, asked in (("policy", optimizer), ("critic", critic)):
        (plan,) = training_plans(config, backends, role)
        found = next(arg for arg in plan.arguments if hasattr(arg, "optimizer")).optimizer
        assert (found.learning_rate, found.betas) == (asked["learning_rate"], tuple(asked["betas"]))
        assert (found.schedule, found.warmup_steps) == (asked["schedule"], asked["warmup"])
    assert plan_of(config).critic_warmup_steps == 2
    # That the policy takes no step in these: tests/online/test_trainer.py.


def test_10_text_beside_the_samples(settings, make_config):
    data = {**settings["data"], "pretrain": "text.jsonl"}
    config = make_config(settings, data=data, algorithm={**PLAIN, "ptx_coef": 0.3}, rollout__samples_per_prompt=1)
    assert config.recipe.ptx_coef == 0.3
    # What it keeps a policy from forgetting: tests/online/test_pretraining.py.


@pytest.mark.parametrize(
    ("shaping", "scores"),
    [
        ({"truncation_score": 0.0}, [2, 0]),
        ({"truncation_penalty": 3.0}, [2, -4]),
        ({"truncation_factor": 0.5}, [2, -0.5]),
        ({"overlong_max_length": 3, "overlong_buffer": 1, "overlong_penalty": 0.5}, [1.5, -1]),
    ],
)
def test_11_answers_without_an_end_are_punished(prepared, shaping, scores):
    _, rows, _ = prepared(shaping=shaping)
    assert rows_of(rows["returns"]) == [[0, *[scores[0]] * 3], [0, *[scores[1]] * 2, 0]]


def test_11_or_left_out(prepared):
    _, rows, metrics = prepared(shaping={"mask_truncated": True})
    assert rows.response_mask.sum(dim=1).tolist() == [3, 0]
    assert metrics["truncated"] == 0.5
    assert not math.isnan(metrics["advantage"])


def test_the_page_has_a_row_for_every_test():
    page = Path(__file__).parents[4] / "docs" / "ppo.md"
    if not page.exists():
        pytest.skip("the documentation is not beside the packages here")
    text = page.read_text()
    for number in range(1, 12):
        assert f"\n| {number} |" in text, number
        assert any(name.startswith(f"test_{number}_") for name in globals()), number
