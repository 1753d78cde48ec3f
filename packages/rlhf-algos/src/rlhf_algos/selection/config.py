"""What is chosen among scored answers: a class for each rule, told apart by `kind`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf_core import ConfigError

from rlhf_algos.selection.answers import SCORE

_SUPERVISED = ("sft", "distill")
_PAIRED = ("dpo", "simpo", "cpo", "orpo", "rm", "kto")


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionRule:
    """What all rules have in common."""

    methods: ClassVar[tuple[str, ...]] = _SUPERVISED
    """The methods of `rlhf offline` that train on what is chosen."""

    by: str = SCORE
    """What answers are compared by: `score`, or the name of a part of it (a key of `reward.parts`)."""
    leave_out_truncated: bool = False
    """Choose no answer that the limit of tokens cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestOfNConfig(SelectionRule):
    """The best answers to each prompt: best of n, RAFT, rejection sampling. See `best_of_n`."""

    kind: Literal["best_of_n"] = "best_of_n"
    k: int = 1
    """How many of each prompt; equal texts count once."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"select: k must be at least 1, got {self.k}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdConfig(SelectionRule):
    """All answers above a score: ReST's filter. See `above_threshold`."""

    kind: Literal["threshold"] = "threshold"
    threshold: float
    """An answer is kept with a score above this; equal texts of a prompt count once."""

    def __post_init__(self) -> None:
        _check_finite("threshold", self.threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileConfig(SelectionRule):
    """All answers from a quantile of the scores on: ReST's filter, whose threshold goes with the model."""

    kind: Literal["quantile"] = "quantile"
    quantile: float = 0.9
    """From 0 to 1: 0.9 keeps about the best tenth, and all answers with a score equal to the quantile."""
    of: Literal["all", "prompt"] = "all"
    """Whose scores: those of all answers, or those of the prompt's own."""

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"select: quantile must lie between 0 and 1, got {self.quantile}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsConfig(SelectionRule):
    """A preference pair of each prompt: iterative DPO. See `pair_of`."""

    methods: ClassVar[tuple[str, ...]] = _PAIRED

    kind: Literal["pairs"] = "pairs"
    rejected: Literal["worst", "random"] = "worst"
    """What the best answer is set against: the worst one, or one drawn among those that are far enough below."""
    min_margin: float = 0.0
    """The scores of a pair lie at least so far apart."""

    def __post_init__(self) -> None:
        _check_finite("min_margin", self.min_margin)
        if self.min_margin < 0:
            raise ConfigError(f"select: min_margin must not be negative, got {self.min_margin}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsConfig(SelectionRule):
    """Every answer with a label, good or bad: what KTO trains on. See `desirable`."""

    methods: ClassVar[tuple[str, ...]] = ("kto",)

    kind: Literal["labels"] = "labels"
    threshold: float | None = None
    """An answer is good with a score above this; null: above the mean of its prompt's answers."""

    def __post_init__(self) -> None:
        if self.threshold is not None:
            _check_finite("threshold", self.threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionalConfig(SelectionRule):
    """Every answer, with the level of its scores as text in the prompt: conditional SFT. See `quantised`."""

    kind: Literal["conditional"] = "conditional"
    attributes: tuple[str, ...] = ()
    """What the text names: `score`, or parts of it; empty for `by` alone."""
    levels: int = 5
    """Levels of each attribute, from 1 to this."""
    bins: Literal["width", "quantile"] = "width"
    """Levels of equal width between the lowest and the highest score, or with about as many answers each."""
    template: str = "{prompt}\n<{attributes}>\n"
    """The prompt with its condition. `{attributes}` becomes `score:5`, or `helpful:5,short:3`. Of chat messages the
    last one of the user is what `{prompt}` stands for."""

    def __post_init__(self) -> None:
        if self.levels < 2:
            raise ConfigError(f"select: levels must be at least 2, got {self.levels}")
        for part in ("{prompt}", "{attributes}"):
            if self.template.count(part) != 1:
                raise ConfigError(f"select: template must have {part} once, found {self.template!r}")
        if "{}" in self.template:
            raise ConfigError(
                f"select: template has {{}}, which stands for {{prompt}} elsewhere: {self.template!r}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes."""
        return self.attributes or (self.by,)

    def condition(self, prompt: str, levels: tuple[int, ...]) -> str:
        """A prompt that asks for these levels, one for each attribute.

        >>> ConditionalConfig(attributes=("helpful", "short")).condition("Hi", (5, 3))
        'Hi\\n<helpful:5,short:3>\\n'
        """
        attributes = ",".join(f"{name}:{level}" for name, level in zip(self.names, levels, strict=True))
        before, _, after = self.template.partition("{prompt}")
        fill = [part.replace("{attributes}", attributes) for part in (before, after)]
        return fill[0] + prompt + fill[1]

    @property
    def highest(self) -> str:
        """The `data.prompt_template` that asks for the highest level of every attribute.

        >>> ConditionalConfig(levels=3).highest
        '{}\\n<score:3>\\n'
        """
        return self.condition("{}", (self.levels,) * len(self.names))


SelectionConfig = BestOfNConfig | ThresholdConfig | QuantileConfig | PairsConfig | LabelsConfig | ConditionalConfig
"""The rules."""

SELECTION_RULES: Mapping[str, type[SelectionRule]] = {
    "best_of_n": BestOfNConfig,
    "threshold": ThresholdConfig,
    "quantile": QuantileConfig,
    "pairs": PairsConfig,
    "labels": LabelsConfig,
    "conditional": ConditionalConfig,
}
"""Kind to rule."""


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"select: {name} must be a finite number, got {value}")
