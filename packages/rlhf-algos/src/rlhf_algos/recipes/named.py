"""Published online algorithms by name, as settings of `GRPO`, `PPO` and `OnlineDPO`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from rlhf_core import ConfigError, did_you_mean, load_object

from rlhf_algos.config.loader import from_mapping
from rlhf_algos.recipes.distillation import OnPolicyDistillation
from rlhf_algos.recipes.grpo import GRPO
from rlhf_algos.recipes.online_dpo import OnlineDPO
from rlhf_algos.recipes.ppo import PPO
from rlhf_algos.recipes.recipe import Recipe
from rlhf_algos.recipes.self_distillation import SelfDistillation

_SEQUENCE_MEAN = {"aggregation": "seq_mean_token_mean"}

NAMED_RECIPES: Mapping[str, tuple[type[GRPO] | type[PPO] | type[OnlineDPO], Mapping[str, Any]]] = {
    "ppo": (PPO, {}),
    "vapo": (
        PPO,
        {
            "loss_options": {"clip_range": 0.2, "clip_range_high": 0.28},
            "lam_critic": 1.0,
            "length_alpha": 0.05,
            "likelihood_coef": 0.1,
        },
    ),
    "grpo": (GRPO, {"loss_options": _SEQUENCE_MEAN, "kl_coef": 0.001}),
    "dr_grpo": (
        GRPO,
        {
            "advantage_options": {"scale": "none"},
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
    "luspo": (GRPO, {"loss": "gspo", "loss_options": {"aggregation": "seq_mean_token_sum"}}),
    "gmpo": (GRPO, {"loss": "gmpo"}),
    "cispo": (GRPO, {"loss": "cispo"}),
    "sapo": (GRPO, {"loss": "sapo"}),
    "scale_rl": (
        GRPO,
        {
            "advantage_options": {"scale": "advantages"},
            "loss": "cispo",
            "loss_options": {"aggregation": "prompt_mean", "ratio_high": 4.0},
            "old_log_probs": "sampler",
        },
    ),
    "dro": (GRPO, {"loss": "dro", "advantage_options": {"scale": "none"}}),
    "dppo": (GRPO, {"loss": "dppo", "old_log_probs": "sampler"}),
    "vespo": (GRPO, {"loss": "vespo"}),
    "kl_cov": (GRPO, {"loss": "kl_cov"}),
    "clip_cov": (GRPO, {"loss": "clip_cov"}),
    "rloo": (GRPO, {"advantage": "rloo", "kl_coef": 0.05, "kl_in": "score", "kl_estimator": "k1"}),
    "reinforce_pp": (
        GRPO,
        {"advantage": "reinforce", "whiten": True, "kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce_pp_baseline": (
        GRPO,
        {
            "advantage_options": {"scale": "none"},
            "whiten": True,
            "kl_coef": 0.001,
            "kl_in": "loss",
            "kl_estimator": "k2",
        },
    ),
    "gpg": (GRPO, {"advantage": "gpg", "loss": "reinforce"}),
    "max_rl": (GRPO, {"advantage": "max_rl"}),
    "pass_at_k": (GRPO, {"advantage": "pass_at_k"}),
    "gdpo": (GRPO, {"advantage": "gdpo"}),
    "optimal_token": (GRPO, {"advantage": "optimal_token"}),
    "gigpo": (GRPO, {"advantage": "gigpo"}),
    "remax": (GRPO, {"advantage": "remax"}),
    "opo": (GRPO, {"advantage": "opo"}),
    "nash_md": (
        GRPO,
        {
            "advantage": "reinforce",
            "advantage_options": {"baseline": 0.5},
            "loss": "reinforce",
            "loss_options": {"aggregation": "seq_mean_token_sum"},
            "kl_coef": 0.1,
            "kl_estimator": "k2",
        },
    ),
    "reinforce": (
        GRPO,
        {"advantage": "reinforce", "loss": "reinforce", "loss_options": {"aggregation": "seq_mean_token_sum"}},
    ),
    "on_policy_distillation": (OnPolicyDistillation, {}),
    "self_distillation": (SelfDistillation, {}),
    "online_dpo": (OnlineDPO, {}),
}
"""Name to class and the fields that differ from the class's defaults. DAPO's dynamic sampling is the loop's part;
its overlong penalty is a `RewardShaping` with the run's own lengths. `gdpo` needs the parts of its score named."""


def make_recipe(name: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of this name with some fields set otherwise, or a user's own class.

    Args:
        name: of `NAMED_RECIPES`, or `module:Class` of a dataclass with the members of `Recipe`.
        options: fields of the recipe as a file gives them: nested mappings and lists stand for `shaping` and
            `off_policy`. `loss_options` and the like are merged with those of the name, key by key, unless the
            loss or estimator that they belong to is another.

    >>> make_recipe("dapo", {"loss_options": {"clip_range_high": 0.3}}).policy_loss().config.bounds
    (0.8, 1.3)

    Raises:
        ConfigError: an unknown name or field, with the nearest known one, or a value that is refused.
        PluginError: the user's class cannot be imported.
    """
    options = options or {}
    if ":" in name:
        return _own_recipe(name, options)
    if name not in NAMED_RECIPES:
        raise ConfigError(
            f"algorithm: {name!r} is unknown; {did_you_mean(name, NAMED_RECIPES)}write one of "
            f"{', '.join(sorted(NAMED_RECIPES))}, or 'module:Class'"
        )
    kind, preset = NAMED_RECIPES[name]
    merged: dict[str, Any] = dict(preset)
    for key, value in options.items():
        owner = key.removesuffix("_options")
        keep = key.endswith("_options") and not (owner in options and options[owner] != preset.get(owner))
        merged[key] = {**merged.get(key, {}), **value} if keep and isinstance(value, Mapping) else value
    for owner in ("loss", "advantage"):
        # Options of another loss or estimator than the preset's would not fit the preset's own.
        if owner in options and options[owner] != preset.get(owner) and f"{owner}_options" not in options:
            merged.pop(f"{owner}_options", None)
    return from_mapping(kind, merged, source=f"algorithm {name!r}")


def _own_recipe(path: str, options: Mapping[str, Any]) -> Recipe:
    kind: Any = load_object(path, what="algorithm")
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise ConfigError(
            f"algorithm {path!r} is {kind!r}; write a dataclass whose fields are the settings, for instance a "
            "subclass of rlhf_algos.GRPO"
        )
    missing = [member for member in _members(Recipe) if not hasattr(kind, member)]
    if missing:
        raise ConfigError(
            f"algorithm {path!r} lacks {', '.join(missing)} of rlhf_algos.Recipe; derive it from "
            "rlhf_algos.PolicyRecipe, which has most of them"
        )
    recipe: Any = from_mapping(kind, options, source=f"algorithm {path!r}")
    return recipe


def _members(protocol: type) -> list[str]:
    return sorted(name for name in vars(protocol) if not name.startswith("_"))
