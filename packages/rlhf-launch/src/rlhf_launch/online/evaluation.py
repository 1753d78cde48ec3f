"""Evaluation on held-out prompts, with their own sampling and beside the training stream."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core import SamplingConfig
from rlhf_rollout import ScoredGroup

from rlhf_launch.samples.groups import MakeGroups
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.workers.waits import Waits

EXAMPLES = 5
"""How many groups of an evaluation are kept to be looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A set of prompts and how it is evaluated."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    samples: int = 1
    """Samples per prompt."""
    pass_score: float = 0.5
    """A sample passes with a score above this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What one set of held-out prompts gave at one step."""

    name: str
    step: int
    metrics: Mapping[str, float]
    """`reward` (avg@n), `reward/<part>`, `response_length`, `truncated`, pass@k for k = 1, 2, 4, ... of several
    samples, `dropped_samples`. Where no sample has a score there is only the last."""
    examples: Sequence[ScoredGroup] = ()
    """The first few groups."""

    @property
    def reward(self) -> float:
        """Mean score over all samples; NaN if none has a score."""
        return self.metrics.get("reward", math.nan)

    @property
    def named_metrics(self) -> dict[str, float]:
        """The metrics under their names in a run: `eval/<set>/<metric>`."""
        return {f"eval/{self.name}/{name}": value for name, value in self.metrics.items()}


def summarise(groups: Sequence[ScoredGroup], *, pass_score: float = 0.5) -> dict[str, float]:
    """The metrics of a set; see `Evaluation.metrics`.

    Args:
        groups: the samples of each prompt.
        pass_score: a sample passes with a score above this.
    """
    metrics = {"dropped_samples": float(sum(len(group.dropped) for group in groups))}
    scored = [group for group in groups if group.scores]
    if not scored:
        return metrics
    samples = [trajectory for group in scored for trajectory in group.trajectories]
    scores = [score for group in scored for score in group.episode_scores]
    metrics |= {
        "reward": sum(score.value for score in scores) / len(scores),
        "response_length": sum(t.response_length for t in samples) / len(scores),
        "truncated": sum(t.truncated for t in samples) / len(samples),
    }
    for name in sorted({name for score in scores for name in score.components}):
        parts = [score.components[name] for score in scores if name in score.components]
        metrics[f"reward/{name}"] = sum(parts) / len(parts)
    counts = [(len(group.episodes), sum(s.value > pass_score for s in group.episode_scores)) for group in scored]
    k, least = 1, min(n for n, _ in counts)
    while 1 < least >= k:
        metrics[f"pass@{k}"] = sum(pass_at_k(n, right, k) for n, right in counts) / len(counts)
        k *= 2
    return metrics


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k samples passes, given that `right` of `samples` do.

    Unbiased: 1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


class Evaluator:
    """Evaluates every held-out set at the current weights."""

    def __init__(
        self,
        sets: Mapping[str, HeldOut],
        make_groups: MakeGroups,
        waits: Waits,
    ) -> None:
        """Evaluate these sets.

        Args:
            sets: the held-out sets by name.
            make_groups: gives what makes groups with these settings of sampling.
            waits: how samples and scores are waited for.
        """
        self._sets, self._make_groups, self._waits = sets, make_groups, waits

    def __call__(self, step: int, *, done: Collection[str] = ()) -> Iterator[Evaluation]:
        """Evaluate one set after the other, after `step` completed steps; those that are `done` are left out.

        Seeds follow from the set's name and the prompt alone, so two evaluations differ by the weights only.

        Raises:
            DeadlineExceeded: nothing has moved for too long; names how many prompts were unfinished.
            RewardError: a reward failed, and its failure handling says to stop.
        """
        for name, held_out in self._sets.items():
            if name in done:
                continue
            groups = self._make_groups(held_out.sampling).groups(
                held_out.prompts, label=f"eval/{name}", samples=held_out.samples, waits=self._waits
            )
            metrics = summarise(groups, pass_score=held_out.pass_score)
            yield Evaluation(name=name, step=step, metrics=metrics, examples=groups[:EXAMPLES])
