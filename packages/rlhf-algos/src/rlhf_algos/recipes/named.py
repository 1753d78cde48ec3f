"""Published online algorithms by name, as settings of `GRPO` and `PPO`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError, config_from, did_you_mean

from rlhf_algos.advantages.reward_shaping import RewardShaping
from rlhf_algos.recipes.policy_recipe import PolicyRecipe
from rlhf_algos.recipes.recipes import GRPO, PPO

_SEQUENCE_MEAN = {"aggregation": "seq_mean_token_mean"}

NAMED_RECIPES: Mapping[str, tuple[type[PolicyRecipe], Mapping[str, Any]]] = {
    "ppo": (PPO, {}),
    "grpo": (GRPO, {"loss_options": _SEQUENCE_MEAN, "kl_coef": 0.001}),
    "dr_grpo": (
        GRPO,
        {
            "advantage": "group_mean",
            "loss_options": {"aggregation": "max_length", "max_length": 1024},
        },
    ),
    "dapo": (
        GRPO,
        {
            "loss_options": {"aggregation": "token_mean", "clip_range": 0.2, "clip_range_high": 0.28},
        },
    ),
    "gspo": (GRPO, {"loss": "gspo"}),
    "gmpo": (GRPO, {"loss": "gmpo"}),
    "cispo": (GRPO, {"loss": "cispo"}),
    "sapo": (GRPO, {"loss": "sapo"}),
    "kl_cov": (GRPO, {"loss": "kl_cov"}),
    "clip_cov": (GRPO, {"loss": "clip_cov"}),
    "rloo": (GRPO, {"advantage": "rloo", "kl_coef": 0.05, "kl_in": "score", "kl_estimator": "k1"}),
    "reinforce_pp": (
        GRPO,
        {"advantage": "reinforce", "whiten": True, "kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce_pp_baseline": (
        GRPO,
        {"advantage": "group_mean", "whiten": True, "kl_coef": 0.001, "kl_in": "loss", "kl_estimator": "k2"},
    ),
    "remax": (GRPO, {"advantage": "remax"}),
    "opo": (GRPO, {"advantage": "opo"}),
    "reinforce": (
        GRPO,
        {"advantage": "reinforce", "loss": "reinforce", "loss_options": {"aggregation": "seq_mean_token_sum"}},
    ),
}
"""Name to class and the fields that differ from the class's defaults. DAPO's dynamic sampling is the loop's part;
its overlong penalty is a `RewardShaping` with the run's own lengths."""


def make_recipe(name: str, options: Mapping[str, Any] | None = None) -> PolicyRecipe:
    """The recipe of this name with some fields set otherwise; inner mappings are merged key by key.

    `shaping` may be a mapping of the fields of RewardShaping.

    >>> make_recipe("dapo", {"loss_options": {"clip_range_high": 0.3}}).policy_loss().config.bounds
    (0.8, 1.3)

    Raises:
        ConfigError: an unknown name or field; the nearest known one is given.
    """
    if name not in NAMED_RECIPES:
        raise ConfigError(
            f"algorithm: {name!r} is unknown; {did_you_mean(name, NAMED_RECIPES)}write one of "
            f"{', '.join(sorted(NAMED_RECIPES))}"
        )
    kind, preset = NAMED_RECIPES[name]
    merged: dict[str, Any] = dict(preset)
    for key, value in (options or {}).items():
        old = merged.get(key)
        # Options of another loss or estimator than the preset's would not fit the preset's own.
        keep = isinstance(old, Mapping) and not (key == "loss_options" and "loss" in (options or {}))
        merged[key] = {**old, **value} if keep else value  # type: ignore[dict-item]
    if "loss" in (options or {}) and "loss_options" not in (options or {}):
        merged.pop("loss_options", None)
    if isinstance(merged.get("shaping"), Mapping):
        merged["shaping"] = config_from(RewardShaping, merged["shaping"], what=f"{name}.shaping")
    return config_from(kind, merged, what=f"algorithm {name!r}")
