"""The preference losses as functions of two scores per pair; `dpo` feeds them log(policy / reference)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from rlhf_core import Batch, ConfigError
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_algos.losses.offline.responses import split_pairs

PairLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo",
    "nca",
    "bco",
    "sppo",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "aot_unpaired",
]
"""With c, r the scores of chosen and rejected, d = c - r, s = sigmoid, eps = label_smoothing:

- sigmoid: -(1 - eps) log s(beta d) - eps log s(-beta d). DPO; cDPO (Mitchell 2023) with eps > 0.
- hinge: max(0, 1 - beta d). SLiC (Zhao et al. 2023).
- ipo: (d - 1 / (2 beta))^2. IPO (Azar et al. 2023, eq. 17).
- robust: (-(1 - eps) log s(beta d) + eps log s(-beta d)) / (1 - 2 eps). rDPO (Chowdhury et al. 2024).
- exo: KL between (s(beta d), s(-beta d)) and (1 - eps, eps). EXO (Ji et al. 2024, eq. 16).
- nca: -log s(beta c) - log s(-beta c) / 2 - log s(-beta r) / 2. NCA (Chen et al. 2024).
- bco: -log s(beta c - delta) - log s(-(beta r - delta)). BCO (Jung et al. 2024), delta from the column
  `reward_shift` [rows], 0 without it (as in TRL).
- sppo: (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2. SPPO (Wu et al. 2024), hard labels.
- apo_zero: 1 - s(beta c) + s(beta r); apo_down: s(beta c) + 1 - s(beta d). APO (D'Oosterlinck et al. 2024).
- discopop: the blend of -log s(beta d) and exp(-beta d) by s(beta d / tau). DiscoPOP (Lu et al. 2024, eq. 5).
- aot, aot_unpaired: sigmoid of the differences of *sorted* scores. AOT (Melnyk et al. 2024); see `aot_losses`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLossSettings:
    """Numbers that the pair losses share."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    tau: float = 0.05
    """DiscoPOP's temperature."""
    shift: Float[Tensor, " pairs"] | None = None
    """BCO's delta."""


Pairs = Float[Tensor, " pairs"]


def smoothed_sigmoid(logits: Pairs, label_smoothing: float = 0.0) -> Pairs:
    """-(1 - eps) log sigmoid(logits) - eps log sigmoid(-logits)."""
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _sigmoid(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    return smoothed_sigmoid(settings.beta * (chosen - rejected), settings.label_smoothing)


def _hinge(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    return torch.relu(1 - settings.beta * (chosen - rejected))


def _ipo(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    return (chosen - rejected - 1 / (2 * settings.beta)).square()


def _robust(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    logits, eps = settings.beta * (chosen - rejected), settings.label_smoothing
    return (-(1 - eps) * logsigmoid(logits) + eps * logsigmoid(-logits)) / (1 - 2 * eps)


def _exo(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    logits = settings.beta * (chosen - rejected)
    target = torch.tensor([1 - settings.label_smoothing, settings.label_smoothing], dtype=logits.dtype).log()
    log_win, log_lose = logsigmoid(logits), logsigmoid(-logits)
    return log_win.exp() * (log_win - target[0]) + log_lose.exp() * (log_lose - target[1])


def _nca(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    chosen, rejected = settings.beta * chosen, settings.beta * rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def _bco(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    shift = 0.0 if settings.shift is None else settings.shift
    return -logsigmoid(settings.beta * chosen - shift) - logsigmoid(shift - settings.beta * rejected)


def _sppo(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    half = 1 / (2 * settings.beta)
    return (chosen - half).square() + (rejected + half).square()


def _apo_zero(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    return 1 - torch.sigmoid(settings.beta * chosen) + torch.sigmoid(settings.beta * rejected)


def _apo_down(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    return torch.sigmoid(settings.beta * chosen) + 1 - torch.sigmoid(settings.beta * (chosen - rejected))


def _discopop(chosen: Pairs, rejected: Pairs, settings: PairLossSettings) -> Pairs:
    logits = settings.beta * (chosen - rejected)
    blend = logits / settings.tau
    # exp(-logits) * sigmoid(blend) in one exponent: apart, they are inf * 0 for very negative logits.
    return -logsigmoid(logits) * torch.sigmoid(-blend) + (logsigmoid(blend) - logits).exp()


PAIR_LOSSES: Mapping[str, Callable[[Pairs, Pairs, PairLossSettings], Pairs]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo": _exo,
    "nca": _nca,
    "bco": _bco,
    "sppo": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
"""Losses of each pair by itself."""


def aot_partners(
    policy: Float[Tensor, " rows"], reference: Float[Tensor, " rows"], *, paired: bool = True
) -> Float[Tensor, " rows"]:
    """The column `aot_partner` [rows] for AOT: what each row is compared with once both sides are sorted.

    Sorting spans the whole global batch, so it is done before the step, from a forward-only score with the weights
    the step starts from; the gradient of the sorted loss is then a sum over rows.

    Args:
        policy: log-probs of the responses (of all pairs of the global batch), chosen and rejected alternating.
        reference: the same under the reference.
        paired: `aot` sorts the policy's chosen-minus-rejected and the reference's; `aot_unpaired` sorts the chosen
            and the rejected log-ratios.
    """
    if paired:
        target = (reference[0::2] - reference[1::2]).sort().values
        return target[_ranks(policy[0::2] - policy[1::2])].repeat_interleave(2)
    chosen, rejected = (policy - reference)[0::2], (policy - reference)[1::2]
    result = torch.empty_like(policy)
    result[0::2] = rejected.sort().values[_ranks(chosen)]
    result[1::2] = chosen.sort().values[_ranks(rejected)]
    return result


def aot_losses(chosen: Pairs, rejected: Pairs, batch: Batch, settings: PairLossSettings, *, paired: bool) -> Pairs:
    """AOT (Melnyk et al. 2024): smoothed sigmoid of beta times the differences of sorted scores.

    Reads `aot_partner`; the paired form also `ref_log_probs_sum`. In the unpaired form both rows of a pair carry
    half of the value and the whole of their own gradient.
    """
    if "aot_partner" not in batch:
        raise ConfigError(
            "the AOT losses sort over the whole batch: add the column 'aot_partner' with aot_partners(...)"
        )
    partner, other = split_pairs(batch["aot_partner"], batch)
    if paired:
        reference = (
            batch["ref_log_probs_sum"] if "ref_log_probs_sum" in batch else torch.zeros_like(batch["aot_partner"])
        )
        own = chosen - rejected + reference[0::2] - reference[1::2]
        return smoothed_sigmoid(settings.beta * (own - partner), settings.label_smoothing)
    up = smoothed_sigmoid(settings.beta * (chosen - partner), settings.label_smoothing)
    down = smoothed_sigmoid(settings.beta * (other - rejected), settings.label_smoothing)
    return up + down - (up + down).detach() / 2


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(stable=True).argsort()
