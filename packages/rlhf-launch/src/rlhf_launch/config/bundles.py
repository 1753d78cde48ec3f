"""The `bundles` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rlhf_core import ConfigError, check_whole

KeptWeights = Literal["none", "model", "state"]
"""Which weights a bundle carries: `none`; the `model` of each trained role as a Transformers directory; their whole
`state`, optimizer included, as in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleSection:
    """Which steps are kept as bundles, for `rlhf replay` (docs/replay.md)."""

    every: int = 0
    """Every so many steps one is kept; 0 for none."""
    steps: tuple[int, ...] = ()
    """Steps that are kept besides, the first step being 1. These stay, whatever `keep` says."""
    keep: int = 4
    """How many of the newest stay: of those kept `every` so many steps, and of those kept `on_fault`."""
    on_fault: bool = True
    """Also keep a step that ends in an error, is skipped, or has numbers that are not finite."""
    weights: KeptWeights = "none"
    """What a bundle carries of the weights that its step began with: `none` (a replay then needs the checkpoint of
    the step before), `model` (each trained model in its training dtype), or `state` (optimizer, too). Steps kept
    `on_fault` alone were not foreseen and carry none."""

    def __post_init__(self) -> None:
        check_whole("bundles.every", self.every, at_least=0)
        check_whole("bundles.keep", self.keep, at_least=1)
        for step in self.steps:
            check_whole("bundles.steps", step, at_least=1)
        if self.weights not in get_args(KeptWeights):
            raise ConfigError(f"bundles.weights must be none, model or state, got {self.weights!r}")

    def why_kept(self, step: int) -> Literal["named", "scheduled"] | None:
        """Why this step is kept, whatever comes of it; None if it is not.

        >>> section = BundleSection(every=10, steps=(3,))
        >>> [section.why_kept(step) for step in (1, 3, 10)]
        [None, 'named', 'scheduled']
        """
        if step in self.steps:
            return "named"
        return "scheduled" if self.every and step % self.every == 0 else None
