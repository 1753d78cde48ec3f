"""From token rewards to advantages along a response: GAE, discounted returns, and whitening over a batch.

Environment tokens (False in the mask, between sampled tokens) are skipped: they neither discount nor decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from rlhf_core import ConfigError, OneRank, Ranks, masked_sum
from torch import Tensor

from rlhf_algos.choices import check_choices

Whitening = Literal["standardize", "keep_mean", "scale", "center"]
"""With mean m and standard deviation s over the counted tokens of the batch:

- standardize: (x - m) / s, for advantages.
- keep_mean: (x - m) / s + m, which brings the scale to one around the same mean: what verl, TRL and torchtune call
  whitening with `shift_mean=False`; TRL's PPO does it to token rewards.
- scale: x / s.
- center: x - m (OpenRLHF's `no_advantage_std_norm`).
"""

EpsMode = Literal["add", "clamp"]
"""How `eps` guards the variance: `add` (var + eps, verl and TRL's PPO) or `clamp` (max(var, eps), OpenRLHF)."""


Decay = float | Float[Tensor, " rows"] | Float[Tensor, "rows length"]
"""One for all, one for each row, or one from each token to the next sampled one."""


def gae(
    rewards: Float[Tensor, "rows length"],
    values: Float[Tensor, "rows length"],
    response_mask: Bool[Tensor, "rows length"],
    *,
    gamma: Decay = 1.0,
    lam: Decay = 0.95,
) -> tuple[Float[Tensor, "rows length"], Float[Tensor, "rows length"]]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns, zero where masked.

    A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t, where `next` is the next *sampled* token
    and V after the last one is 0. returns = advantages + values. See `Decay` for `gamma` and `lam`.

    >>> mask = torch.tensor([[False, True, False, True]])
    >>> gae(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 4), mask, lam=0.5)[0]
    tensor([[0.0000, 0.5000, 0.0000, 1.0000]])
    """
    rewards, values = rewards.masked_fill(~response_mask, 0), values.masked_fill(~response_mask, 0)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(values.shape[0])
    for position in reversed(range(values.shape[1])):
        sampled = response_mask[:, position]
        discount, decay = _at(gamma, position), _at(lam, position)
        delta = rewards[:, position] + discount * next_value - values[:, position]
        advantage = torch.where(sampled, delta + discount * decay * advantage, advantage)
        next_value = torch.where(sampled, values[:, position], next_value)
        advantages[:, position] = torch.where(sampled, advantage, 0.0)
    return advantages, (advantages + values).masked_fill(~response_mask, 0)


def _at(decay: Decay, position: int) -> float | Tensor:
    return decay[:, position] if isinstance(decay, Tensor) and decay.dim() == 2 else decay


def turn_starts(response_mask: Bool[Tensor, "rows length"]) -> Bool[Tensor, "rows length"]:
    """True on the first token of each turn, a run of sampled tokens.

    >>> turn_starts(torch.tensor([[False, True, True, False, True]])).int()
    tensor([[0, 1, 0, 0, 1]], dtype=torch.int32)
    """
    return response_mask & ~torch.nn.functional.pad(response_mask[:, :-1], (1, 0), value=False)


def turn_ends(response_mask: Bool[Tensor, "rows length"]) -> Bool[Tensor, "rows length"]:
    """True on the last token of each turn.

    >>> turn_ends(torch.tensor([[False, True, True, False, True]])).int()
    tensor([[0, 0, 1, 0, 1]], dtype=torch.int32)
    """
    return response_mask & ~torch.nn.functional.pad(response_mask[:, 1:], (0, 1), value=False)


def between_turns(
    response_mask: Bool[Tensor, "rows length"], inside: float | Float[Tensor, " rows"], between: float
) -> Float[Tensor, "rows length"]:
    """A decay for `gae` that is another one from the last token of a turn to the next turn than inside of turns.

    Discounting by turns and not by words is what Verlog (2025) calls dual discounting.

    >>> between_turns(torch.tensor([[True, True, False, True]]), 1.0, 0.5)
    tensor([[1.0000, 0.5000, 1.0000, 0.5000]])
    """
    inside = torch.as_tensor(inside).reshape(-1, 1).expand(response_mask.shape).to(response_mask.device)
    return torch.where(turn_ends(response_mask), between, inside)


def turn_gae(
    rewards: Float[Tensor, "rows length"],
    values: Float[Tensor, "rows length"],
    response_mask: Bool[Tensor, "rows length"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Tensor, "rows length"], Float[Tensor, "rows length"]]:
    """GAE with a whole turn as one action: advantages and returns, equal on all tokens of a turn (2512.17008).

    A_k = delta_k + gamma lam A_{k+1}, delta_k = r_k + gamma V_{k+1} - V_k for the k-th turn, with the sum r_k of
    its rewards and the value V_k at its first token; `gamma` and `lam` count per turn. returns = A_k + V_k, so that
    the critic learns at every token of a turn what it should have said at the first.

    >>> rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    >>> mask = torch.tensor([[True, True, False, True]])
    >>> turn_gae(rewards, torch.zeros(1, 4), mask, gamma=0.5, lam=1.0)[0]
    tensor([[2., 2., 0., 2.]])
    """
    starts = turn_starts(response_mask)
    place = torch.where(starts, torch.arange(response_mask.shape[1], device=starts.device), 0).cummax(dim=1).values
    earned = torch.zeros_like(values).scatter_add(1, place, rewards.masked_fill(~response_mask, 0).to(values.dtype))
    both = gae(earned, values, starts, gamma=gamma, lam=lam)
    advantages, returns = (x.gather(1, place).masked_fill(~response_mask, 0) for x in both)
    return advantages, returns


def length_adaptive_lam(response_mask: Bool[Tensor, "rows length"], alpha: float = 0.05) -> Float[Tensor, " rows"]:
    """lam = 1 - 1 / (alpha length) for each response, at least 0 (VAPO, Yue et al. 2025, 2504.05118).

    The sum of the weights lam^i that GAE gives to the following tokens is then alpha times the length of the
    response, so that a reward reaches as large a share of a long one as of a short one.

    >>> length_adaptive_lam(torch.ones(1, 200, dtype=torch.bool), 0.05)
    tensor([0.9000])
    """
    return 1 - 1 / (alpha * response_mask.sum(dim=1)).clamp(min=1)


def discounted_returns(
    rewards: Float[Tensor, "rows length"], response_mask: Bool[Tensor, "rows length"], *, gamma: float = 1.0
) -> Float[Tensor, "rows length"]:
    """Sum of the rewards from each sampled token on, discounted per sampled token (REINFORCE++, Hu 2025)."""
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhitenConfig:
    """Configuration of `whiten`."""

    kind: Whitening = "standardize"
    """See `Whitening`."""
    unbiased: bool = False
    """Divide the variance by n - 1 (verl, TRL's PPO) and not by n (OpenRLHF)."""
    eps: float = 1e-8
    """Guard of the variance, see `EpsMode`."""
    eps_mode: EpsMode = "clamp"
    """See `EpsMode`."""

    def __post_init__(self) -> None:
        check_choices("whitening", self, kind=Whitening, eps_mode=EpsMode)
        if self.eps < 0:
            raise ConfigError(f"whitening: eps must not be negative, got {self.eps}")


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean, and sum of squared distances from the mean of some numbers; those of parts add up.

    The sum is that of Chan, Golub and LeVeque (1983), which no large mean spoils.

    >>> Moments(2, 1.5, 0.5) + Moments(1, 3.0, 0.0) == Moments(3, 2.0, 2.0)
    True
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, *, ranks: Ranks | None = None) -> Moments:
        """Those of the counted numbers of all ranks, by float64; None means there are no other ranks."""
        ranks, exact = ranks or OneRank(), values.double()
        count, total = ranks.sum([float(mask.sum()), float(masked_sum(exact, mask))])
        mean = total / max(count, 1.0)
        (squares,) = ranks.sum([float(masked_sum((exact - mean).square(), mask))])
        return cls(count, mean, squares)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Moments(count, mean, self.squares + other.squares + gap * gap * self.count * other.count / count)


def whiten(
    values: Float[Tensor, "rows length"],
    mask: Bool[Tensor, "rows length"],
    config: WhitenConfig | None = None,
    *,
    ranks: Ranks | None = None,
) -> Float[Tensor, "rows length"]:
    """Values brought to a common mean or scale over the counted tokens of all ranks; see `Whitening`.

    Args:
        values: one number per token.
        mask: True where a token counts; the result is zero elsewhere.
        config: None standardizes.
        ranks: other ranks that hold parts of the batch; None means this is the whole batch.

    Values that are all equal become zeros by `standardize` and `center`, never NaN.
    """
    return whiten_by(values, mask, config or WhitenConfig(), Moments.of(values, mask, ranks=ranks))


def whiten_by(values: Tensor, mask: Tensor, config: WhitenConfig, moments: Moments) -> Tensor:
    """`whiten` of a part of a batch, by the moments of all counted numbers of the batch; tensors of any shape."""
    variance = moments.squares / max(moments.count - 1.0 if config.unbiased else moments.count, 1.0)
    rescale = (variance + config.eps if config.eps_mode == "add" else max(variance, config.eps)) ** -0.5
    exact = values.double()
    result = exact if config.kind == "scale" else exact - moments.mean
    if config.kind != "center":
        result = result * rescale
    if config.kind == "keep_mean":
        result = result + moments.mean
    return result.masked_fill(~mask, 0).to(values.dtype)


def spread_scores(
    scores: Float[Tensor, " rows"], response_mask: Bool[Tensor, "rows length"]
) -> Float[Tensor, "rows length"]:
    """One number per response on each of its sampled tokens, zero elsewhere."""
    return scores.unsqueeze(1).expand(response_mask.shape).masked_fill(~response_mask, 0)
