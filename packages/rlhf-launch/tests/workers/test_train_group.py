import pytest
import torch
from rlhf_core import Batch, ModelOutputs
from rlhf_launch.online.trainer import Trainer
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.train_group import TrainGroup


class EchoRank:
    """Scores every token with its own id, so that misplaced rows show."""

    def score(self, batch, outputs):
        ids = batch.token_ids.float()
        experts = torch.stack((batch.token_ids, -batch.token_ids), dim=-1).to(torch.int16)
        return ModelOutputs(log_probs=ids * batch.response_mask, scores=ids[:, 0], routed_experts=experts)

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
    group = TrainGroup("policy", [LocalHandle(f"rank-{i}", EchoRank) for i in range(3)], timeout_s=10)
    yield group
    group.close()


def test_scores_come_back_in_the_order_of_the_rows(echoes):
    batch = ragged_batch()
    outputs = echoes.score(batch)
    assert torch.equal(outputs.log_probs, batch.token_ids.float() * batch.response_mask)
    assert torch.equal(outputs.scores, batch.token_ids[:, 0].float())


def test_recorded_experts_go_into_the_update(echoes):
    batch = ragged_batch()
    experts = Trainer(policy=echoes, recipe=None, kl=None).score(batch)["routed_experts"]
    assert torch.equal(experts[..., 0].long(), batch.token_ids)
    assert torch.equal(experts[..., 1].long(), -batch.token_ids)
