"""What ranks do with rows, which must be what one process did with the whole batch."""

import random

import pytest
import torch
from rlhf_algos import GRPO, make_recipe
from rlhf_core import Batch, RaggedBatch
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.prepare import blocks_of_groups, columns_of_rows, in_parts, prepare_rows
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.train_rank import TrainWorker
from rlhf_launch.workers.waits import Waits


def scored_batch(groups=9, seed=0):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [draw.randint(1, 4) for _ in range(groups)]
    rows, width = sum(sizes), 40
    lengths = torch.tensor([draw.randint(5, width) for _ in range(rows)])
    mask = torch.arange(width) < lengths[:, None]
    response = mask.clone()
    response[:, :3] = False

    def column():
        return -torch.rand(rows, width, generator=generator) * response

    return RaggedBatch.of(
        Batch(
            token_ids=torch.where(mask, 5, 0),
            attention_mask=mask,
            response_mask=response,
            columns={
                "rollout_log_probs": column(),
                "old_log_probs": column(),
                "values": column(),
                "ref_log_probs": column(),
                "scores": torch.rand(rows, generator=generator),
                "group_ids": torch.arange(groups).repeat_interleave(torch.tensor(sizes)),
                "truncated": torch.rand(rows, generator=generator) > 0.5,
                "greedy_scores": torch.zeros(rows),
            },
        )
    )


@pytest.fixture(params=[1, 2, 3])
def group(request, monkeypatch):
    for name in ("_BLOCK", "_BLOCK_BY_TOKEN"):
        monkeypatch.setattr(f"rlhf_launch.workers.prepare.{name}", 160)  # some four rows
    handles = [LocalHandle(f"rank-{i}", lambda: TrainWorker("", None, {})) for i in range(request.param)]
    group = TrainGroup("policy", handles, waits=Waits(60))
    yield group
    group.close()


@pytest.mark.parametrize(
    "recipe",
    [
        make_recipe("grpo"),
        make_recipe("dapo", {"kl_coef": 0.1, "kl_in": "score", "shaping": {"mask_truncated": True}}),
        make_recipe("rloo"),
        make_recipe("remax", {"old_log_probs": "sampler"}),
        make_recipe("ppo", {"whiten": False}),
        make_recipe("grpo", {"gamma": 0.9}),
    ],
    ids=["grpo", "dapo", "rloo", "remax", "ppo", "discounted"],
)
def test_groups_apart_are_prepared_to_the_bit_as_the_whole(group, recipe):
    assert recipe.prepares_by_group
    batch = scored_batch()
    columns, metrics = group.prepare(batch, recipe, kl_coef=0.1)
    whole = prepare_rows(batch, recipe, 0.1)
    expected = columns_of_rows([whole.columns], [range(batch.rows)], batch.rows)
    found, wanted = batch.with_columns(**columns).padded(), batch.with_columns(**expected).padded()
    assert found.columns.keys() == wanted.columns.keys()
    assert torch.equal(found.response_mask, wanted.response_mask)
    for name, column in wanted.columns.items():
        assert torch.equal(found[name], column), name
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {name: metric.value for name, metric in whole.metrics.items()}, rel=1e-5
    )


@pytest.mark.parametrize("recipe", [make_recipe("grpo"), make_recipe("ppo")], ids=["grpo", "ppo"])
def test_the_number_of_ranks_changes_no_metric(recipe, monkeypatch):
    monkeypatch.setattr("rlhf_launch.workers.prepare._BLOCK", 160)
    monkeypatch.setattr("rlhf_launch.workers.prepare._BLOCK_BY_TOKEN", 160)
    batch, found = scored_batch(), []
    for ranks in (1, 4):
        handles = [LocalHandle(f"rank-{i}", lambda: TrainWorker("", None, {})) for i in range(ranks)]
        group = TrainGroup("policy", handles, waits=Waits(60))
        found.append(group.prepare(batch, recipe, kl_coef=0.1)[1])
        group.close()
    assert found[0] == found[1]


def test_blocks_are_whole_groups(monkeypatch):
    batch = scored_batch()
    monkeypatch.setattr("rlhf_launch.workers.prepare._BLOCK", 160)
    blocks = blocks_of_groups(batch, make_recipe("grpo"))
    assert [row for rows in blocks for row in rows] == list(range(batch.rows))
    assert len(blocks) > 3
    ids = batch["group_ids"].tolist()
    assert all(ids[rows.start - 1] != ids[rows.start] for rows in blocks[1:])


@pytest.mark.parametrize(
    "recipe",
    [
        make_recipe("ppo", {"whiten_rewards": True}),
        make_recipe("kl_cov"),
        make_recipe("gpg"),
        GRPO(advantage_options={"scale": "batch"}),
        make_recipe("grpo", {"shaping": {"normalize": True}}),
        make_recipe("grpo", {"loss_options": {"top_entropy": 0.5}}),
        make_recipe("grpo", {"off_policy": [{}]}),
    ],
)
def test_what_looks_at_the_whole_batch_is_not_prepared_by_groups(recipe):
    assert not recipe.prepares_by_group
    assert in_parts(recipe) is None


@pytest.mark.parametrize(
    "recipe",
    [
        make_recipe("ppo"),
        make_recipe("ppo", {"lam_critic": 1.0, "whiten_options": {"unbiased": True, "eps_mode": "add"}}),
        make_recipe("ppo", {"shaping": {"mask_truncated": True}, "kl_coef": 0.1}),
        make_recipe("reinforce_pp"),
        make_recipe("grpo", {"whiten": True, "whiten_options": {"kind": "keep_mean"}}),
    ],
    ids=["ppo", "decoupled", "truncated", "reinforce_pp", "grpo"],
)
def test_advantages_are_whitened_over_all_ranks(group, recipe):
    assert not recipe.prepares_by_group
    batch = scored_batch()
    columns, metrics = group.prepare(batch, recipe, kl_coef=0.1)
    whole = prepare_rows(batch, recipe, 0.1)
    expected = columns_of_rows([whole.columns], [range(batch.rows)], batch.rows)
    found, wanted = batch.with_columns(**columns).padded(), batch.with_columns(**expected).padded()
    assert found.columns.keys() == wanted.columns.keys()
    assert torch.equal(found.response_mask, wanted.response_mask)
    for name, column in wanted.columns.items():
        if name == "advantages":  # the sums of the blocks round otherwise
            torch.testing.assert_close(found[name], column, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found[name], column), name
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {name: metric.value for name, metric in whole.metrics.items()}, rel=1e-5, abs=1e-6
    )
