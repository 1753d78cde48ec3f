"""Rows without padding, which must hold what a batch holds."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import (
    Batch,
    LogProbMeaning,
    PackedInts,
    RaggedBatch,
    RaggedColumn,
    Run,
    Trajectory,
    collate,
    deal_units,
)


def same(one, other):
    assert one.columns.keys() == other.columns.keys()
    for name in ("token_ids", "attention_mask", "response_mask"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name, column in one.columns.items():
        assert column.dtype == other[name].dtype
        assert torch.equal(column, other[name]), name
    for name in ("temperature", "rows_per_unit", "sample_ids", "response_tokens", "tokens"):
        assert getattr(one, name) == getattr(other, name)


def a_batch(lengths):
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Batch(
        token_ids=torch.randint(1, 9, shape, generator=generator).masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=(torch.rand(shape, generator=generator) > 0.5) & mask,
        columns={
            "old_log_probs": torch.randn(shape, generator=generator).masked_fill(~mask, 0),
            "routed_experts": torch.randint(0, 4, (*shape, 3), generator=generator).short() * mask[..., None],
            "scores": torch.randn(len(lengths), generator=generator),
        },
        temperature=0.5,
        sample_ids=tuple(f"s{row}" for row in range(len(lengths))),
    )


def sent(value):
    """What another process gets, and the buffers that went out of band."""
    buffers = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    memories = [buffer.raw().tobytes() for buffer in buffers]
    return pickle.loads(head, buffers=memories), memories


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_it_holds_what_a_batch_holds(lengths, data):
    batch = a_batch(lengths)
    rows = RaggedBatch.of(batch)
    same(rows.padded(), batch)
    some = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1))
    same(rows.select(some).padded(), batch.select(some))
    same(sent(rows.select(some))[0].padded(), batch.select(some))
    same(pickle.loads(pickle.dumps(rows, protocol=2)).padded(), batch)
    ranks = data.draw(st.integers(1, len(lengths)))
    assert deal_units(rows, ranks) == deal_units(batch, ranks)


PROMPT = PackedInts(range(100))


def trajectory(name, response, *, prompt=PROMPT, rewards=(), temperature=1.0):
    return Trajectory(
        sample_id=name,
        group_id="0",
        token_ids=prompt + PackedInts(range(response)),
        response_mask=(False,) * len(prompt) + (True,) * response,
        rollout_log_probs=(0.0,) * len(prompt) + (-0.5,) * response,
        weight_versions=(-1,) * len(prompt) + (3,) * response,
        rewards=rewards,
        meaning=LogProbMeaning(temperature=temperature),
    )


def test_trajectories_are_rows_in_their_own_memory():
    items = [trajectory("a", 300), trajectory("b", 200, rewards=(0.0,) * 299 + (0.25,))]
    rows = RaggedBatch.of_trajectories(items)
    same(rows.padded(), collate(items))
    assert rows.per_token["token_ids"].rows[0] == items[0].token_ids.parts
    with pytest.raises(ValueError, match="different temperatures"):
        RaggedBatch.of_trajectories([trajectory("a", 1), trajectory("b", 1, temperature=0.5)])
    with pytest.raises(ValueError, match="empty list"):
        RaggedBatch.of_trajectories([])


def test_a_prompt_travels_once_and_runs_not_at_all():
    rows = RaggedBatch.of_trajectories([trajectory(str(n), 300) for n in range(4)])
    found, memories = sent(rows.only(()))
    assert sorted(map(len, memories)) == [400, 1200, 1200, 1200, 1200]
    assert found.per_token["response_mask"].rows[0] == (Run(False, 100), Run(True, 300))
    same(found.padded(), rows.only(()).padded())


def test_columns_lose_their_padding():
    rows = RaggedBatch.of(a_batch([3, 1])).with_columns(advantages=torch.ones(2, 3), kept=torch.arange(2))
    assert rows["advantages"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rows["kept"].tolist() == [0, 1]
    assert "advantages" in rows
    assert "token_ids" not in rows
    with pytest.raises(KeyError, match="columns: advantages, kept, old_log_probs"):
        rows["values"]
    with pytest.raises(ValueError, match="column 'scores' has 3 rows, the batch 2"):
        rows.with_columns(scores=torch.zeros(3))


def test_what_repeats_in_a_row_is_kept_as_runs():
    column = RaggedColumn.cut(torch.tensor([[0.0] * 100 + [2.0] * 200, [1.0] * 300]), [300, 0])
    assert column.compressed().rows[0] == (Run(0.0, 100), Run(2.0, 200))
    assert np.array_equal(column.compressed().joined(), column.joined())
    found, memories = sent(column.compressed())
    assert torch.equal(found.padded(300), column.padded(300))
    assert sum(map(len, memories)) == 0


def test_numbers_that_are_not_finite_are_found_where_they_count():
    batch = a_batch([3, 2])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    rows = RaggedBatch.of(Batch(token_ids=batch.token_ids, attention_mask=batch.attention_mask, response_mask=mask))
    bad = torch.tensor([[float("nan"), 0.0, 0.0], [0.0, float("inf"), 0.0]])
    column = rows.with_columns(bad=bad).per_token["bad"]
    assert column.rows_not_finite(rows.per_token["response_mask"]) == 1


def test_rows_followed_by_rows_with_fewer_columns():
    def batch(lengths, **columns):
        tokens = [np.arange(length, dtype=np.int32) for length in lengths]
        masks = [np.ones(length, dtype=bool) for length in lengths]
        return RaggedBatch(
            lengths=tuple(lengths),
            per_token={
                "token_ids": RaggedColumn([(one,) for one in tokens], np.dtype(np.int32)),
                "response_mask": RaggedColumn([(one,) for one in masks], np.dtype(bool)),
                **{name: one for name, one in columns.items() if isinstance(one, RaggedColumn)},
            },
            per_row={name: one for name, one in columns.items() if isinstance(one, torch.Tensor)},
            sample_ids=tuple(f"{length} tokens" for length in lengths),
        )

    experts = RaggedColumn([(np.ones((3, 2), np.int16),)], np.dtype(np.int16), (2,))
    old = RaggedColumn([(Run(-0.5, 3),)], np.dtype(np.float32))
    first = batch([3], old_log_probs=old, routed_experts=experts, group_ids=torch.tensor([7]))
    more = batch([2, 4], scores=torch.ones(2), group_ids=torch.tensor([1, 2], dtype=torch.int32))
    whole = pickle.loads(pickle.dumps(first.followed_by(more)))
    assert whole.lengths == (3, 2, 4)
    assert whole.sample_ids == ("3 tokens", "2 tokens", "4 tokens")
    padded = whole.padded()
    assert set(padded.columns) == {"old_log_probs", "routed_experts", "group_ids"}
    assert padded["group_ids"].tolist() == [7, 1, 2]
    assert padded["group_ids"].dtype == torch.int64
    assert padded["old_log_probs"].sum() == -1.5
    assert padded["routed_experts"].shape == (3, 4, 2)
    assert padded["routed_experts"].sum() == 6
    assert padded.token_ids.tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3]]
    assert padded.response_mask.sum(dim=1).tolist() == [3, 2, 4]
    with pytest.raises(ValueError, match=r"units of 1 and of 2 rows"):
        first.followed_by(replace(more, rows_per_unit=2))
    short = more.with_columns(routed_experts=RaggedColumn([(Run(0, 2),), (Run(0, 4),)], np.dtype(np.int16)))
    with pytest.raises(ValueError, match=r"\(2,\) and \(\) numbers for each token"):
        first.followed_by(short)
