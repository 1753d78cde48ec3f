"""Held-out prompts: scored with their own sampling, without touching the training stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_launch.config.run import EvaluationSection
from rlhf_launch.samples.collecting import sample_and_score
from rlhf_launch.samples.groups import Group
from rlhf_launch.samples.prompts import Prompt

if TYPE_CHECKING:
    from rlhf_launch.online.loop import OnlineRun


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A set of prompts and how it is evaluated."""

    prompts: Sequence[Prompt]
    section: EvaluationSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The scored samples of one set."""

    name: str
    step: int
    groups: Sequence[Group]
    pass_score: float = 0.5

    @property
    def reward(self) -> float:
        """Mean score over all samples (avg@n)."""
        scores = [score.value for group in self.groups for score in group.scores]
        return sum(scores) / len(scores)

    def metrics(self) -> dict[str, float]:
        """`reward`, `response_length`, `truncated`, and pass@k for k = 1, 2, 4, ... of several samples."""
        samples = [trajectory for group in self.groups for trajectory in group.trajectories]
        values = {
            "reward": self.reward,
            "response_length": sum(t.response_length for t in samples) / len(samples),
            "truncated": sum(t.truncated for t in samples) / len(samples),
        }
        counts = [(len(g.scores), sum(s.value > self.pass_score for s in g.scores)) for g in self.groups]
        k, least = 1, min(n for n, _ in counts)
        while 1 < least >= k:
            values[f"pass@{k}"] = sum(pass_at_k(n, right, k) for n, right in counts) / len(counts)
            k *= 2
        return {f"eval/{self.name}/{name}": value for name, value in values.items()}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k samples passes, given that `right` of `samples` do.

    Unbiased: 1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def evaluate(run: OnlineRun) -> list[Evaluation]:
    """Evaluate every set at the current weights.

    Seeds follow from the set's name and the prompt alone, so two evaluations differ by the weights only.
    """
    found = []
    for name, held_out in run.held_out.items():
        section, sampling = held_out.section, run.config.rollout.sampling
        sampling = replace(
            sampling,
            temperature=section.temperature,
            top_p=section.top_p,
            max_tokens=section.max_tokens or sampling.max_tokens,
        )
        groups, _ = sample_and_score(run, held_out.prompts, sampling, label=f"eval/{name}", samples=section.samples)
        found.append(Evaluation(name=name, step=run.state.step, groups=groups, pass_score=section.pass_score))
    return found
