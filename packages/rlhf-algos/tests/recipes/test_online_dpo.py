"""Online DPO: which samples make a pair, and that the step is offline DPO's on the same pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_algos import (
    PAIR_SIDE,
    Example,
    LearnsFromPairs,
    OnlineDPO,
    Recipe,
    TokenRow,
    collate_examples,
    dpo,
    make_recipe,
    pair_sides,
)
from rlhf_algos.offline.reference import score_rows
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_core import Batch, ConfigError, EngineConfig, Loss, OneRank, OptimizerConfig
from rlhf_core.testing.tiny import save_tiny_model


def sides_of(scores, groups, eligible=None, **options):
    rows = torch.ones(len(scores)).bool() if eligible is None else torch.tensor(eligible, dtype=torch.bool)
    return pair_sides(torch.tensor(scores), torch.tensor(groups, dtype=torch.long), rows, **options).tolist()


def test_best_against_worst_ties_left_out():
    assert sides_of([1.0, 3.0, 0.0, 2.0, 2.0, 5.0], [0, 0, 0, 7, 7, 9]) == [0, 1, 2, 0, 0, 0]
    assert sides_of([1.0, 0.0, 1.0, 0.0], [4, 4, 4, 4]) == [1, 2, 0, 0]  # the first of equal ones
    assert sides_of([1.0, 0.5, 0.0, 1.0], [0, 0, 1, 1], min_gap=0.5) == [0, 0, 2, 1]
    assert sides_of([9.0, 1.0, 0.0], [0, 0, 0], [False, True, True]) == [0, 1, 2]
    assert sides_of([9.0, 1.0], [0, 0], [False, False]) == [0, 0]
    assert sides_of([], []) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2), st.booleans()), max_size=20))
def test_every_group_has_a_row_of_each_side_or_none_of_both(rows):
    groups, scores, eligible = ([row[i] for row in rows] for i in range(3))
    sides = sides_of([float(s) for s in scores], groups, eligible)
    for group in set(groups):
        members = [i for i in range(len(rows)) if groups[i] == group]
        own = [scores[i] for i in members if eligible[i]]
        chosen, rejected = ([i for i in members if sides[i] == side] for side in (1, 2))
        if len(set(own)) < 2:
            assert chosen == rejected == []
        else:
            assert [scores[i] for i in chosen] == [max(own)]
            assert [scores[i] for i in rejected] == [min(own)]
            assert all(eligible[i] for i in chosen + rejected)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


def samples():
    """Three samples of each of three prompts; the last prompt's score alike."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(7, 13, (9,), generator=random)
    attention = torch.arange(12) < lengths[:, None]
    tokens = torch.randint(5, 200, (9, 12), generator=random)
    tokens[:, :4] = tokens[[0, 0, 0, 3, 3, 3, 6, 6, 6], :4]
    return Batch(
        token_ids=tokens.masked_fill(~attention, 0),
        attention_mask=attention,
        response_mask=attention & (torch.arange(12) >= 4),
        columns={"rollout_log_probs": torch.zeros(9, 12)},
    )


SCORES = torch.tensor([0.0, 2.0, 1.0, 5.0, 3.0, 4.0, 1.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
PAIRED = [1, 0, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "ipo", "beta": 0.2},
        {"loss_options": {"length_normalized": True, "sft_coef": 0.1}},
        {"loss_options": {"weighted": True}},
    ],
)
def test_a_step_is_that_of_offline_dpo_on_the_same_pairs(model, tmp_path, options):
    def engine(**more):
        return TorchEngine(EngineConfig(model=str(model), max_tokens_per_micro_batch=32, **more))

    def trained(batch, loss):
        policy = engine(optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-4))
        report = policy.step(batch, loss)
        return torch.cat([p.detach().flatten() for p in policy.model.parameters()]), report

    other = save_tiny_model(tmp_path / "reference", hidden_size=32, seed=9)
    reference = TorchEngine(EngineConfig(model=other, role="reference"))
    recipe = make_recipe("online_dpo", options)
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe, LearnsFromPairs)
    batch = samples()
    scored = batch.with_columns(ref_log_probs=reference.score(batch).log_probs)
    ready, metrics = recipe.prepare(scored, SCORES, GROUPS, 0.0)
    assert ready[PAIR_SIDE].tolist() == [2, 1, 0, 1, 2, 0, 0, 0, 0]
    weights, report = trained(replace(ready.select(PAIRED), rows_per_unit=2), recipe.policy_loss())

    rows = [
        TokenRow(token_ids=tuple(ids[there].tolist()), response_mask=tuple(mask[there].tolist()))
        for ids, there, mask in zip(batch.token_ids, batch.attention_mask, batch.response_mask, strict=True)
    ]
    sums = score_rows(reference, rows, OneRank()).tolist()
    pairs = [
        Example(name=str(c), rows=(rows[c], rows[r]), columns={"ref_log_probs_sum": (sums[c], sums[r])})
        for c, r in (PAIRED[:2], PAIRED[2:])
    ]
    config = recipe.config()
    loss = Loss(function=dpo, config=config, outputs=config.outputs)
    expected, offline = trained(collate_examples(pairs, pad_token_id=0), loss)
    assert (weights - expected).abs().max() <= 1e-6
    assert dict(report.metrics) == pytest.approx(dict(offline.metrics), abs=1e-5)
    assert metrics["paired_prompts"].value == pytest.approx(2 / 3)
    assert metrics["score_gap"].value == pytest.approx(2.0)
    assert metrics["equal_score_groups"].value == pytest.approx(1 / 3)


def test_groups_prepared_apart_are_those_prepared_together():
    recipe = OnlineDPO(loss_options={"reference_free": True})
    assert recipe.prepares_by_group
    assert not recipe.needs_reference
    together, _ = recipe.prepare(samples(), SCORES, GROUPS, 0.0)
    parts = [
        recipe.prepare(samples().select(rows), SCORES[rows], GROUPS[rows], 0.0)[0]
        for rows in ([0, 1, 2], [3, 4, 5, 6, 7, 8])
    ]
    assert torch.cat([part[PAIR_SIDE] for part in parts]).tolist() == together[PAIR_SIDE].tolist()
    assert not OnlineDPO(shaping=make_recipe("grpo", {"shaping": {"normalize": True}}).shaping).prepares_by_group  # type: ignore[attr-defined]


def test_truncated_samples_lose_by_their_penalty():
    recipe = make_recipe(
        "online_dpo", {"shaping": {"truncation_penalty": 9.0}, "loss_options": {"reference_free": True}}
    )
    cut = samples().with_columns(
        truncated=torch.tensor([False, True, False, False, False, False, False, False, True])
    )
    ready, _ = recipe.prepare(cut, SCORES, GROUPS, 0.0)
    assert ready[PAIR_SIDE].tolist() == [0, 2, 1, 1, 2, 0, 1, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "aot"}, "online_dpo has no loss='aot', which needs a column"),
        ({"loss_options": {"ld_alpha": 0.5}}, "has no ld_alpha=0.5"),
        ({"loss_options": {"exploration_coef": 0.1}}, "has no exploration_coef"),
        ({"loss_options": {"sft_coef": 0.1, "sft_mean": "token"}}, "has no sft_mean='token'"),
        ({"loss_options": {"beta": 0.1}}, "write beta beside loss_options"),
        ({"min_score_gap": -1.0}, "min_score_gap must not be negative"),
        ({"loss": "dop"}, "dop"),
        ({"kl_coef": 0.1}, "kl_coef"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        make_recipe("online_dpo", options)
