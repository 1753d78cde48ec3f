import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_algos.advantages.returns import (
    WhitenConfig,
    between_turns,
    discounted_returns,
    gae,
    spread_scores,
    turn_gae,
    turn_starts,
    whiten,
)
from rlhf_core import ConfigError

MASK = torch.tensor([[False, True, True, True]])


def test_gae_by_hand():
    rewards, values = torch.tensor([[9.0, 0.0, 0.0, 1.0]]), torch.tensor([[9.0, 0.5, 0.25, 0.5]])
    advantages, returns = gae(rewards, values, MASK, gamma=0.9, lam=0.8)
    third = 1 - 0.5
    second = 0.9 * 0.5 - 0.25 + 0.72 * third
    first = 0.9 * 0.25 - 0.5 + 0.72 * second
    assert advantages[0].tolist() == pytest.approx([0, first, second, third])
    assert returns[0].tolist() == pytest.approx([0, first + 0.5, second + 0.25, third + 0.5])


def test_environment_tokens_do_not_decay():
    """Two environment tokens before the last sampled one: 0.95 of the reward reaches it, not 0.95^3."""
    mask = torch.tensor([[False, True, False, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    advantages, _ = gae(rewards, torch.zeros(1, 5), mask, gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0, 0.95, 0, 0, 1.0])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 10_000))
def test_gae_equals_gae_of_the_sampled_tokens_alone(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([bits])
    rewards, values = torch.randn(2, 1, len(bits), generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.7)
    inside = torch.ones(1, sum(bits), dtype=torch.bool)
    dense, dense_returns = gae(rewards[mask][None], values[mask][None], inside, gamma=0.9, lam=0.7)
    torch.testing.assert_close(advantages[mask], dense[0])
    torch.testing.assert_close(returns[mask], dense_returns[0])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 10_000))
def test_turns_of_one_token_are_tokens(bits, seed):
    """With an environment token behind every sampled one, a turn is a token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[bit for sampled in bits for bit in (sampled, False)]])
    rewards, values = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(
        turn_gae(rewards, values, mask, gamma=0.9, lam=0.7),
        gae(rewards, values, mask, gamma=0.9, lam=0.7),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_turn_gae_by_hand():
    """Turns (r 1 + 2, V 0.5) and (r 4, V 3); the value inside of the first turn and masked NaN are not read."""
    mask = torch.tensor([[False, True, True, False, True, False]])
    rewards = torch.tensor([[math.nan, 1.0, 2.0, math.nan, 4.0, math.nan]])
    values = torch.tensor([[math.nan, 0.5, 99.0, math.nan, 3.0, math.nan]])
    advantages, returns = turn_gae(rewards, values, mask, gamma=0.5, lam=0.8)
    second = 4 - 3
    first = 3 + 0.5 * 3 - 0.5 + 0.4 * second
    assert advantages[0].tolist() == pytest.approx([0, first, first, 0, second, 0])
    assert returns[0].tolist() == pytest.approx([0, first + 0.5, first + 0.5, 0, 4, 0])


def test_a_decay_between_turns_alone():
    """gamma 1 in a turn and 0.5 between turns: half of a reward reaches the tokens of the turn before."""
    mask = torch.tensor([[True, True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 8.0]])
    gamma = between_turns(mask, 1.0, 0.5)
    assert gae(rewards, torch.zeros(1, 4), mask, gamma=gamma, lam=1.0)[0].tolist() == [[4, 4, 0, 8]]
    lam = between_turns(mask, torch.tensor([0.25]), 0.5)
    assert gae(rewards, torch.zeros(1, 4), mask, lam=lam)[0].tolist() == [[1, 4, 0, 8]]
    assert turn_starts(mask).int().tolist() == [[1, 0, 0, 1]]


def test_masked_nan_does_not_spread():
    rewards, values = torch.tensor([[math.nan, 0.0, 0.0, 1.0]]), torch.tensor([[math.nan, 0.0, 0.0, 0.0]])
    assert all(torch.isfinite(x).all() for x in gae(rewards, values, MASK))


def test_discounted_returns():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    assert discounted_returns(rewards, MASK, gamma=0.5)[0].tolist() == [0, 1.5, 1.0, 2.0]


def test_whiten_by_hand():
    values, mask = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]])
    assert whiten(values, mask)[0].tolist() == pytest.approx([-1, 1, 0])
    for options, expected in (
        ({"unbiased": True}, [-(0.5**0.5), 0.5**0.5, 0]),
        ({"eps": 3.0, "eps_mode": "add"}, [-0.5, 0.5, 0]),
        ({"eps": 4.0}, [-0.5, 0.5, 0]),
    ):
        assert whiten(values, mask, WhitenConfig(**options))[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("standardize", [-1, 1, 0]),
        ("keep_mean", [-1 + 7, 1 + 7, 0]),
        ("scale", [5 / 2, 9 / 2, 0]),
        ("center", [-2, 2, 0]),
    ],
)
def test_kinds_of_whitening_by_hand(kind, expected):
    """5 and 9: mean 7, deviation 2. `keep_mean` is what verl, TRL and torchtune call whitening without a shift."""
    values, mask = torch.tensor([[5.0, 9.0, 99.0]]), torch.tensor([[True, True, False]])
    assert whiten(values, mask, WhitenConfig(kind=kind))[0].tolist() == pytest.approx(expected)


def test_unknown_whitening_is_refused():
    with pytest.raises(ConfigError, match="standardize, keep_mean, scale, center"):
        WhitenConfig(kind="shift")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="negative"):
        WhitenConfig(eps=-1.0)


def test_whiten_of_constant_single_or_no_token_is_zero():
    values = torch.full((1, 3), 5.0)
    for mask in ([True, True, True], [True, False, False], [False, False, False]):
        for unbiased in (False, True):
            config = WhitenConfig(unbiased=unbiased)
            assert whiten(values, torch.tensor([mask]), config).tolist() == [[0, 0, 0]]


class TwoRanks:
    """Adds what the other rank would contribute."""

    size = 2

    def __init__(self, others):
        self.others = iter(others)

    def sum(self, values):
        return [a + b for a, b in zip(values, next(self.others), strict=True)]


def test_whiten_over_ranks_equals_whiten_of_everything():
    torch.manual_seed(1)
    values, mask = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3) > 0.3
    theirs = values[2:][mask[2:]]
    mean = float(values[mask].mean())
    ranks = TwoRanks([[len(theirs), float(theirs.sum())], [float((theirs - mean).square().sum())]])
    expected = whiten(values, mask)[:2]
    torch.testing.assert_close(whiten(values[:2], mask[:2], ranks=ranks), expected)  # type: ignore[arg-type]


def test_spread():
    assert spread_scores(torch.tensor([2.0]), MASK).tolist() == [[0, 2, 2, 2]]
