"""The `data` section of an online run: prompts, and text to learn beside the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_algos import DataSection, DataSource, LearnsText
from rlhf_core import ConfigError

from rlhf_launch.config.curriculum import CurriculumSection


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineDataSection(DataSection):
    """What an online run is trained on, and in which order."""

    pretrain: tuple[DataSource, ...] = ()
    """Text that the policy learns beside its samples (`algorithm.ptx_coef`): datasets as in `data.train`, with the
    columns of SFT (`text`, `prompt` and `completion`, or `messages`). Longer rows than the longest sample are
    cut."""
    curriculum: CurriculumSection | None = None
    """Null: every prompt once a pass, or by the weights of the datasets."""

    def __post_init__(self) -> None:
        DataSection.__post_init__(self)
        if self.curriculum is None:
            return
        if not self.shuffle:
            raise ConfigError(
                "data.shuffle=false keeps the order of the data, which data.curriculum chooses; leave one of them "
                "out"
            )
        for point in self.curriculum.mixture:
            if len(point.weights) != len(self.train):
                raise ConfigError(
                    f"data.curriculum.mixture: {len(point.weights)} weight(s) at step {point.step} for "
                    f"{len(self.train)} dataset(s) of data.train; write one for each"
                )
        if self.curriculum.mixture and any(source.weight is not None for source in self.train):
            raise ConfigError(
                "data.curriculum.mixture stands in place of data.train[].weight; leave the weights of the datasets "
                "out"
            )


def check_pretraining(
    data: OnlineDataSection, recipe: Any, name: str, *, temperature: float, rows: int | None
) -> None:
    """Refuse text without a weight, a weight without text, and samples at whose temperature there is no likelihood.

    Args:
        data: may name text.
        recipe: the algorithm.
        name: its name, for messages.
        temperature: of the samples.
        rows: `train.pretrain_rows`.

    Raises:
        ConfigError: what does not go together, and what to write instead.
    """
    coef = recipe.ptx_coef if isinstance(recipe, LearnsText) else 0.0
    if rows is not None and rows < 1:
        raise ConfigError(
            f"train.pretrain_rows must be at least 1, got {rows}; without text leave data.pretrain out"
        )
    if coef and not data.pretrain:
        raise ConfigError(
            f"algorithm.ptx_coef={coef:g} weighs text that the policy learns beside its samples, and there is "
            "none; write data.pretrain: text.jsonl, or leave ptx_coef out"
        )
    if data.pretrain and not isinstance(recipe, LearnsText):
        raise ConfigError(
            f"data.pretrain is set, but the algorithm {name!r} has no field ptx_coef that would weigh it; derive "
            "it from rlhf_algos.PolicyRecipe, or leave data.pretrain out"
        )
    if data.pretrain and not coef:
        raise ConfigError(
            "data.pretrain is set, but its weight algorithm.ptx_coef is 0; write e.g. algorithm.ptx_coef: 0.05, or "
            "leave data.pretrain out"
        )
    if data.pretrain and getattr(recipe, "learns_from_pairs", False):
        raise ConfigError(
            f"data.pretrain is set, but the algorithm {name!r} trains on pairs of rows, beside which single texts "
            "cannot stand; leave data.pretrain out, or take an algorithm of single rows"
        )
    if rows is not None and not data.pretrain:
        raise ConfigError("train.pretrain_rows counts rows of data.pretrain, which is not set; leave it out")
    if coef and temperature != 1:
        raise ConfigError(
            f"algorithm.ptx_coef: the likelihood of a text is that at temperature 1, and a step takes all "
            f"log-probs at that of its samples, rollout.sampling.temperature={temperature:g}; write 1, or leave "
            "ptx_coef out"
        )
