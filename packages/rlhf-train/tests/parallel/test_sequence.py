import pytest
import torch
from rlhf_core import Batch, ConfigError, ModelOutputs
from rlhf_train.parallel.ranks import RankInfo, TrainingRanks
from rlhf_train.parallel.sequence import SequenceGroup, concatenated, own_rows


def batch(width, name):
    mask = torch.ones(2, width, dtype=torch.bool)
    return Batch(
        token_ids=torch.full((2, width), width),
        attention_mask=mask,
        response_mask=mask,
        columns={"weights": torch.ones(2), "advantages": torch.ones(2, width)},
        sample_ids=(f"{name}-0", f"{name}-1"),
    )


def test_batches_of_unequal_width_are_put_together():
    both = concatenated([batch(2, "a"), batch(3, "b")])
    assert both.token_ids.tolist() == [[2, 2, 0]] * 2 + [[3, 3, 3]] * 2
    assert both.lengths.tolist() == [2, 2, 3, 3]
    assert both["weights"].shape == (4,)
    assert both["advantages"][0].tolist() == [1, 1, 0]
    assert both.sample_ids == ("a-0", "a-1", "b-0", "b-1")


def test_a_rank_gets_its_own_rows_back():
    outputs = ModelOutputs(log_probs=torch.arange(12.0).view(4, 3), scores=torch.arange(4.0))
    mine = own_rows(outputs, slice(2, 4), width=2)
    assert mine.log_probs is not None
    assert mine.scores is not None
    assert mine.log_probs.tolist() == [[6, 7], [9, 10]]
    assert mine.scores.tolist() == [2, 3]
    assert mine.values is None


def test_groups_must_fill_the_ranks():
    with pytest.raises(ConfigError, match="2 does not divide the 3 training ranks"):
        SequenceGroup(TrainingRanks(RankInfo(rank=0, world_size=3)), size=2)
