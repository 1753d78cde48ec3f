import dataclasses
from collections import Counter

import pytest
import torch
from rlhf_algos import GRPO, ReinforceConfig, reinforce
from rlhf_core import Batch, Loss, ModelOutputs, RaggedBatch, StepReport, cut_batch
from rlhf_launch.online.trainer import Trainer
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.prepare import joined_outputs
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits


class EchoRank:
    """Scores every token with its own id, so that misplaced rows show."""

    def score(self, batch, outputs):
        ids = batch.token_ids.float()
        experts = torch.stack((batch.token_ids, -batch.token_ids), dim=-1).to(torch.int16)
        return ModelOutputs(log_probs=ids * batch.response_mask, scores=ids[:, 0], routed_experts=experts)

    def score_rows(self, batch, outputs, adapters=True):
        return joined_outputs(self.score(batch.padded(), outputs), batch.padded())

    def close(self):
        pass


def ragged_batch():
    lengths = torch.tensor([3, 7, 2, 5, 4])
    attention_mask = torch.arange(7) < lengths[:, None]
    token_ids = torch.arange(1, 36).view(5, 7) * attention_mask
    response_mask = attention_mask.clone()
    response_mask[:, 0] = False
    return Batch(token_ids=token_ids, attention_mask=attention_mask, response_mask=response_mask)


@pytest.fixture
def echoes():
    group = TrainGroup("policy", [LocalHandle(f"rank-{i}", EchoRank) for i in range(3)], waits=Waits(60))
    yield group
    group.close()


def test_scores_come_back_in_the_order_of_the_rows(echoes):
    batch = ragged_batch()
    outputs = echoes.score(batch)
    assert torch.equal(outputs.log_probs, batch.token_ids.float() * batch.response_mask)
    assert torch.equal(outputs.scores, batch.token_ids[:, 0].float())


def test_rows_without_padding_are_scored_likewise(echoes):
    for batch in (ragged_batch(), ragged_batch().select([1]), ragged_batch().select([3, 0])):
        outputs = echoes.begin_score_rows(RaggedBatch.of(batch), ("log_probs", "scores")).result()
        found = RaggedBatch.of(batch).with_columns(**outputs)
        assert torch.equal(found["log_probs"], batch.token_ids.float() * batch.response_mask)
        assert torch.equal(found["scores"], batch.token_ids[:, 0].float())


class SeenRank(EchoRank):
    """Remembers what ran together."""

    def __init__(self, seen):
        self._seen = seen

    def score(self, batch, outputs):
        self._seen += [
            sorted(batch.select_units(units).token_ids[:, 0].tolist()) for units in cut_batch(batch, 10_000)
        ]
        return super().score(batch, outputs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_that_run_together_stay_on_one_rank_and_apart_from_copies(ranks):
    seen = []
    handles = [LocalHandle(f"rank-{i}", lambda: SeenRank(seen)) for i in range(ranks)]
    group = TrainGroup("reward", handles, waits=Waits(60))
    batch = ragged_batch().with_columns(run_together=torch.tensor([3, 0, 3, 0, 3]))
    outputs = group.score(batch, ("scores",))
    assert torch.equal(outputs.scores, batch.token_ids[:, 0].float())
    first, second = ([1, 15, 29], [8, 22])
    copies = -(-ranks // 2)
    assert sorted(seen) == [first] * copies + [second] * copies
    group.close()


def test_recorded_experts_go_into_the_update(echoes):
    batch = ragged_batch()
    rows = RaggedBatch.of(batch)
    experts = Trainer(policy=echoes, recipe=GRPO(), kl=None).score(rows, {"policy": ("log_probs",)})[
        "routed_experts"
    ]
    assert torch.equal(experts[..., 0].long(), batch.token_ids)
    assert torch.equal(experts[..., 1].long(), -batch.token_ids)


class CountingRank(EchoRank):
    """Remembers which rows it was given to step on."""

    def __init__(self):
        self.steps = []

    def step(self, batch, loss):
        self.steps.append(batch.sample_ids)
        return StepReport(loss=0.0, grad_norm=0.0, learning_rate=0.0)


@pytest.mark.parametrize(("rows", "rows_per_unit"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_batch_of_fewer_units_than_ranks_is_repeated_a_whole_number_of_times(rows, rows_per_unit):
    ranks = [CountingRank() for _ in range(4)]
    group = TrainGroup(
        "policy", [LocalHandle(f"rank-{i}", lambda r=r: r) for i, r in enumerate(ranks)], waits=Waits(60)
    )
    batch = ragged_batch().select(range(rows))
    batch = dataclasses.replace(batch, rows_per_unit=rows_per_unit, sample_ids=tuple(map(str, range(rows))))
    group.step(batch, Loss(function=reinforce, config=ReinforceConfig()))
    outputs = group.score(batch)
    group.close()
    given = [ids for rank in ranks for ids in rank.steps]
    assert all(given)  # collectives need every rank
    times = Counter(row for ids in given for row in ids)
    assert set(times) == set(batch.sample_ids)
    assert len(set(times.values())) == 1  # a mean over such copies is the mean over the batch
    assert torch.equal(outputs.log_probs, batch.token_ids.float() * batch.response_mask)
    assert torch.equal(outputs.scores, batch.token_ids[:, 0].float())


def test_a_batch_without_rows_is_refused_by_name(echoes):
    with pytest.raises(ValueError, match="policy: a batch without rows"):
        echoes.score(ragged_batch().select([]))
