import pytest
import torch
from rlhf_algos.losses.offline.responses import (
    reference_log_probs,
    response_lengths,
    response_log_probs,
    split_pairs,
)
from rlhf_core import Batch, ConfigError, DataError, ModelOutputs

MASK = torch.tensor([[False, True, True], [False, False, False]])


def rows(rows_per_unit=2):
    return Batch(
        token_ids=torch.ones(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"ref_log_probs_sum": torch.tensor([-4.0, 0.0])},
        rows_per_unit=rows_per_unit,
    )


def test_sums_means_and_an_empty_response():
    outputs = ModelOutputs(log_probs=torch.tensor([[9.0, -1.0, -2.0], [9.0, 9.0, 9.0]]))
    assert response_log_probs(outputs, rows()).tolist() == [-3.0, 0.0]
    assert response_log_probs(outputs, rows(), mean=True).tolist() == [-1.5, 0.0]
    assert reference_log_probs(rows(), mean=True).tolist() == [-2.0, 0.0]
    assert response_lengths(rows()).tolist() == [2, 1]


def test_pairs_alternate():
    chosen, rejected = split_pairs(torch.tensor([1.0, 2.0]), rows())
    assert (chosen.tolist(), rejected.tolist()) == ([1.0], [2.0])
    with pytest.raises(DataError, match="rows_per_unit=1"):
        split_pairs(torch.zeros(2), rows(rows_per_unit=1))


def test_missing_log_probs():
    with pytest.raises(ConfigError, match="log_probs"):
        response_log_probs(ModelOutputs(), rows())
