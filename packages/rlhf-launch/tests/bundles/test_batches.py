"""Batches as flat tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import Batch, RaggedBatch
from rlhf_launch.bundles.batches import pack_batch, unpack_batch


def a_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Batch(
        token_ids=torch.randint(1, 9, shape, generator=generator).masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=(torch.rand(shape, generator=generator) > 0.5) & mask,
        columns={
            "old_log_probs": torch.randn(shape, generator=generator).masked_fill(~mask, 0),
            "routed_experts": torch.randint(0, 4, (*shape, 3), generator=generator) * mask[..., None],
            "scores": torch.randn(len(lengths), generator=generator),
            "group_ids": torch.arange(len(lengths)),
        },
        temperature=0.5,
        sample_ids=tuple(f"s{row}" for row in range(len(lengths))),
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_batch_comes_back_to_the_last_bit(lengths):
    batch = a_batch(lengths)
    back = unpack_batch(pack_batch(RaggedBatch.of(batch)), temperature=0.5, sample_ids=batch.sample_ids)
    for name in ("token_ids", "attention_mask", "response_mask"):
        assert torch.equal(getattr(back, name), getattr(batch, name)), name
    assert back.columns.keys() == batch.columns.keys()
    for name, column in batch.columns.items():
        assert back[name].dtype == column.dtype
        assert torch.equal(back[name], column), name
    assert (back.temperature, back.sample_ids) == (0.5, batch.sample_ids)


def test_padding_takes_no_room():
    packed = pack_batch(RaggedBatch.of(a_batch([2, 100])))
    assert packed["token/old_log_probs"].shape == (102,)
    assert packed["token/routed_experts"].shape == (102, 3)
    assert packed["row/scores"].shape == (2,)
