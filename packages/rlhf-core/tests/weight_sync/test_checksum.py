"""The checksum tells apart what differs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core.weight_sync.checksum import checksum


@given(st.integers(1, 200_000), st.integers(0, 2**31), st.integers(0, 7))
def test_one_flipped_bit_changes_both_sums(size, place, bit):
    data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    before = checksum(data)
    data[place % size] ^= 1 << bit
    assert all(new != old for new, old in zip(checksum(data), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_order_counts(dtype):
    data = torch.randint(0, 100, (50_000,)).to(dtype)
    moved = data.clone()
    moved[[7, 41_007]] = moved[[41_007, 7]] + 1
    assert checksum(data) != checksum(moved)
    assert checksum(data) != checksum(data.flip(0))
    assert checksum(data) == checksum(data.clone().view(50, 1000))


def test_views_and_empty_tensors():
    data = torch.arange(1000, dtype=torch.float32)
    assert checksum(data[1:900]) == checksum(data[1:900].clone())
    assert checksum(torch.empty(0)) == (0, 0)
    assert checksum(torch.zeros(3, dtype=torch.uint8)) != checksum(torch.zeros(4, dtype=torch.uint8))
