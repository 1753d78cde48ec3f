"""The comparison of two models' logits."""

import pytest
import torch
from rlhf_core import CheckpointError
from rlhf_launch.export.check import compare, probe_tokens, tolerance


def test_the_gap_is_relative_to_the_spread_of_the_source():
    source = torch.tensor([[101.0, 99.0]])
    found = compare(source, source + torch.tensor([[0.1, -0.1]]), 0.2)
    assert found.gap == pytest.approx(0.1, rel=1e-4)
    with pytest.raises(CheckpointError, match="does not say"):
        compare(source, source + torch.tensor([[0.1, -0.1]]), 0.05)


def test_one_number_is_relative_to_itself():
    assert compare(torch.tensor([[2.0]]), torch.tensor([[1.0]]), 1.0).gap == pytest.approx(0.5)


def test_a_model_of_another_shape_or_without_numbers_is_refused():
    with pytest.raises(CheckpointError, match="shape"):
        compare(torch.zeros(1, 2), torch.zeros(1, 3), 1.0)
    with pytest.raises(CheckpointError, match="bfloat16"):
        compare(torch.zeros(1, 2), torch.tensor([[0.0, torch.nan]]), 1.0)
    with pytest.raises(CheckpointError, match="does not say"):
        compare(torch.tensor([[0.0, torch.nan]]), torch.zeros(1, 2), 1.0)


def test_the_coarsest_dtype_decides():
    assert tolerance(torch.float32, torch.bfloat16) == tolerance(torch.bfloat16) > tolerance(torch.float32)


def test_tokens_are_of_the_models_vocabulary():
    assert probe_tokens(None, 5) == [0, 1, 2, 3, 4]
    assert probe_tokens(lambda text: {"input_ids": [7, 3, 900]}, 100) == [7, 3]
