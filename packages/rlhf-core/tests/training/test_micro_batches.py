"""Budgets of tokens that a model runs."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import Batch, pad_rows
from rlhf_core.training.micro_batches import TokenBudget, cut_batch


def batch_of(rows, *, rows_per_unit=1):
    """Rows as (prompt, number of response tokens); a prompt is its name's letters."""
    ids = [[*map(ord, prompt), *[1] * length] for prompt, length in rows]
    masks = [[False] * len(prompt) + [True] * length for prompt, length in rows]
    return Batch(
        token_ids=pad_rows(ids, value=0, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row) for row in ids], value=False, dtype=torch.bool),
        response_mask=pad_rows(masks, value=False, dtype=torch.bool),
        rows_per_unit=rows_per_unit,
    )


def cut(batch, tokens, counts):
    return cut_batch(batch, TokenBudget(tokens=tokens, counts=counts))


def test_each_way_of_counting_by_hand():
    batch = batch_of([("aaaa", 2), ("aaaa", 4), ("bbbb", 1), ("aaaa", 3)])
    # Longest first, rows of a prompt side by side: 1, 3, 0 of prompt a with 8, 7, 6 tokens, then 2 with 5.
    assert cut(batch, 16, "padded") == [[1, 3], [0, 2]]
    assert cut(batch, 21, "packed") == [[1, 3, 0], [2]]
    assert cut(batch, 13, "shared") == [[1, 3, 0], [2]], "4 + 4 + 3 + 2"
    assert cut(batch, 12, "shared") == [[1, 3], [0, 2]], "a prompt counts again in the next micro-batch"
    assert cut(batch, 18, "shared") == [[1, 3, 0, 2]]
    assert cut_batch(batch, 16) == cut(batch, 16, "padded")


def test_rows_of_a_unit_share_their_prompt():
    pairs = batch_of([("aaaaaa", 1), ("aaaaaa", 2), ("bb", 2), ("bb", 2)], rows_per_unit=2)
    assert cut(pairs, 9, "shared") == [[0], [1]]
    assert cut(pairs, 15, "shared") == [[0, 1]]
    assert cut(pairs, 15, "packed") == [[0], [1]]


def test_a_row_longer_than_the_budget_is_alone():
    assert cut(batch_of([("a", 9), ("b", 1), ("c", 1)]), 5, "shared") == [[0], [1, 2]]


def test_a_prompt_without_a_response_counts():
    assert cut(batch_of([("aaaa", 0), ("aaaa", 0)]), 7, "shared") == [[0, 1]]
    assert cut(batch_of([("aaaa", 0), ("aaaa", 0)]), 7, "packed") == [[0], [1]]


@given(
    st.lists(st.tuples(st.sampled_from(["a", "bb", "ccc"]), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 30),
)
def test_every_unit_once_and_within_the_budget(rows, tokens):
    batch = batch_of(rows)
    for counts in ("padded", "packed", "shared"):
        found = cut(batch, tokens, counts)
        assert sorted(unit for part in found for unit in part) == list(range(len(rows)))
        for part in found:
            prompts = {rows[unit][0] for unit in part}
            lengths = [len(rows[unit][0]) + rows[unit][1] for unit in part]
            used = {
                "padded": len(part) * max(lengths),
                "packed": sum(lengths),
                "shared": sum(map(len, prompts)) + sum(rows[unit][1] for unit in part),
            }[counts]
            assert used <= tokens or len(part) == 1
    assert (
        len(cut(batch, tokens, "shared")) <= len(cut(batch, tokens, "packed")) <= len(cut(batch, tokens, "padded"))
    )
