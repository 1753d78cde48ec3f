"""Losses on data sets written out in float64, a response at a time: what the frozen vectors hold."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from written_out_policy import Inputs, Terms, Tokens, aggregate, clamp


def log_sigmoid(x):
    return -torch.log1p((-x).exp()) if bool(x > 0) else x - torch.log1p(x.exp())


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def log_prob_of(x: Inputs, row: int, *, first: int | None = None):
    """Sum of the log-probs of a response, or of its first tokens."""
    counted = [t for t, inside in enumerate(x["response_mask"][row].tolist()) if inside]
    return sum((x["log_probs"][row, t] for t in counted[:first]), torch.zeros((), dtype=torch.float64))


def length_of(x: Inputs, row: int) -> int:
    return int(x["response_mask"][row].sum())


def mean_log_prob_of(x: Inputs, row: int):
    return log_prob_of(x, row) / max(length_of(x, row), 1)


def smoothed(logit, eps: float):
    return -(1 - eps) * log_sigmoid(logit) - eps * log_sigmoid(-logit)


def pair_loss(kind: str, c, r, o: SimpleNamespace, shift: float = 0.0):
    """The loss of a pair of scores."""
    beta, eps = o.beta, getattr(o, "label_smoothing", 0.0)
    logit = beta * (c - r)
    if kind == "sigmoid":
        return smoothed(logit, eps)
    if kind == "hinge":
        return clamp(1 - logit, 0.0, math.inf)
    if kind == "ipo":
        return (c - r - 1 / (2 * beta)) ** 2
    if kind == "robust":
        return (-(1 - eps) * log_sigmoid(logit) + eps * log_sigmoid(-logit)) / (1 - 2 * eps)
    if kind == "exo":
        win, lose = sigmoid(logit), sigmoid(-logit)
        return win * (win.log() - math.log(1 - eps)) + lose * (lose.log() - math.log(eps))
    if kind == "nca":
        return -log_sigmoid(beta * c) - (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)) / 2
    if kind == "bco":
        return -log_sigmoid(beta * c - shift) - log_sigmoid(shift - beta * r)
    if kind == "sppo":
        return (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2
    if kind == "apo_zero":
        return 1 - sigmoid(beta * c) + sigmoid(beta * r)
    if kind == "apo_down":
        return sigmoid(beta * c) + 1 - sigmoid(logit)
    blend = sigmoid(logit / o.discopop_tau)
    return -log_sigmoid(logit) * (1 - blend) + (-logit).exp() * blend


def f_score(h, o: SimpleNamespace):
    """f'(u) of the divergence at u = exp(h)."""
    u = h.exp()
    if o.f_divergence == "forward_kl":
        return 1 - 1 / u
    if o.f_divergence == "js_divergence":
        return (2 * u / (1 + u)).log()
    if o.f_divergence == "alpha_divergence":
        return (u ** (o.alpha - 1) - 1) / (o.alpha - 1)
    return h


def nll_of(x: Inputs, row: int, mean: str):
    divisor = max(length_of(x, row), 1) if mean == "sequence" else float(x["sft_divisor"][row])
    return -log_prob_of(x, row) / divisor


def dpo(x: Inputs, o: SimpleNamespace) -> Terms:
    pairs = len(x["response_mask"]) // 2
    total: Any = 0.0

    def log_ratio(row: int, shorter: int):
        reference = 0.0 if o.reference_free else float(x["ref_log_probs_sum"][row])
        whole = log_prob_of(x, row) - reference
        if o.ld_alpha == 1:
            return whole
        reference = 0.0 if o.reference_free else float(x["ref_log_probs_shared"][row])
        shared = log_prob_of(x, row, first=shorter) - reference
        return shared + o.ld_alpha * (whole - shared)

    def score(row: int, shorter: int):
        value = f_score(log_ratio(row, shorter), o)
        return value / max(length_of(x, row), 1) if o.length_normalized else value

    for pair in range(pairs):
        c, r = 2 * pair, 2 * pair + 1
        shorter = min(length_of(x, c), length_of(x, r))
        chosen, rejected = score(c, shorter), score(r, shorter)
        if o.loss == "aot":
            reference = float(x["ref_log_probs_sum"][c] - x["ref_log_probs_sum"][r])
            loss = smoothed(
                o.beta * (chosen - rejected + reference - float(x["aot_partner"][c])), o.label_smoothing
            )
        elif o.loss == "aot_unpaired":
            up = smoothed(o.beta * (chosen - float(x["aot_partner"][c])), o.label_smoothing)
            down = smoothed(o.beta * (float(x["aot_partner"][r]) - rejected), o.label_smoothing)
            loss = up + down - (up + down).detach() / 2
        else:
            shift = float(x["reward_shift"][c]) if "reward_shift" in x else 0.0
            loss = pair_loss(o.loss, chosen, rejected, o, shift)
        if o.weighted:
            for row in (c, r):
                loss = loss * math.exp(mean_over_collision(x, row))
        if o.sft_coef:
            loss = loss + o.sft_coef * nll_of(x, c, o.sft_mean)
        if o.exploration_coef:
            for row in (c, r):
                loss = loss + o.exploration_coef * float(x["from_reference"][row]) * log_prob_of(x, row)
        total = total + loss
    return total, float(pairs)


def mean_over_collision(x: Inputs, row: int) -> float:
    """Mean of log(p / sum_v p(v)^2) over a response."""
    counted = [t for t, inside in enumerate(x["response_mask"][row].tolist()) if inside]
    gaps = [float((x["log_probs"][row, t] - x["log_collision"][row, t]).detach()) for t in counted]
    return sum(gaps) / max(len(gaps), 1)


def alpha_reward(m, alpha: float):
    return (1 - (-alpha * m).exp()) / alpha if alpha else m


def simpo(x: Inputs, o: SimpleNamespace) -> Terms:
    pairs, total = len(x["response_mask"]) // 2, 0.0
    for pair in range(pairs):
        chosen, rejected = (alpha_reward(mean_log_prob_of(x, 2 * pair + side), o.alpha) for side in (0, 1))
        total = total + smoothed(o.beta * (chosen - rejected) - o.gamma, o.label_smoothing)
        total = total + (o.sft_coef * nll_of(x, 2 * pair, o.sft_mean) if o.sft_coef else 0.0)
    return total, float(pairs)


def cpo(x: Inputs, o: SimpleNamespace) -> Terms:
    pairs, total = len(x["response_mask"]) // 2, 0.0
    value = mean_log_prob_of if o.loss == "ipo" else log_prob_of
    for pair in range(pairs):
        chosen, rejected = (alpha_reward(value(x, 2 * pair + side), o.alpha) for side in (0, 1))
        total = total + pair_loss(o.loss, chosen, rejected, o)
        total = total + (o.sft_coef * nll_of(x, 2 * pair, o.sft_mean) if o.sft_coef else 0.0)
    return total, float(pairs)


def tpo(x: Inputs, o: SimpleNamespace) -> Terms:
    triples, total = len(x["response_mask"]) // 3, 0.0
    value = mean_log_prob_of if o.length_normalized or o.loss == "ipo" else log_prob_of
    for triple in range(triples):
        chosen, rejected = value(x, 3 * triple), value(x, 3 * triple + 1)
        if o.loss == "sigmoid":
            total = total + smoothed(o.beta * (chosen - rejected) - o.gamma, o.label_smoothing)
        else:
            total = total + pair_loss(o.loss, chosen, rejected, SimpleNamespace(beta=o.beta))
        total = total + (o.sft_coef * nll_of(x, 3 * triple + 2, o.sft_mean) if o.sft_coef else 0.0)
    return total, float(triples)


def orpo(x: Inputs, o: SimpleNamespace) -> Terms:
    pairs, total = len(x["response_mask"]) // 2, 0.0

    def log_odds(row: int):
        log_p = mean_log_prob_of(x, row)
        # A response without a token has p = 1; the odds are those of 1 - 2.2e-16.
        log_p = clamp(log_p, -math.inf, -torch.finfo(torch.float64).eps)
        return log_p - (-torch.expm1(log_p)).log()

    for pair in range(pairs):
        gap = log_odds(2 * pair) - log_odds(2 * pair + 1)
        total = total - o.beta * log_sigmoid(gap) + nll_of(x, 2 * pair, o.sft_mean)
    return total, float(pairs)


def kto(x: Inputs, o: SimpleNamespace) -> Terms:
    total: Any = 0.0
    for row in range(len(x["response_mask"])):
        h = log_prob_of(x, row) - float(x["ref_log_probs_sum"][row])
        sign = 1.0 if bool(x["desirable"][row]) else -1.0
        weight = o.desirable_weight if sign > 0 else o.undesirable_weight
        if o.loss == "bco":
            total = total - weight * log_sigmoid(sign * (o.beta * h - float(x["reward_shift"][row])))
        else:
            baseline = float(x["kl_baseline"][row]) if o.loss == "kto" else 0.0
            total = total + weight * (1 - sigmoid(sign * o.beta * (h - baseline)))
    return total, float(len(x["response_mask"]))


def bradley_terry(x: Inputs, o: SimpleNamespace) -> Terms:
    pairs, total = len(x["response_mask"]) // 2, 0.0
    for pair in range(pairs):
        chosen, rejected = x["scores"][2 * pair], x["scores"][2 * pair + 1]
        margin = float(x["margin"][2 * pair]) if "margin" in x else 0.0
        total = total - log_sigmoid(chosen - rejected - margin) + o.center_coef * (chosen + rejected) ** 2
    return total, float(pairs)


def process_reward_loss(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, math.inf)
    places = tokens.places
    if o.supervision == "outcome":
        places = [tokens.of_row(row)[-1] for row in range(tokens.rows) if tokens.of_row(row)]
    total: Any = 0.0
    for place in places:
        label = float(x["step_labels"][place])
        if o.label_tokens:
            right, wrong = x["candidate_log_probs"][place]
            if o.label_softmax == "labels":
                right, wrong = log_sigmoid(right - wrong), log_sigmoid(wrong - right)
        else:
            right, wrong = log_sigmoid(x["values"][place]), log_sigmoid(-x["values"][place])
        total = total - label * right - (1 - label) * wrong
    return total, float(len(places))


def sft(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, math.inf)

    def term(place):
        log_p = tokens.log_prob(place)
        factor = math.exp(float(log_p.detach())) if o.loss == "dft" else 1.0
        return -factor * log_p * (float(x["token_weights"][place]) if "token_weights" in x else 1.0)

    return aggregate(tokens, o, term)


def on_policy_distillation(x: Inputs, o: SimpleNamespace) -> Terms:
    tokens = Tokens(x, o.log_ratio_limit)

    def gap(place) -> float:
        value = float(tokens.log_prob(place).detach()) - float(x["teacher_log_probs"][place])
        return min(max(value, -o.log_ratio_limit), o.log_ratio_limit)

    def cost(place) -> float:
        following = [other for other in tokens.of_row(place[0]) if other[1] >= place[1]]
        weights = [o.gamma**i if o.gamma else float(i == 0) for i in range(len(following))]
        total = sum(weight * gap(other) for weight, other in zip(weights, following, strict=True))
        return total / (sum(weights) if o.length_normalized and o.gamma else 1.0)

    def term(place):
        ratio = tokens.log_ratio(place).exp()
        plain = ratio * cost(place)
        if o.clip_range is None:
            return plain
        clipped = clamp(ratio, 1 - o.clip_range, 1 + o.clip_range) * cost(place)
        return clipped if bool(clipped > plain) else plain

    return sum(term(place) for place in tokens.places), float(len(tokens.places))


def divergence(student, teacher, o: SimpleNamespace):
    """Between two vectors of log-probs."""

    def kl(log_p, log_q):
        return (log_p.exp() * (log_p - log_q)).sum()

    if o.divergence == "forward_kl":
        return kl(teacher, student)
    if o.divergence == "reverse_kl":
        return kl(student, teacher)
    mixture = (o.beta * teacher.exp() + (1 - o.beta) * student.exp()).log()
    return o.beta * kl(teacher, mixture) + (1 - o.beta) * kl(student, mixture)


def divergence_from_logits(x: Inputs, o: SimpleNamespace):
    def log_softmax(logits):
        scaled = logits / o.temperature
        return scaled - scaled.exp().sum().log()

    pairs = zip(x["student_logits"], x["teacher_logits"], strict=True)
    return torch.stack([divergence(log_softmax(s), log_softmax(t), o) for s, t in pairs])


def divergence_from_top_k(x: Inputs, o: SimpleNamespace):
    rows = []
    for logits, teacher, ids in zip(x["student_logits"], x["teacher_log_probs"], x["teacher_ids"], strict=True):
        scaled = logits / o.temperature
        student = (scaled - scaled.exp().sum().log())[ids]
        if o.other_tokens == "lump":
            student, teacher = (torch.cat([y, (1 - y.exp().sum()).log()[None]]) for y in (student, teacher))
        else:
            student, teacher = (y - y.exp().sum().log() for y in (student, teacher))
        rows.append(divergence(student, teacher, o))
    return torch.stack(rows)
