"""Batch: validation, selection and units; collating trajectories; masked sums and means."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import Batch, LogProbMeaning, Trajectory, collate, concatenate, masked_mean, masked_sum, pad_rows


def batch(lengths=(3, 2, 4, 1), **fields) -> Batch:
    ids = [[10 * row + i for i in range(length)] for row, length in enumerate(lengths)]
    return Batch(
        token_ids=pad_rows(ids, value=0, dtype=torch.long),
        attention_mask=pad_rows([[True] * n for n in lengths], value=False, dtype=torch.bool),
        response_mask=pad_rows([[i > 0 for i in range(n)] for n in lengths], value=False, dtype=torch.bool),
        **fields,
    )


def test_units_count_the_tokens_of_their_rows():
    assert batch(rows_per_unit=2).unit_lengths == [5, 5]


def trajectory(name="a", *, response=2, temperature=1.0) -> Trajectory:
    return Trajectory(
        sample_id=name,
        group_id="g",
        token_ids=(1, 2) + (7,) * response,
        response_mask=(False, False) + (True,) * response,
        rollout_log_probs=(0.0, 0.0) + (-0.25,) * response,
        weight_versions=(-1, -1) + (3,) * response,
        meaning=LogProbMeaning(temperature=temperature),
    )


def test_counts():
    b = batch(rows_per_unit=2)
    assert (b.rows, b.units, b.tokens) == (4, 2, 10)
    assert b.lengths.tolist() == [3, 2, 4, 1]


def test_pad_rows():
    assert pad_rows([[1, 2], [], [3]], value=9, dtype=torch.long).tolist() == [[1, 2], [9, 9], [3, 9]]


def test_columns():
    b = batch().with_columns(scores=torch.arange(4.0), advantages=torch.ones(4, 4))
    assert "scores" in b
    assert b["advantages"].shape == (4, 4)
    assert "scores" not in batch(), "the old batch is unchanged"
    with pytest.raises(KeyError, match=r"no column 'values' \(columns: advantages, scores\)"):
        b["values"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": {"x": torch.zeros(3)}}, "column 'x'"),
        ({"columns": {"x": torch.zeros(4, 5)}}, "column 'x'"),
        ({"rows_per_unit": 3}, "units of 3"),
        ({"rows_per_unit": 0}, "units of 0"),
        ({"sample_ids": ("a",)}, "1 sample ids for 4 rows"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        batch(**fields)


def test_selecting_trims_to_the_longest_row():
    b = batch(columns={"x": torch.arange(16).view(4, 4), "y": torch.arange(4)}, sample_ids=("a", "b", "c", "d"))
    picked = b.select([1, 0])
    assert picked.token_ids.tolist() == [[10, 11, 0], [0, 1, 2]]
    assert picked["x"].tolist() == [[4, 5, 6], [0, 1, 2]]
    assert picked["y"].tolist() == [1, 0]
    assert picked.sample_ids == ("b", "a")


def test_units_stay_together():
    b = batch(rows_per_unit=2, columns={"y": torch.arange(4)})
    assert b.select_units([1, 0])["y"].tolist() == [2, 3, 0, 1]
    assert b.select_units([1]).rows_per_unit == 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_permutation_and_its_inverse_give_the_batch_back(lengths, random):
    b = batch(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    back = b.select(order).select([order.index(row) for row in range(len(lengths))])
    assert back.token_ids.equal(b.token_ids)
    assert back.response_mask.equal(b.response_mask)


def test_collate():
    b = collate([trajectory("a", response=2), trajectory("b", response=1)], pad_token_id=5)
    assert b.token_ids.tolist() == [[1, 2, 7, 7], [1, 2, 7, 5]]
    assert b.attention_mask.sum(dim=1).tolist() == [4, 3]
    assert b.response_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert b["rollout_log_probs"].tolist() == [[0, 0, -0.25, -0.25], [0, 0, -0.25, 0]]
    assert b.sample_ids == ("a", "b")


def test_collate_takes_the_samples_temperature_and_refuses_a_mixture():
    assert collate([trajectory(temperature=0.7)]).temperature == 0.7
    mixed = [trajectory(temperature=0.7), trajectory(temperature=1.0)]
    with pytest.raises(ValueError, match=r"different temperatures.*0\.7, 1\.0"):
        collate(mixed)
    assert collate(mixed, temperature=1.0).temperature == 1.0
    with pytest.raises(ValueError, match="empty"):
        collate([])


def test_collate_keeps_the_rewards_of_turns():
    with_rewards = replace(trajectory("b", response=1), rewards=(0.0, 0.0, 1.5))
    both = collate([trajectory("a", response=2), with_rewards])
    assert both["rewards"].tolist() == [[0, 0, 0, 0], [0, 0, 1.5, 0]]
    assert "rewards" not in collate([trajectory()])


def test_batches_of_unequal_width_are_put_together():
    def part(width, name):
        mask = torch.ones(2, width, dtype=torch.bool)
        columns = {"weights": torch.ones(2), "advantages": torch.ones(2, width), "pairs": torch.ones(2, width, 2)}
        ids = torch.full((2, width), width)
        names = (f"{name}-0", f"{name}-1")
        return Batch(token_ids=ids, attention_mask=mask, response_mask=mask, columns=columns, sample_ids=names)

    both = concatenate([part(2, "a"), part(3, "b")])
    assert both.token_ids.tolist() == [[2, 2, 0]] * 2 + [[3, 3, 3]] * 2
    assert both.lengths.tolist() == [2, 2, 3, 3]
    assert both["weights"].shape == (4,)
    assert both["advantages"][0].tolist() == [1, 1, 0]
    assert both["pairs"].shape == (4, 3, 2)
    assert both.sample_ids == ("a-0", "a-1", "b-0", "b-1")
    assert concatenate([part(2, "a"), replace(part(3, "b"), sample_ids=())]).sample_ids == ()


@pytest.mark.parametrize("change", [{"columns": {}}, {"temperature": 0.5}, {"rows_per_unit": 2}], ids=str)
def test_batches_of_different_kinds_are_not_put_together(change):
    one = batch().with_columns(advantages=torch.ones(4, 4))
    with pytest.raises(ValueError, match="batches differ in columns, temperature or rows per unit"):
        concatenate([one, replace(one, **change)])
    with pytest.raises(ValueError, match="no batch"):
        concatenate([])


def test_masked_sums_by_hand():
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
def test_a_masked_mean_is_that_of_the_kept_values(pairs):
    values, mask = (torch.tensor(column) for column in zip(*pairs, strict=True))
    kept = [value for value, keep in pairs if keep]
    expected = sum(kept) / len(kept) if kept else 0.0
    assert masked_mean(values.double(), mask).item() == pytest.approx(expected, abs=1e-4)
