"""How many tokens fit: lines, choices and the rows of a trial, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import RUN_TOGETHER, Batch, ResourceError, pad_rows
from rlhf_core.training.fitting import (
    MOST_TOKENS,
    MemoryLine,
    RankMemory,
    agreed_tokens,
    fitting_tokens,
    trial_rows,
    trial_sizes,
)
from rlhf_core.training.micro_batches import counted_tokens

MIB = 1 << 20


def test_a_line_goes_through_both_passes():
    line = MemoryLine.through((1000, 30 * MIB), (2000, 50 * MIB))
    assert line.at(1000) == 30 * MIB
    assert line.at(2000) == 50 * MIB
    assert line.fixed == 10 * MIB
    assert line.at(3000) == 70 * MIB


def test_what_grows_faster_than_the_tokens_is_not_underestimated():
    quadratic = {tokens: tokens * tokens for tokens in (500, 1000)}
    line = MemoryLine.through((500, quadratic[500]), (1000, quadratic[1000]))
    assert line.fixed == 0
    assert line.at(1000) >= quadratic[1000]
    assert line.at(3000) >= 3 * quadratic[1000], "three rows of 1000"


def test_a_larger_pass_that_takes_less_counts_as_no_growth():
    assert MemoryLine.through((1000, 30), (2000, 20)) == MemoryLine(fixed=20.0, per_token=0.0)


def test_two_passes_of_one_size_make_no_line():
    with pytest.raises(ValueError, match="the second must have more"):
        MemoryLine.through((1000, 30), (1000, 40))


@pytest.mark.parametrize(
    ("free", "longest", "tokens"),
    [
        (1_000_000, 500, 9728),  # (1,000,000 - 10,000) / 100 = 9900, down to a multiple of 256
        (1_000_000, 9800, 9800),  # the longest unit is more than that
        (10_000_000, 500, MOST_TOKENS),
        (10_000_000, 20_000, 20_000),  # longer than any micro-batch need be
        (9_000, 500, 500),  # not even what is fixed fits within the margin
    ],
)
def test_the_choice_by_hand(free, longest, tokens):
    assert fitting_tokens(MemoryLine(fixed=10_000, per_token=100), free=free, longest=longest) == tokens


def test_a_model_whose_memory_does_not_grow_takes_the_most():
    assert fitting_tokens(MemoryLine(fixed=10_000, per_token=0), free=1e6, longest=5, most=4096) == 4096


@given(
    fixed=st.floats(0, 1e12),
    per_token=st.floats(1, 1e9),
    free=st.floats(0, 1e12),
    longest=st.integers(1, 100_000),
)
def test_what_is_chosen_fits_unless_it_is_the_longest_unit(fixed, per_token, free, longest):
    line = MemoryLine(fixed=fixed, per_token=per_token)
    tokens = fitting_tokens(line, free=free, longest=longest)
    assert longest <= tokens <= max(longest, MOST_TOKENS)
    assert tokens == longest or line.at(tokens) <= free * (1 + 1e-9)
    assert fitting_tokens(line, free=2 * free, longest=longest) >= tokens


def rank(free, *, place="a", fixed=0.0, per_token=1000.0):
    return RankMemory(place=place, line=MemoryLine(fixed=fixed, per_token=per_token), free=free)


def agreed(*ranks, longest=100, margin=0.5):
    return agreed_tokens(ranks, longest=longest, most=MOST_TOKENS, margin=margin)


def test_all_take_what_fits_on_the_smallest_rank():
    found = agreed(rank(8e6, place="a"), rank(4e6, place="b"), rank(8e6, place="c", per_token=1500.0))
    assert found.tokens == 1792  # half of 4e6 is 2000 tokens
    assert (found.fixed, found.per_token, found.free) == (0, 1000, 4_000_000)


def test_ranks_of_one_place_share_what_is_free_there():
    assert agreed(rank(8e6), rank(8e6)) == agreed(rank(4e6))
    assert agreed(rank(8e6), rank(8e6)).tokens == 1792


def test_the_margin_gives_way_to_the_longest_unit_and_the_rest_does_not():
    assert agreed(rank(4e6), longest=3000).tokens == 3000
    with pytest.raises(ResourceError) as caught:
        agreed(rank(64 * MIB, fixed=8 * MIB, per_token=32768.0), rank(1e12, place="b"), longest=3000)
    assert str(caught.value) == (
        "not even one micro-batch of the longest rows fits: 3000 tokens need 8 MiB + 3000 x 32.0 KiB = 102 MiB, "
        "and 64 MiB are free; shorten the rows (lengths.max_length), use gradient_checkpointing, more ranks, or a "
        "smaller model"
    )


def test_it_is_said_in_numbers():
    found = agreed(rank(64 * MIB, fixed=8 * MIB, per_token=10240.0))
    assert (
        str(found)
        == "micro-batches of 2,304 tokens: 8 MiB fixed + 10.0 KiB a token, 64 MiB free on the smallest rank"
    )


@given(unit=st.integers(2, 200_000), most=st.integers(2, 65_536))
def test_trials_are_small_and_of_two_sizes(unit, most):
    (share, units), (other_share, other_units) = trial_sizes(unit, least=1024, most=most)
    small, large = share * units * unit, other_share * other_units * unit
    assert large == 2 * small
    assert large <= max(unit, most, 2048)


ROWS = Batch(
    token_ids=pad_rows([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0], [1, 1, 1, 1]], value=0, dtype=torch.long),
    attention_mask=pad_rows([[1] * 4, [1] * 2, [1] * 3, [1] * 4], value=0, dtype=torch.bool),
    response_mask=pad_rows([[0, 0, 1, 1], [0, 1], [0, 1, 1], [0, 0, 0, 1]], value=0, dtype=torch.bool),
    columns={
        "advantages": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "weights": torch.arange(16.0).view(4, 4),
        "candidate_ids": torch.arange(32).view(4, 4, 2),
        RUN_TOGETHER: torch.arange(4),
    },
    sample_ids=("a", "b", "c", "d"),
)


def test_rows_of_a_trial_repeat_those_of_the_batch():
    found = trial_rows(ROWS, length=6, units=3)
    assert found.token_ids.tolist() == [[1, 2, 3, 4, 1, 2], [6, 5, 6, 5, 6, 5], [9, 7, 8, 9, 7, 8]]
    assert found.attention_mask.all()
    assert found.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1]]
    assert found["advantages"].tolist() == [1.0, 2.0, 3.0]
    assert found["weights"][1].tolist() == [5.0, 4.0, 5.0, 4.0, 5.0, 4.0], "columns move with their tokens"
    assert found["candidate_ids"].shape == (3, 6, 2)
    assert RUN_TOGETHER not in found
    assert found.sample_ids == ()


def test_rows_of_a_trial_may_be_shorter_and_more_than_those_of_the_batch():
    found = trial_rows(ROWS, length=2, units=6)
    assert found.token_ids.tolist() == [[1, 2], [6, 5], [9, 7], [1, 1], [1, 2], [6, 5]]
    assert found.rows == 6


def test_units_of_a_trial_stay_whole():
    pairs = Batch(
        token_ids=ROWS.token_ids,
        attention_mask=ROWS.attention_mask,
        response_mask=ROWS.response_mask,
        rows_per_unit=2,
    )
    found = trial_rows(pairs, length=3, units=3)
    assert found.units == 3
    assert found.token_ids[4:].tolist() == [[3, 4, 1], [5, 6, 5]], "the first pair again, from its third token on"


@given(units=st.integers(1, 9), length=st.integers(2, 40))
def test_the_tokens_of_a_trial_count_nearly_in_full(units, length):
    generator = torch.Generator().manual_seed(units * 41 + length)
    ids = torch.randint(1, 1000, (3, 37), generator=generator)
    batch = Batch(token_ids=ids, attention_mask=ids > 0, response_mask=torch.arange(37).expand(3, 37) >= 30)
    found = trial_rows(batch, length=length, units=units)
    assert counted_tokens(found, "padded") == counted_tokens(found, "packed") == units * length
    assert counted_tokens(found, "shared") == units * length, "no two units share a prompt"
