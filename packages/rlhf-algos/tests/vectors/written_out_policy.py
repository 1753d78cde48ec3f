"""Policy losses written out in float64, a token at a time, with nothing of the package: the frozen vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Inputs = dict[str, Any]
Terms = tuple[Any, Any]
Place = tuple[int, int]


def clamp(x, low, high):
    """A clip whose gradient is that of x inside of the bounds and none outside."""
    now = float(x.detach())
    return x if low <= now <= high else torch.tensor(low if now < low else high, dtype=torch.float64)


class Tokens:
    """The counted tokens of a batch, and the numbers that the losses have of each."""

    def __init__(self, x: Inputs, limit: float) -> None:
        self.x, self.limit = x, limit
        self.mask = x["response_mask"].tolist()
        self.rows = len(self.mask)
        self.places = [(r, t) for r in range(self.rows) for t in range(len(self.mask[0])) if self.mask[r][t]]

    def of_row(self, row: int) -> list[Place]:
        return [place for place in self.places if place[0] == row]

    def log_prob(self, place: Place):
        return self.x["log_probs"][place]

    def old(self, place: Place):
        return self.x["old_log_probs"][place] if "old_log_probs" in self.x else self.log_prob(place).detach()

    def log_ratio(self, place: Place):
        return clamp(self.log_prob(place) - self.old(place), -self.limit, self.limit)

    def mean_log_ratio(self, row: int):
        ratios = [self.log_ratio(place) for place in self.of_row(row)]
        return sum(ratios) / max(len(ratios), 1)

    def sum_log_ratio(self, row: int):
        return sum(self.log_ratio(place) for place in self.of_row(row))

    def advantage(self, place: Place) -> float:
        advantages = self.x["advantages"]
        return float(advantages[place[0]] if advantages.dim() == 1 else advantages[place])


def aggregate(tokens: Tokens, o: SimpleNamespace, value: Callable[[Place], Any]) -> Terms:
    """Sum and weight of the values of all tokens."""
    if o.aggregation == "token_mean":
        return sum(value(place) for place in tokens.places), float(len(tokens.places))
    total, weight = 0.0, 0.0
    for row in range(tokens.rows):
        values = [value(place) for place in tokens.of_row(row)]
        if o.aggregation == "prompt_mean":
            share = 1 / max(float(tokens.x["prompt_tokens"][row]), 1)
            total, weight = total + sum(values) * share, weight + len(values) * share
            continue
        weight += 1.0 if values or o.count_empty_rows else 0.0
        if o.aggregation == "seq_mean_token_mean":
            total = total + sum(values) / max(len(values), 1)
        elif o.aggregation == "seq_mean_token_sum":
            total = total + sum(values)
        else:
            total = total + sum(values) / o.max_length
    return total, weight


def kl_of_token(log_p, log_q, o: SimpleNamespace, names: tuple[str, str, str, str]):
    """The KL estimate of a token and its gradient; `names` are those of the four options."""
    kind, gradient, ratio_limit, value_limit = (getattr(o, name) for name in names)
    d = log_p - log_q
    if kind == "k3":
        limited = clamp(d, -ratio_limit, ratio_limit)
        value = (-limited).exp() - 1 + limited
    else:
        value = {"k1": d, "k2": d * d / 2, "abs": d.abs()}[kind]
    value = clamp(value, -value_limit, value_limit)
    return value if gradient == "own" else value.detach() + d * d / 2 - (d * d / 2).detach()


def finished(tokens: Tokens, o: SimpleNamespace, term: Callable[[Place], Any], penalty=None) -> Terms:
    """The policy term with its weights and masks, the KL, the entropy and the likelihood of right answers."""
    x = tokens.x

    def weighted(place: Place):
        result = term(place)
        if "importance_weights" in x:
            result = result * x["importance_weights"][place]
        if o.top_entropy < 1:
            result = result * float(x["entropy_selected"][place])
        if o.sequence_kl_limit is not None and tokens.advantage(place) < 0:
            gaps = [sampler(other) - float(tokens.log_prob(other).detach()) for other in tokens.of_row(place[0])]
            result = result * float(sum(gaps) / len(gaps) <= o.sequence_kl_limit)
        return result

    def sampler(place: Place) -> float:
        source = x.get("rollout_log_probs", x.get("old_log_probs"))
        return float(source[place])

    def whole(place: Place):
        result = weighted(place)
        if penalty is not None:
            result = result + penalty(place)
        if o.kl_coef:
            names = ("kl_estimator", "kl_gradient", "kl_log_ratio_limit", "kl_value_limit")
            kl = kl_of_token(tokens.log_prob(place), x["ref_log_probs"][place], o, names)
            if o.kl_ratio_weighted:
                kl = kl * tokens.log_ratio(place).exp()
            result = result + o.kl_coef * kl
        if o.entropy_coef:
            result = result - o.entropy_coef * x["entropy"][place]
        return result

    total, weight = aggregate(tokens, o, whole)
    if "likelihood_weight" in x:
        total = total - sum(x["likelihood_weight"][p[0]] * tokens.log_prob(p) for p in tokens.places)
    return total, weight


def surrogate(ratio, advantage: float, low: float, high: float, dual: float | None):
    """PPO's clipped surrogate of one ratio."""
    plain, clipped = -advantage * ratio, -advantage * clamp(ratio, low, high)
    loss = clipped if bool(clipped > plain) else plain
    if dual is not None and advantage < 0 and bool(loss > -advantage * dual):
        return torch.tensor(-advantage * dual, dtype=torch.float64)
    return loss


def bounds(o: SimpleNamespace) -> tuple[float, float]:
    return 1 - o.clip_range, 1 + (o.clip_range if o.clip_range_high is None else o.clip_range_high)


def ppo_clip(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        return surrogate(tokens.log_ratio(place).exp(), tokens.advantage(place), *bounds(o), o.dual_clip)

    return finished(tokens, o, term)


def clip_cov(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        kept = 1.0 - float(x["cov_selected"][place])
        return kept * surrogate(tokens.log_ratio(place).exp(), tokens.advantage(place), *bounds(o), o.dual_clip)

    return finished(tokens, o, term)


def kl_cov(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        log_ratio = tokens.log_ratio(place)
        penalty = o.penalty_coef * log_ratio.abs() * float(x["cov_selected"][place])
        return -tokens.advantage(place) * log_ratio.exp() + penalty

    return finished(tokens, o, term)


def reinforce(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)
    return finished(tokens, o, lambda place: -tokens.advantage(place) * tokens.log_prob(place))


def gspo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        if o.length_normalized:
            log_ratio = tokens.mean_log_ratio(place[0])
        else:
            log_ratio = clamp(tokens.sum_log_ratio(place[0]), -o.log_ratio_limit, o.log_ratio_limit)
        if o.token_form:
            own = tokens.log_ratio(place)
            log_ratio = log_ratio.detach() + own - own.detach()
        return surrogate(log_ratio.exp(), tokens.advantage(place), *bounds(o), o.dual_clip)

    return finished(tokens, o, term)


def gmpo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)
    high = o.clip_range if o.clip_range_high is None else o.clip_range_high

    def clipped(place: Place):
        if tokens.advantage(place) > 0:
            return clamp(tokens.log_ratio(place), -math.inf, high)
        return clamp(tokens.log_ratio(place), -o.clip_range, math.inf)

    def term(place: Place):
        row = tokens.of_row(place[0])
        return -tokens.advantage(place) * (sum(clipped(other) for other in row) / len(row)).exp()

    return finished(tokens, o, term)


def vespo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        log_w = sum(float(tokens.log_ratio(other).detach()) for other in tokens.of_row(place[0]))
        if "importance_weights" in x:
            weights = [float(x["importance_weights"][other]) for other in tokens.of_row(place[0])]
            log_w += sum(min(math.log(max(weight, 1e-8)), 20.0) for weight in weights)
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        positive = tokens.advantage(place) >= 0
        power = o.power_positive if positive else o.power_negative
        decay = o.decay_positive if positive else o.decay_negative
        weight = math.exp(power * log_w + decay * (1 - math.exp(log_w)))
        return -weight * tokens.advantage(place) * tokens.log_prob(place)

    plain = Tokens({name: value for name, value in x.items() if name != "importance_weights"}, o.log_ratio_limit)
    return finished(plain, o, term)


def cispo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        ratio = min(max(math.exp(float(tokens.log_ratio(place).detach())), o.ratio_low), o.ratio_high)
        return -ratio * tokens.advantage(place) * tokens.log_prob(place)

    return finished(tokens, o, term)


def sapo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        advantage = tokens.advantage(place)
        tau = o.temperature_positive if advantage > 0 else o.temperature_negative
        gate = 1 / (1 + (-tau * (tokens.log_ratio(place).exp() - 1)).exp())
        return -advantage * 4 / tau * gate

    return finished(tokens, o, term)


def dro(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def term(place: Place):
        return -tokens.advantage(place) * tokens.log_prob(place) + o.beta / 2 * tokens.log_ratio(place) ** 2

    return finished(tokens, o, term)


def dppo(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)
    high = o.limit_low if o.limit_high is None else o.limit_high

    def inside(place: Place) -> bool:
        old, new = float(tokens.old(place)), float(tokens.log_prob(place).detach())
        p, q = math.exp(old), math.exp(new)
        moved = abs(p - q)
        if o.divergence == "kl":
            moved = p * (old - new) + (1 - p) * (math.log1p(-p) - math.log1p(-q))
        rose = new > old
        beyond = moved > (high if rose else o.limit_low)
        further = tokens.advantage(place) > 0 if rose else tokens.advantage(place) < 0
        return not (beyond and (further or o.symmetric))

    def term(place: Place):
        log_ratio = tokens.log_ratio(place)
        ratio = math.exp(float(log_ratio.detach()))
        ratio = ratio if o.ratio_high is None else min(ratio, o.ratio_high)
        return -tokens.advantage(place) * ratio * (1 + log_ratio - log_ratio.detach()) * float(inside(place))

    return finished(tokens, o, term, lambda place: o.log_ratio_coef * tokens.log_ratio(place) ** 2)


def value_clip(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, math.inf)

    def term(place: Place):
        value, target = x["values"][place], x["returns"][place]
        error = (value - target) ** 2
        if o.clip_range is not None:
            old = x["old_values"][place]
            clipped = (old + clamp(value - old, -o.clip_range, o.clip_range) - target) ** 2
            error = clipped if bool(clipped > error) else error
        return error / 2

    return aggregate(tokens, o, term)
