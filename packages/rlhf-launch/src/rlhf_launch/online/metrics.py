"""The numbers of a step: seconds of its phases, its samples, its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlhf_core import Batch, RaggedBatch, StepReport
from rlhf_rollout import ScoredGroup


class PhaseClock:
    """Seconds spent in each phase of a step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._begin = now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase."""
        begin = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - begin

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds of phases that were timed elsewhere."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def metrics(self, batch: Batch | RaggedBatch, *, overlapping: bool = False) -> dict[str, float]:
        """Seconds per phase and step; tokens per second: sampled ones of generation, all of training.

        Where generation overlaps the other phases, its tokens are those of the whole step, and its seconds those
        that the trainer waited.
        """
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["seconds/step"] = self._now() - self._begin
        sampled, trained = batch.response_tokens, batch.tokens
        for phase, tokens in (("rollout", sampled), ("score", trained), ("train", trained)):
            whole_step = phase == "rollout" and overlapping
            if seconds := metrics["seconds/step"] if whole_step else self.seconds.get(phase):
                metrics[f"tokens_per_second/{phase}"] = tokens / seconds
        return metrics


def sample_metrics(groups: Sequence[ScoredGroup], *, scored: bool = True) -> dict[str, float]:
    """Reward, its components, lengths and truncation of one step's samples; no reward where none is `scored`."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.episode_scores]
    values = [score.value for score in scores]
    mean = sum(values) / len(values)
    metrics = {
        "reward": mean,
        "reward_std": (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5,
        "response_length": sum(t.response_length for t in trajectories) / len(scores),
        "truncated": sum(t.truncated for t in trajectories) / len(trajectories),
    }
    if not scored:
        del metrics["reward"], metrics["reward_std"]
    greedy = [group.greedy_score for group in groups if group.greedy_score is not None]
    if greedy:
        metrics["reward_greedy"] = sum(greedy) / len(greedy)
    for name in sorted({name for score in scores for name in score.components}):
        parts = [score.components[name] for score in scores if name in score.components]
        metrics[f"reward/{name}"] = sum(parts) / len(parts)
    return metrics


def comparable(groups: Sequence[ScoredGroup]) -> bool:
    """Whether the sampler's log-probs are of the trained distribution: no top-p, top-k, penalties and the like."""
    # Samples of one request share their meaning.
    meanings = {id(one.meaning): one.meaning for group in groups for one in group.trajectories}
    return all(meaning.plain for meaning in meanings.values())


def step_metrics(reports: Mapping[str, Sequence[StepReport]]) -> dict[str, float]:
    """Means over the optimizer steps of one batch of samples, by role; the policy's without a prefix."""
    metrics: dict[str, float] = {}
    for role, steps in reports.items():
        prefix = "" if role == "policy" else f"{role}/"
        applied = [step for step in steps if not step.skipped]
        metrics[f"{prefix}skipped_steps"] = float(len(steps) - len(applied))
        for name in ("loss", "grad_norm", "learning_rate"):
            metrics[f"{prefix}{name}"] = _mean([getattr(step, name) for step in applied])
        for name in sorted({name for step in applied for name in step.metrics}):
            metrics[f"{prefix}{name}"] = _mean([s.metrics[name] for s in applied if name in s.metrics])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
