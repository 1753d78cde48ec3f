"""Warnings about steps that are legal and surely unwanted, each said once in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TRUNCATED = 0.9


class Remarks:
    """What a run's steps deserve to have said of them."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def new(self, metrics: Mapping[str, float], *, passes: float) -> list[str]:
        """The warnings that a step's metrics call for and that were not said before.

        Args:
            metrics: of the step.
            passes: how often the training prompts were gone through so far.
        """
        found = {name: text for name, text in _remarks(metrics, passes) if name not in self._said}
        self._said |= found.keys()
        return list(found.values())


def _remarks(metrics: Mapping[str, float], passes: float) -> Iterable[tuple[str, str]]:
    if metrics.get("equal_score_groups", 0.0) >= 1.0:
        yield (
            "equal",
            "warning: in every group all samples have the same score, so this step's advantages and gradient are "
            "zero; "
            "look at the reward and at a few samples, or take prompts of another difficulty",
        )
    if (share := metrics.get("truncated", 0.0)) > _TRUNCATED:
        yield (
            "truncated",
            f"warning: {share:.0%} of the samples were cut off by rollout.sampling.max_tokens (or "
            "lengths.max_length); "
            "raise it, unless the model is not meant to finish",
        )
    if passes > 1:
        yield (
            "recycled",
            "note: every training prompt has been used once; from here on they come again, in another order",
        )
