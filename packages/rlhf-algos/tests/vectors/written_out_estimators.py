"""Estimators, KL, corrections and what is computed once for a batch, written out in float64 with loops."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
from written_out_policy import Inputs, kl_of_token

Result = dict[str, Any]


def members(x: Inputs, row: int) -> list[int]:
    """Rows of the same prompt."""
    return [other for other, group in enumerate(x["group_ids"].tolist()) if group == int(x["group_ids"][row])]


def mean(values) -> float:
    return sum(values) / len(values)


def std(values, *, unbiased: bool = True) -> float:
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / max(len(values) - unbiased, 1))


def advantages_of(values) -> Result:
    return {"advantages": torch.tensor(values, dtype=torch.float64)}


def centred(x: Inputs, o: SimpleNamespace, scores: list[float]) -> list[float]:
    """Score minus group mean; a lone response has 0 or its score."""
    result = []
    for row, score in enumerate(scores):
        group = members(x, row)
        lone = score if o.singleton == "score" else 0.0
        result.append(lone if len(group) == 1 else score - mean([scores[other] for other in group]))
    return result


def group_normalised(x: Inputs, o: SimpleNamespace, scores: list[float]) -> list[float]:
    gaps = centred(x, o, scores)
    if o.scale == "none":
        return gaps
    if o.scale in ("batch", "advantages"):
        means = [mean([scores[other] for other in members(x, row)]) for row in range(len(scores))]
        spread = scores if o.scale == "batch" else [s - m for s, m in zip(scores, means, strict=True)]
        return [gap / (std(spread, unbiased=o.unbiased) + o.eps) for gap in gaps]
    result = []
    for row, gap in enumerate(gaps):
        group = [scores[other] for other in members(x, row)]
        divisor = (1.0 if len(group) == 1 else std(group, unbiased=o.unbiased)) + o.eps
        result.append(gap / divisor)
    return result


def grpo(x: Inputs, o: SimpleNamespace) -> Result:
    return advantages_of(group_normalised(x, o, x["scores"].tolist()))


def rloo(x: Inputs, o: SimpleNamespace) -> Result:
    scores, result = x["scores"].tolist(), []
    for row, score in enumerate(scores):
        others = [scores[other] for other in members(x, row) if other != row]
        lone = score if o.singleton == "score" else 0.0
        result.append(score - mean(others) if others else lone)
    return advantages_of(result)


def opo(x: Inputs, o: SimpleNamespace) -> Result:
    scores, lengths = x["scores"].tolist(), x["response_mask"].sum(1).tolist()
    result = []
    for row, score in enumerate(scores):
        group = members(x, row)
        weight = sum(lengths[other] for other in group)
        baseline = sum(scores[other] * lengths[other] for other in group) / weight if weight else 0.0
        lone = score if o.singleton == "score" else 0.0
        result.append(lone if len(group) == 1 else score - baseline)
    return advantages_of(result)


def remax(x: Inputs, o: SimpleNamespace) -> Result:
    return advantages_of([s - g for s, g in zip(x["scores"].tolist(), x["greedy_scores"].tolist(), strict=True)])


def reinforce(x: Inputs, o: SimpleNamespace) -> Result:
    return advantages_of([score - o.baseline for score in x["scores"].tolist()])


def gpg(x: Inputs, o: SimpleNamespace) -> Result:
    scores = x["scores"].tolist()
    gaps = centred(x, o, scores)
    useful = 0
    for row, gap in enumerate(gaps):
        group = [scores[other] for other in members(x, row)]
        useful += len(set(group)) > 1 if len(group) > 1 else gap != 0
    return advantages_of([gap * len(scores) / max(useful, 1) for gap in gaps])


def max_rl(x: Inputs, o: SimpleNamespace) -> Result:
    scores, result = x["scores"].tolist(), []
    for row, score in enumerate(scores):
        group = [scores[other] for other in members(x, row)]
        lone = score if o.singleton == "score" else 0.0
        silent = mean(group) <= 0
        result.append(lone if len(group) == 1 else 0.0 if silent else (score - mean(group)) / mean(group))
    return advantages_of(result)


def pass_at_k(x: Inputs, o: SimpleNamespace) -> Result:
    """By counting subsets of k responses one by one."""
    passed, result = [score > o.pass_score for score in x["scores"].tolist()], []
    for row in range(len(passed)):
        group = members(x, row)
        failures = [other for other in group if not passed[other]]
        if len(group) <= o.k or len(failures) in (0, len(group)):
            result.append(0.0)
            continue
        subsets = list(itertools.combinations(group, o.k))
        solved = [float(any(passed[other] for other in subset)) for subset in subsets]
        with_row = [s for s, subset in zip(solved, subsets, strict=True) if row in subset]
        result.append((mean(with_row) - mean(solved)) / (std(solved, unbiased=False) + o.eps))
    return advantages_of(result)


def best_of_group(x: Inputs, o: SimpleNamespace) -> Result:
    scores, result = x["scores"].tolist(), []
    for row, score in enumerate(scores):
        others = [scores[other] for other in members(x, row) if other != row]
        gain = max(score - max(others), 0.0) if others else (score if o.singleton == "score" else 0.0)
        spread = std([score, *others]) if others else 1.0
        result.append(gain if o.scale == "none" else gain / (spread + o.eps))
    return advantages_of(result)


def gdpo(x: Inputs, o: SimpleNamespace) -> Result:
    total = [0.0] * len(x["scores"])
    for name, weight in o.parts.items():
        part = x[f"score/{name}"].tolist()
        for row, gap in enumerate(centred(x, o, part)):
            group = [part[other] for other in members(x, row)]
            total[row] += weight * gap / (std(group) + o.eps if len(group) > 1 else 1.0)
    return advantages_of([(value - mean(total)) / (std(total) + o.eps) for value in total])


def places_of(x: Inputs, row: int) -> list[int]:
    return [t for t, inside in enumerate(x["response_mask"][row].tolist()) if inside]


def rewards_of(x: Inputs) -> list[list[float]]:
    """The score as rewards: the column `rewards`, and the rest on the last token of the response."""
    result = []
    for row, score in enumerate(x["scores"].tolist()):
        counted = places_of(x, row)
        given = x["rewards"][row].tolist() if "rewards" in x else [0.0] * x["response_mask"].shape[1]
        given = [reward if t in counted else 0.0 for t, reward in enumerate(given)]
        if counted:
            given[counted[-1]] += score - sum(given)
        result.append(given)
    return result


def optimal_token(x: Inputs, o: SimpleNamespace) -> Result:
    rewards = rewards_of(x)
    returns, weights = [], []
    for row, given in enumerate(rewards):
        counted = places_of(x, row)
        returns.append([sum(given[t:]) for t in counted])
        terms = [
            1 - 2 * math.exp(float(x["old_log_probs"][row, t])) + math.exp(float(x["old_log_collision"][row, t]))
            for t in counted
        ]
        weights.append(list(itertools.accumulate(terms)))
    result = torch.zeros_like(x["old_log_probs"])
    for row in range(len(rewards)):
        for index, t in enumerate(places_of(x, row)):
            long = [other for other in members(x, row) if len(returns[other]) > index]
            own = returns[row][index]
            if len(long) == 1:
                keep = o.singleton if len(members(x, row)) == 1 else o.tail
                result[row, t] = own if keep == "score" else 0.0
            else:
                below = sum(weights[other][index] for other in long) + o.eps
                result[row, t] = own - sum(returns[other][index] * weights[other][index] for other in long) / below
    return {"advantages": result}


def turns_of(x: Inputs, row: int) -> list[list[int]]:
    """Runs of counted tokens."""
    turns: list[list[int]] = []
    for t in places_of(x, row):
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def gigpo(x: Inputs, o: SimpleNamespace) -> Result:
    rewards = rewards_of(x)
    episode = group_normalised(x, o, x["scores"].tolist())
    found = []
    for row, given in enumerate(rewards):
        turns, end = turns_of(x, row), 0
        earned = [sum(given[t] for t in turn) for turn in turns]
        for number, turn in enumerate(turns):
            value = sum(o.gamma**later * reward for later, reward in enumerate(earned[number:]))
            said = tuple(x["token_ids"][row, end : turn[0]].tolist()) if number else ()
            found.append((row, turn, value, (int(x["group_ids"][row]), said)))
            end = turn[-1] + 1
    states = sorted({state for *_, state in found})
    named = {"group_ids": torch.tensor([states.index(state) for *_, state in found])}
    plain = SimpleNamespace(scale=o.scale, eps=o.eps, unbiased=o.unbiased, singleton="zero")
    judged = group_normalised(named, plain, [value for _, _, value, _ in found])
    result = torch.zeros(x["response_mask"].shape, dtype=torch.float64)
    for (row, turn, _, _), value in zip(found, judged, strict=True):
        result[row, turn] = episode[row] + o.turn_weight * value
    return {"advantages": result}


def gae(x: Inputs, o: SimpleNamespace) -> Result:
    advantages, returns = torch.zeros_like(x["values"]), torch.zeros_like(x["values"])
    for row in range(len(advantages)):
        following, next_value = 0.0, 0.0
        for t in reversed(places_of(x, row)):
            gamma, lam = (
                float(x[name][row] if x[name].dim() == 1 else x[name][row, t]) if name in x else getattr(o, name)
                for name in ("gamma", "lam")
            )
            delta = float(x["rewards"][row, t]) + gamma * next_value - float(x["values"][row, t])
            following = delta + gamma * lam * following
            next_value = float(x["values"][row, t])
            advantages[row, t], returns[row, t] = following, following + next_value
    return {"advantages": advantages, "returns": returns}


def turn_gae(x: Inputs, o: SimpleNamespace) -> Result:
    advantages, returns = torch.zeros_like(x["values"]), torch.zeros_like(x["values"])
    for row in range(len(advantages)):
        following, next_value = 0.0, 0.0
        for turn in reversed(turns_of(x, row)):
            value = float(x["values"][row, turn[0]])
            earned = sum(float(x["rewards"][row, t]) for t in turn)
            following = earned + o.gamma * next_value - value + o.gamma * o.lam * following
            next_value = value
            advantages[row, turn], returns[row, turn] = following, following + value
    return {"advantages": advantages, "returns": returns}


def discounted_returns(x: Inputs, o: SimpleNamespace) -> Result:
    result = torch.zeros_like(x["rewards"])
    for row in range(len(result)):
        counted = places_of(x, row)
        for index, t in enumerate(counted):
            result[row, t] = sum(o.gamma**i * float(x["rewards"][row, u]) for i, u in enumerate(counted[index:]))
    return {"returns": result}


def length_adaptive_lam(x: Inputs, o: SimpleNamespace) -> Result:
    lengths = x["response_mask"].sum(1).tolist()
    return {"lam": torch.tensor([max(1 - 1 / (o.alpha * n), 0.0) if n else 0.0 for n in lengths]).double()}


def whiten(x: Inputs, o: SimpleNamespace) -> Result:
    counted = [float(value) for value in x["values"][x["response_mask"]]]
    middle = mean(counted)
    variance = std(counted, unbiased=o.unbiased) ** 2
    scale = math.sqrt(variance + o.eps if o.eps_mode == "add" else max(variance, o.eps))
    formulas = {
        "standardize": lambda v: (v - middle) / scale,
        "keep_mean": lambda v: (v - middle) / scale + middle,
        "scale": lambda v: v / scale,
        "center": lambda v: v - middle,
    }
    return {"whitened": formulas[o.kind](x["values"]).masked_fill(~x["response_mask"], 0)}


def overlong_penalty(x: Inputs, o: SimpleNamespace) -> Result:
    excess = [(length - (o.max_length - o.buffer)) / o.buffer for length in x["lengths"].tolist()]
    found = [-o.penalty * max(e if o.grows else min(e, 1.0), 0.0) for e in excess]
    return {"penalty": torch.tensor(found, dtype=torch.float64)}


def kl_estimate(x: Inputs, o: SimpleNamespace) -> Result:
    names = ("estimator", "gradient", "log_ratio_limit", "value_limit")
    pairs = zip(x["log_probs"].flatten(), x["ref_log_probs"].flatten(), strict=True)
    found = torch.stack([kl_of_token(p, q, o, names) for p, q in pairs])
    return {"kl": found.view(x["log_probs"].shape)}


def full_kl(x: Inputs, o: SimpleNamespace) -> Result:
    found = []
    for p_logits, q_logits in zip(x["logits"], x["ref_logits"], strict=True):
        p, q = p_logits.exp() / p_logits.exp().sum(), q_logits.exp() / q_logits.exp().sum()
        found.append(sum(a * (a / b).log() for a, b in zip(p, q, strict=True)))
    return {"kl": torch.stack(found)}


def correction(x: Inputs, o: SimpleNamespace) -> Result:
    """Importance weights of tokens, from the log-probs of trainer and sampler."""
    mask = x["response_mask"]
    low, high = o.low or 0.0, math.inf if o.high is None else o.high
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        counted = places_of(x, row)
        d = {t: float(x["old_log_probs"][row, t] - x["rollout_log_probs"][row, t]) for t in counted}
        if o.statistic != "ratio":
            limited = {t: min(max(value, -20.0), 20.0) for t, value in d.items()}
            k3 = {t: math.exp(value) - 1 - value for t, value in limited.items()}
            d = k3 if o.statistic == "k3" else {t: value**2 / 2 for t, value in d.items()}
        for t in counted:
            values = list(d.values())
            levels = {"token": d[t], "sequence": sum(values), "geometric": mean(values), "max": max(values)}
            level = levels[o.level]
            if o.statistic != "ratio":
                weights[row, t] = float(level <= high)
                continue
            ratio = math.exp(min(max(level, -20.0), 20.0))
            inside = low <= math.exp(level) <= high
            weights[row, t] = {
                "truncate": min(max(ratio, low), high),
                "mask": ratio if inside else 0.0,
                "reject": float(inside),
            }[o.mode]
    if o.normalize:
        per_row = [
            mean([float(weights[row, t]) for t in places_of(x, row)]) for row in range(len(mask)) if mask[row].any()
        ]
        average = mean([float(value) for value in weights[mask]]) if o.level == "token" else mean(per_row)
        weights = weights / (average if average > 1e-8 else 1.0)
    return {"weights": weights}


def mismatch_metrics(x: Inputs, o: SimpleNamespace) -> Result:
    d, mask = x["log_ratio"], x["response_mask"]
    tokens = [float(value) for value in d[mask]]
    rows = [[float(value) for value in d[row][mask[row]]] for row in range(len(mask)) if mask[row].any()]
    found = {
        "mismatch_kl": mean([-value for value in tokens]),
        "mismatch_k3": mean([math.exp(value) - 1 - value for value in tokens]),
        "mismatch_abs": mean([abs(value) for value in tokens]),
        "mismatch_chi2_token": mean([math.exp(value) ** 2 - 1 for value in tokens]),
        "mismatch_chi2_sequence": mean([math.exp(sum(row)) ** 2 - 1 for row in rows]),
        "mismatch_perplexity_ratio": mean([math.exp(-mean(row)) for row in rows]),
    }
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def effective_sample_size(x: Inputs, o: SimpleNamespace) -> Result:
    weights = [float(value) for value in x["weights"][x["response_mask"]]]
    found = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    return {"effective_sample_size": torch.tensor(found, dtype=torch.float64)}


def entropy_selected(x: Inputs, o: SimpleNamespace) -> Result:
    values = sorted(float(value) for value in x["old_entropy"][x["response_mask"]])
    place = (1 - o.top_entropy) * (len(values) - 1)
    low = math.floor(place)
    threshold = values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])
    return {"entropy_selected": x["response_mask"] & (x["old_entropy"] >= threshold)}


def kl_cov_selected(x: Inputs, o: SimpleNamespace) -> Result:
    """Of KL-Cov: the share of the tokens with the largest covariance of advantage and log-prob."""
    mask = x["response_mask"]
    a, p = (x[name] - x[name][mask].mean() for name in ("advantages", "old_log_probs"))
    found = sorted(((float(a[r, t] * p[r, t]), r, t) for r, t in mask.nonzero().tolist()), reverse=True)
    chosen = torch.zeros_like(mask)
    for _, r, t in found[: max(1, int(len(found) * o.fraction))]:
        chosen[r, t] = True
    return {"cov_selected": chosen}


def aot_partners(x: Inputs, o: SimpleNamespace) -> Result:
    policy, reference = x["policy"].tolist(), x["reference"].tolist()
    pairs, result = len(policy) // 2, [0.0] * len(policy)

    def matched(values, targets):
        order = sorted(range(pairs), key=lambda pair: values[pair])
        ranked = sorted(targets)
        return {pair: ranked[rank] for rank, pair in enumerate(order)}

    if o.paired:
        own = [policy[2 * i] - policy[2 * i + 1] for i in range(pairs)]
        target = [reference[2 * i] - reference[2 * i + 1] for i in range(pairs)]
        for pair, value in matched(own, target).items():
            result[2 * pair] = result[2 * pair + 1] = value
    else:
        ratio = [p - q for p, q in zip(policy, reference, strict=True)]
        for side in (0, 1):
            for pair, value in matched(ratio[side::2], ratio[1 - side :: 2]).items():
                result[2 * pair + side] = value
    return {"aot_partner": torch.tensor(result, dtype=torch.float64)}


def kl_baseline(x: Inputs, o: SimpleNamespace) -> Result:
    gaps = [p - q for p, q in zip(x["log_probs_sum"].tolist(), x["ref_log_probs_sum"].tolist(), strict=True)]
    return {"kl_baseline": torch.tensor(max(mean(gaps), 0.0), dtype=torch.float64)}


def opposite_baselines(x: Inputs, o: SimpleNamespace) -> Result:
    ratios, desirable = x["log_ratio"].tolist(), x["desirable"].tolist()
    up, down = (mean([h for h, d in zip(ratios, desirable, strict=True) if d == side]) for side in (True, False))
    found = [max(down if side else up, 0.0) for side in desirable]
    return {"kl_baseline": torch.tensor(found, dtype=torch.float64)}


def bco_shift(x: Inputs, o: SimpleNamespace) -> Result:
    return {"reward_shift": torch.tensor(o.beta * mean(x["log_ratio"].tolist()), dtype=torch.float64)}
