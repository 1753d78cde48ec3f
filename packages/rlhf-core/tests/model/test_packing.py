from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core.data.batch import Batch, pad_rows
from rlhf_core.model.packing import Segment, pack
from rlhf_core.training.micro_batches import cut_micro_batches


def batch_of(rows: list[tuple[list[int], int]]) -> Batch:
    """Rows as (tokens, length of the prompt)."""
    return Batch(
        token_ids=pad_rows([tokens for tokens, _ in rows], value=0, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(tokens) for tokens, _ in rows], value=False, dtype=torch.bool),
        response_mask=pad_rows(
            [[i >= prompt for i in range(len(tokens))] for tokens, prompt in rows], value=False, dtype=torch.bool
        ),
    )


def test_a_shared_prompt_stands_once():
    packed = pack(batch_of([([7, 8, 1], 2), ([7, 8, 2, 3], 2), ([5, 6], 1)]))
    assert packed.token_ids.tolist() == [[7, 8, 1, 2, 3, 5, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert packed.places.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4], [5, 6, 0, 0]]
    assert packed.layout.segments == (
        Segment(start=0, stop=2),
        Segment(start=2, stop=3, prompt_start=0, prompt_stop=2),
        Segment(start=3, stop=5, prompt_start=0, prompt_stop=2),
        Segment(start=5, stop=7, prompt_start=5, prompt_stop=5),
    )


def test_sharing_can_be_switched_off():
    packed = pack(batch_of([([7, 8, 1], 2), ([7, 8, 2], 2)]), share_prompts=False)
    assert packed.token_ids.tolist() == [[7, 8, 1, 7, 8, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]


def test_rows_without_counted_tokens_and_equal_rows():
    packed = pack(batch_of([([7, 8], 2), ([7, 8], 2), ([7, 8], 2)]))
    assert packed.token_ids.tolist() == [[7, 8]]
    assert packed.places.tolist() == [[0, 1]] * 3


def test_masks_are_causal_after_the_prompt_and_reach_back_no_further_than_the_window():
    layout = pack(batch_of([([7, 8, 1, 2], 2), ([7, 8, 3], 2)])).layout
    yes, no = True, False
    assert (layout.mask(2, 4, torch.zeros(1)) == 0).tolist() == [[yes, yes, yes, no], [yes, yes, yes, yes]]
    windowed = layout.mask(2, 4, torch.zeros(1), window=2)
    assert (windowed == 0).tolist() == [[no, yes, yes, no], [no, no, yes, yes]]
    assert layout.mask(2, 4, torch.zeros(1), window=2) is windowed
    assert layout.mask(2, 4, torch.zeros(1, dtype=torch.float64)).dtype is torch.float64


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(0, 7)), min_size=1, max_size=6
    ),
    st.booleans(),
)
def test_every_token_finds_itself_and_its_position(rows, share):
    batch = batch_of(rows)
    packed = pack(batch, share_prompts=share)
    assert packed.token_ids.shape == packed.position_ids.shape
    assert sum(s.stop - s.start for s in packed.layout.segments) == packed.token_ids.shape[1]
    positions = torch.arange(batch.token_ids.shape[1]).expand_as(batch.token_ids)
    mask = batch.attention_mask
    assert torch.equal(packed.token_ids[0][packed.places[mask]], batch.token_ids[mask])
    assert torch.equal(packed.position_ids[0][packed.places[mask]], positions[mask])
    if not share:
        assert packed.token_ids.shape[1] == batch.tokens


def test_rows_of_one_prompt_share_a_micro_batch():
    lengths = [9, 5, 8, 6, 7, 4]
    groups = ["a", "b", "a", "b", "a", "b"]
    assert cut_micro_batches(lengths, rows_per_unit=1, max_tokens=27, groups=groups) == [[0, 2, 4], [3, 1, 5]]
    # A later group with a longer row than the rest of this one keeps the padded size within the budget.
    cut = cut_micro_batches([10, 2, 9], rows_per_unit=1, max_tokens=20, groups=["a", "a", "b"])
    assert cut == [[0, 1], [2]]
