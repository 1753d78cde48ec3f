"""The `data` section of an online run: prompts, and text to learn beside the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_algos import DataSection, DataSource, LearnsText
from rlhf_core import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineDataSection(DataSection):
    """What an online run is trained on."""

    pretrain: tuple[DataSource, ...] = ()
    """Text that the policy learns beside its samples (`algorithm.ptx_coef`): datasets as in `data.train`, with the
    columns of SFT (`text`, `prompt` and `completion`, or `messages`). Longer rows than the longest sample are
    cut."""


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
    if rows is not None and not data.pretrain:
        raise ConfigError("train.pretrain_rows counts rows of data.pretrain, which is not set; leave it out")
    if coef and temperature != 1:
        raise ConfigError(
            f"algorithm.ptx_coef: the likelihood of a text is that at temperature 1, and a step takes all "
            f"log-probs at that of its samples, rollout.sampling.temperature={temperature:g}; write 1, or leave "
            "ptx_coef out"
        )
