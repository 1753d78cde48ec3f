"""Drawing tokens: candidate sets by hand, frequencies, and independence of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import SamplingConfig
from rlhf_rollout.backends.transformers.token_sampling import candidate_log_probs, draw_tokens, penalise

PROBS = [0.5, 0.25, 0.15, 0.1]


def sampling(**fields) -> SamplingConfig:
    return SamplingConfig(max_tokens=1, **fields)


def kept(**fields) -> list[float]:
    log_probs = candidate_log_probs(torch.tensor([PROBS]).log(), [sampling(**fields)])
    return [round(value, 4) for value in log_probs.exp()[0].tolist()]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PROBS),
        ({"top_k": 2}, [0.6667, 0.3333, 0.0, 0.0]),
        ({"top_p": 0.7}, [0.6667, 0.3333, 0.0, 0.0]),
        ({"top_p": 0.76}, [0.5556, 0.2778, 0.1667, 0.0]),
        ({"top_p": 0.01}, [1.0, 0.0, 0.0, 0.0]),
        ({"min_p": 0.4}, [0.6667, 0.3333, 0.0, 0.0]),
        ({"top_k": 3, "min_p": 0.4}, [0.6667, 0.3333, 0.0, 0.0]),
        # top-p counts the mass of what top-k and min-p have left: 0.5 / 0.75 reaches 0.6, 0.5 does not.
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 3, "top_p": 0.6}, [0.6667, 0.3333, 0.0, 0.0]),
        ({"min_p": 0.4, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
        # The temperature comes first: PROBS squared are in the ratios 1, 0.25, 0.09, 0.04.
        ({"temperature": 0.5, "min_p": 0.2}, [0.8, 0.2, 0.0, 0.0]),
        ({"temperature": 0.5, "top_p": 0.73}, [0.8, 0.2, 0.0, 0.0]),
        ({"temperature": 0.5, "top_p": 0.72}, [1.0, 0.0, 0.0, 0.0]),
        # min-p asks for a share of the largest of all; after top-p with 0.74 it would keep one token less.
        ({"min_p": 0.25, "top_p": 0.84}, [0.5556, 0.2778, 0.1667, 0.0]),
        ({"min_p": 0.25, "top_k": 3, "top_p": 0.83}, [0.6667, 0.3333, 0.0, 0.0]),
        ({"temperature": 0.5}, [round(p * p / sum(q * q for q in PROBS), 4) for p in PROBS]),
        ({"temperature": 0.0}, PROBS),
        ({"top_k": 100}, PROBS),
    ],
    ids=str,
)
def test_candidate_sets(fields, expected):
    assert kept(**fields) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 0.95), (5, 0.5), (100, 0.9), (1, 0.3)])
def test_candidate_sets_are_those_of_transformers(top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    theirs = logits
    for warper in (TemperatureLogitsWarper(0.6), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        theirs = warper(None, theirs)
    ours = candidate_log_probs(logits, [sampling(temperature=0.6, top_k=top_k, top_p=top_p)] * 64)
    torch.testing.assert_close(ours, theirs.log_softmax(dim=-1))


def test_equal_tokens_at_the_edge_of_top_k_stay_together():
    log_probs = candidate_log_probs(torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log(), [sampling(top_k=2)])
    assert log_probs.exp()[0].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("fields", "prompt", "sampled", "expected"),
    [
        # Token 0 is in the prompt, token 1 was sampled twice, token 2 both, token 3 neither.
        ({}, [0, 2], [1, 1, 2], [2.0, -1.0, 0.5, 3.0]),
        (
            {"repetition_penalty": 2.0},
            [0, 2],
            [1, 1, 2],
            [1.0, -2.0, 0.25, 3.0],
        ),  # once, however often
        ({"repetition_penalty": 0.5}, [0, 0], [], [4.0, -1.0, 0.5, 3.0]),
        ({"presence_penalty": 0.5}, [0, 2], [1, 1, 2], [2.0, -1.5, 0.0, 3.0]),  # not for the prompt
        ({"frequency_penalty": 0.5}, [0, 2], [1, 1, 2], [2.0, -2.0, 0.0, 3.0]),  # for each time
        ({"frequency_penalty": -1.0, "presence_penalty": 0.25}, [0, 2], [1, 1, 2], [2.0, 0.75, 1.25, 3.0]),
        # Repetition first: (-1 * 2) - 2 * 0.5 - 0.25, and 0.5 / 2 - 0.5 - 0.25.
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
            *([0, 2], [1, 1, 2]),
            [1.0, -3.25, -0.5, 3.0],
        ),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [0], [], [1.0, -1.0, 0.5, 3.0]),
        ({"repetition_penalty": 2.0}, [0, 9], [], [1.0, -1.0, 0.5, 3.0]),  # an id that is read only
    ],
    ids=str,
)
def test_penalties(fields, prompt, sampled, expected):
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    penalise(logits, sampling(**fields), prompt, sampled)
    assert logits.tolist() == pytest.approx(expected)


def test_the_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 50, generator=generator)
    tokens = torch.randint(50, (1, 30), generator=generator)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone())
    penalise(logits[0], sampling(repetition_penalty=1.3), tokens[0, :20].tolist(), tokens[0, 20:].tolist())
    torch.testing.assert_close(logits, theirs)


def test_rows_do_not_share_settings():
    logits = torch.tensor([PROBS, PROBS, PROBS]).log()
    together = candidate_log_probs(logits, [sampling(top_k=1), sampling(), sampling(temperature=0.5)])
    assert together[0].exp().tolist() == pytest.approx([1, 0, 0, 0])
    assert together[1].exp().tolist() == pytest.approx(PROBS)
    assert together[2].exp()[0] > 0.7


def test_frequencies_are_the_probabilities():
    rows = 20_000
    generator = torch.Generator().manual_seed(0)
    tokens, log_probs = draw_tokens(
        torch.tensor([PROBS]).log().expand(rows, -1), [sampling()] * rows, [generator] * rows
    )
    counts = torch.bincount(tokens, minlength=4) / rows
    # Four standard deviations of a share of 20 000 draws are at most 0.015.
    assert counts.tolist() == pytest.approx(PROBS, abs=0.015)
    assert log_probs.tolist() == pytest.approx([math.log(PROBS[token]) for token in tokens.tolist()], abs=1e-5)


def test_greedy_takes_the_first_of_the_best_and_no_noise():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    tokens, log_probs = draw_tokens(torch.tensor([PROBS]).log(), [sampling(temperature=0.0)], [generator])
    assert tokens.tolist() == [0]
    assert log_probs.item() == pytest.approx(math.log(0.5))
    assert torch.equal(state, generator.get_state())


@given(st.integers(0, 2**40), st.integers(0, 3))
def test_a_row_does_not_depend_on_its_neighbours(seed, row):
    torch.manual_seed(1)
    logits = torch.randn(4, 11)
    together, _ = draw_tokens(
        logits, [sampling()] * 4, [torch.Generator().manual_seed(seed + index) for index in range(4)]
    )
    alone, _ = draw_tokens(logits[row : row + 1], [sampling()], [torch.Generator().manual_seed(seed + row)])
    assert together[row] == alone[0]
