"""Masked sums and means."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import masked_mean, masked_sum


def test_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_sum(values, mask).item() == 4
    assert masked_mean(values, mask).item() == 2
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 0.0]
    assert masked_sum(values, mask, dim=0).tolist() == [1.0, 0.0, 3.0]


def test_an_empty_mask_gives_zero_and_no_nan_gradient():
    values = torch.ones(3, requires_grad=True)
    mean = masked_mean(values, torch.zeros(3, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0
    assert values.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_may_hold_anything(poison):
    values = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, False, True]))
    mean.backward()
    assert mean.item() == 2
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=1, max_size=30))
def test_it_is_the_mean_of_the_kept_values(pairs):
    values, mask = (torch.tensor(column) for column in zip(*pairs, strict=True))
    kept = [value for value, keep in pairs if keep]
    expected = sum(kept) / len(kept) if kept else 0.0
    assert masked_mean(values.double(), mask).item() == pytest.approx(expected, abs=1e-4)
