"""Rows that run together and with no others: the same bits in any company, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import (
    RUN_TOGETHER,
    Batch,
    TokenBudget,
    concatenate,
    cut_batch,
    model_outputs,
    score_in_micro_batches,
    try_model,
    units_together,
)

transformers = pytest.importorskip("transformers")


def rows(*lengths, numbers=None, prompt=2, seed=0, rows_per_unit=1):
    width = max(lengths)
    ids = torch.randint(3, 60, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    ids[:, :prompt] = torch.tensor([7, 8, 9, 7][:prompt])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    batch = Batch(
        token_ids=ids.masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=mask & (torch.arange(width) >= prompt),
        rows_per_unit=rows_per_unit,
    )
    return batch if numbers is None else batch.with_columns(**{RUN_TOGETHER: torch.tensor(numbers)})


def contents(batch, cut):
    """The micro-batches by what is in them, in no order."""
    parts = [batch.select_units(units) for units in cut]
    return sorted([part.token_ids.tolist() for part in parts])


def test_a_micro_batch_holds_rows_of_one_number_alone():
    batch = rows(5, 3, 4, 5, 3, numbers=[4, 9, 4, 9, 0])
    assert units_together(batch) == [[2, 0], [1, 3], [4]]
    cut = cut_batch(batch, 1000)
    assert sorted(sorted(units) for units in cut) == [[0, 2], [1, 3], [4]]
    assert sorted(len(units) for units in cut_batch(batch, TokenBudget(tokens=6, counts="packed"))) == [1] * 5
    assert units_together(rows(5, 3, 4)) == [[0], [1], [2]]


def test_rows_of_a_unit_have_one_number():
    pairs = rows(3, 3, 4, 4, numbers=[1, 1, 0, 0], rows_per_unit=2)
    assert units_together(pairs) == [[1], [0]]
    with pytest.raises(ValueError, match="different numbers"):
        units_together(rows(3, 3, 4, 4, numbers=[1, 0, 0, 0], rows_per_unit=2))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 7), st.integers(0, 3)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
    st.sampled_from([TokenBudget(tokens=9), TokenBudget(tokens=12, counts="shared"), TokenBudget(tokens=500)]),
)
def test_what_runs_together_depends_neither_on_order_nor_on_the_rest(items, random, budget):
    batch = rows(*[length for length, _ in items], numbers=[number for _, number in items])
    expected = contents(batch, cut_batch(batch, budget))
    order = list(range(batch.rows))
    random.shuffle(order)
    shuffled = batch.select(order)
    assert contents(shuffled, cut_batch(shuffled, budget)) == expected
    alone = [batch.select([row for row in order if items[row][1] == number]) for _, number in items]
    assert all(part in expected for one in alone for part in contents(one, cut_batch(one, budget)))


# ------------------------------------------------------------ with a model


def model(kind, *, scalar, dtype):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, num_labels=1, pad_token_id=0)
    head = "SequenceClassification" if scalar else "CausalLM"
    return getattr(transformers, f"{kind}For{head}")(config).to(dtype).eval()


FIELDS = {"policy": ("log_probs", "entropy"), "critic": ("values",), "reward": ("scores",)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("role", FIELDS)
def test_the_bits_of_a_row_are_the_same_alone_in_company_and_in_another_order(role, packing, dtype):
    scorer = model("Llama", scalar=role != "policy", dtype=dtype)
    assert try_model(scorer, role, packing=packing).packing == packing
    group, others = rows(9, 12, 6, 10, seed=1), rows(13, 4, 30, 8, seed=2)

    def score(batch, numbers=None, tokens=10_000):
        if numbers is not None:
            batch = batch.with_columns(**{RUN_TOGETHER: torch.tensor(numbers)})
        outputs = score_in_micro_batches(
            batch,
            FIELDS[role],
            forward=lambda part, fields: model_outputs(scorer, part, fields),
            max_tokens=TokenBudget.of(scorer, tokens),
        )
        return [getattr(outputs, name) for name in FIELDS[role]]

    def of_group(values, places):
        return [value[places][:, :12] if value.dim() > 1 else value[places] for value in values]

    def same(found, expected):
        return all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))

    first, last = list(range(4)), list(range(4, 8))
    # The group keeps to itself.
    alone = score(group, [0] * 4)
    together = [5] * 4 + [1, 2, 1, 2]
    assert same(of_group(score(concatenate([group, others]), together), first), alone)
    assert same(of_group(score(concatenate([others, group]), together[4:] + together[:4]), last), alone)
    order = [6, 2, 0, 5, 3, 1, 7, 4]
    shuffled = concatenate([group, others]).select(order)
    found = score(shuffled, [together[row] for row in order])
    assert same(of_group(found, [order.index(row) for row in first]), alone)
    # In two micro-batches.
    small = 25 if packing else 24
    halves = score(group, [0] * 4, tokens=small)
    assert same(of_group(score(concatenate([others, group]), together[4:] + together[:4], small), last), halves)
    # Each row keeps to itself: one micro-batch or many, these bits or others.
    rowwise = score(group, [0, 1, 2, 3])
    assert same(of_group(score(concatenate([others, group]), list(range(8)), 14), last), rowwise)
    for row in first:
        single = score(group.select([row]))
        width = int(group.lengths[row])
        assert same(
            [value[:, :width] if value.dim() > 1 else value for value in single],
            [value[[row], :width] if value.dim() > 1 else value[[row]] for value in rowwise],
        )
