"""Why the log-probs of sampler and trainer differ, found from the numbers.

The sampled tokens are scored again with the trainer's weights in every way that a sampler could have meant: at
another temperature, truncated and renormalised, in the sampler's precision. The smallest set of such differences
that explains the sampler's numbers is the finding. What nothing explains is laid to the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from rlhf_core import LogProbMeaning, SamplingConfig, Trajectory
from rlhf_rollout import candidate_log_probs
from torch import Tensor

Cause = Literal["temperature", "truncation", "precision", "weights", "re-tokenisation"]
Causes = frozenset[Cause]
_NONE: Causes = frozenset()
_LOW: Causes = frozenset({"precision"})
_HEAT: Causes = frozenset({"temperature"})
_CUT: Causes = frozenset({"truncation"})
_FLOAT32_NOISE = 2e-5
"""Mean gap below which float32 numbers count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Difference of two log-probs, over the sampled tokens."""

    mean: float
    """Mean absolute difference in nats."""
    largest: float
    tokens: int

    @classmethod
    def between(cls, left: Float[Tensor, " tokens"], right: Float[Tensor, " tokens"]) -> Gap:
        """The gap of two lists of log-probs of the same tokens."""
        difference = (left.double() - right.double()).abs()
        if not len(difference):
            return cls(mean=0.0, largest=0.0, tokens=0)
        return cls(mean=difference.mean().item(), largest=difference.max().item(), tokens=len(difference))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One possible cause and what speaks for it."""

    cause: Cause
    found: bool
    without: Gap | None
    """The gap that is left when this cause and all others found are allowed for."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings of `diagnose`."""

    gap: Gap
    """The gap between sampler and trainer, as training would see it."""
    unexplained: Gap
    """The gap that is left when every cause found, but the weights, is allowed for."""
    trainer_error: Gap
    """The gap between the training engine and a plain float32 forward pass of its weights."""
    findings: tuple[Finding, ...]

    @property
    def causes(self) -> list[Cause]:
        """The causes found."""
        return [finding.cause for finding in self.findings if finding.found]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCheck:
    """Whether the tokens that were sampled are those that are trained."""

    samples: int
    changed: int
    """Samples whose trained tokens are others than the sampled ones."""
    fragile: int
    """Samples that would become other tokens if their text were tokenised again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The same sampled tokens in all readings, rows joined; each [tokens]."""

    sampler: Float[Tensor, " tokens"]
    trainer: Float[Tensor, " tokens"]
    """Log-probs by the training engine, at the temperature that the samples state."""
    readings: Mapping[Causes, Float[Tensor, " tokens"]]
    """Log-probs by plain forward passes of the trainer's model, by the differences that were put in."""


def readings(
    trajectories: Sequence[Trajectory],
    sampling: SamplingConfig,
    logits: Mapping[bool, Callable[[Trajectory], Float[Tensor, "length vocab"]]],
) -> dict[Causes, Float[Tensor, " tokens"]]:
    """The sampled tokens' log-probs in every combination of temperature, truncation and precision.

    Args:
        trajectories: what was sampled.
        sampling: the settings that the sampler was given.
        logits: forward passes of the trainer's weights: False for float32, True for the sampler's precision, if it
            is another.
    """
    stated = trajectories[0].meaning
    made: dict[Causes, list[Tensor]] = {}
    for trajectory, low in itertools.product(trajectories, logits):
        sampled = torch.tensor(trajectory.response_mask).nonzero().squeeze(-1)
        before = logits[low](trajectory)[sampled - 1].float()
        tokens = torch.tensor(trajectory.token_ids)[sampled]
        for causes, settings in _settings(stated, sampling).items():
            log_probs = _log_probs(before, tokens, settings)
            made.setdefault(causes | (_LOW if low else _NONE), []).append(log_probs)
    return {causes: torch.cat(parts) for causes, parts in made.items()}


def _settings(stated: LogProbMeaning, sampling: SamplingConfig) -> dict[Causes, SamplingConfig]:
    """The trainer's reading (the stated temperature, no truncation), and those that a sampler might have."""
    plain = SamplingConfig(max_tokens=1, temperature=stated.temperature)
    # What else it can be: raw where processed was promised, or processed where raw was.
    others = {1.0, sampling.meaning.temperature} - {stated.temperature}
    made: dict[Causes, SamplingConfig] = {_NONE: plain}
    for other in others:
        made[_HEAT] = replace(plain, temperature=other)
    if sampling.meaning.truncated:
        for causes, settings in list(made.items()):
            made[causes | _CUT] = replace(
                settings, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
            )
    return made


def _log_probs(before: Tensor, tokens: Tensor, settings: SamplingConfig) -> Float[Tensor, " tokens"]:
    index = tokens.unsqueeze(-1)
    full = candidate_log_probs(before, [replace(settings, top_p=1.0, top_k=0, min_p=0.0)] * len(before))
    kept = candidate_log_probs(before, [settings] * len(before)).gather(-1, index).squeeze(-1)
    # A token on the edge of the candidate set may fall outside of it by a rounding error.
    return torch.where(torch.isinf(kept), full.gather(-1, index).squeeze(-1), kept)


def diagnose(
    scored: Scored,
    *,
    weights: str = "",
    versions_differ: bool = False,
    tokens: TokenCheck,
) -> Diagnosis:
    """Find the causes of the gap.

    Args:
        scored: the log-probs.
        weights: evidence about the weights, for the report.
        versions_differ: the sampler says that its weights are of another version than the trainer's.
        tokens: what `check_tokens` found.
    """
    plain = scored.readings[_NONE]
    chosen = _explanation(scored)
    low = scored.readings.get(_LOW)
    noise = Gap.between(low, plain).mean if low is not None else 0.0
    gaps = {causes: Gap.between(scored.sampler, values) for causes, values in scored.readings.items()}
    left = gaps[chosen]
    # Another implementation rounds elsewhere: the size of the rounding tells, not its every bit.
    rounding = left.mean > _FLOAT32_NOISE and left.mean <= 3 * noise
    precise = "precision" in chosen or rounding
    unexplained = left.mean > max(_FLOAT32_NOISE, 3 * noise)
    findings = [
        Finding(
            cause=cause, found=cause in chosen, without=gaps[chosen] if cause in chosen else None, detail=detail
        )
        for cause, detail in _reading_details(scored, chosen, gaps)
    ]
    findings.append(
        Finding(
            cause="precision",
            found=precise,
            without=left if precise else None,
            detail=f"rounding of the sampler's dtype moves log-probs by {noise:.1e} on average"
            if low is not None
            else "sampler and trainer compute in the same precision",
        )
    )
    findings.append(
        Finding(
            cause="weights",
            # Other tokens explain any gap; only without them does it speak of the weights.
            found=versions_differ or (unexplained and not tokens.changed),
            without=None,
            detail=weights
            or ("no setting explains the rest" if unexplained else "the trainer's explain the numbers"),
        )
    )
    findings.append(
        Finding(
            cause="re-tokenisation",
            found=tokens.changed > 0,
            without=None,
            detail=f"{tokens.changed} of {tokens.samples} samples are trained on other tokens than were sampled "
            f"({tokens.fragile} would be if their text were tokenised again)",
        )
    )
    return Diagnosis(
        gap=Gap.between(scored.sampler, scored.trainer),
        unexplained=left,
        trainer_error=Gap.between(scored.trainer, plain),
        findings=tuple(findings),
    )


def _explanation(scored: Scored) -> Causes:
    """The smallest set of differences that explains the sampler's numbers about as well as any."""
    means = {causes: Gap.between(scored.sampler, values).mean for causes, values in scored.readings.items()}
    best = min(means.values())
    good = [causes for causes, mean in means.items() if mean <= max(2 * best, _FLOAT32_NOISE)]
    return min(good, key=lambda causes: (len(causes), means[causes]))


def _reading_details(scored: Scored, chosen: Causes, gaps: Mapping[Causes, Gap]) -> list[tuple[Cause, str]]:
    details: list[tuple[Cause, str]] = []
    causes: tuple[Cause, ...] = ("temperature", "truncation")
    for cause in causes:
        if not any(cause in key for key in scored.readings):
            details.append((cause, "not in play: the settings leave it at its neutral value"))
        elif cause in chosen:
            details.append((cause, f"not allowed for, the gap is {gaps[chosen - {cause}].mean:.1e} on average"))
        else:
            details.append((cause, "allowing for it explains no more"))
    return details


def check_tokens(tokenizer: Any, sampled: Sequence[Trajectory], trained: Sequence[Sequence[int]]) -> TokenCheck:
    """Compare what was sampled with the token ids that the trainer got, one row per trajectory."""
    changed = fragile = 0
    for trajectory, row in zip(sampled, trained, strict=True):
        response = trajectory.response_token_ids.tolist()
        text = tokenizer.decode(response, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        fragile += tokenizer(text, add_special_tokens=False)["input_ids"] != response
        changed += list(row) != trajectory.token_ids
    return TokenCheck(samples=len(sampled), changed=changed, fragile=fragile)
