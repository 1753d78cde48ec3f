"""Advantage estimators by name, for configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError, config_from, did_you_mean

from rlhf_algos.advantages.estimator import Advantage, AdvantageConfig, AdvantageFunction
from rlhf_algos.advantages.gigpo import GiGPOAdvantagesConfig, gigpo_advantages
from rlhf_algos.advantages.groups import (
    GRPOAdvantagesConfig,
    OPOAdvantagesConfig,
    ReinforceAdvantagesConfig,
    ReMaxAdvantagesConfig,
    RLOOAdvantagesConfig,
    grpo_advantages,
    opo_advantages,
    reinforce_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlhf_algos.advantages.multi_reward import GDPOAdvantagesConfig, gdpo_advantages
from rlhf_algos.advantages.objectives import (
    BestOfGroupAdvantagesConfig,
    GPGAdvantagesConfig,
    MaxRLAdvantagesConfig,
    PassAtKAdvantagesConfig,
    best_of_group_advantages,
    gpg_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
)
from rlhf_algos.advantages.token_baseline import OptimalTokenAdvantagesConfig, optimal_token_advantages
from rlhf_algos.own_function import load_own_function, own_config

ADVANTAGES: Mapping[str, tuple[AdvantageFunction, type[AdvantageConfig]]] = {
    "grpo": (grpo_advantages, GRPOAdvantagesConfig),
    "rloo": (rloo_advantages, RLOOAdvantagesConfig),
    "opo": (opo_advantages, OPOAdvantagesConfig),
    "remax": (remax_advantages, ReMaxAdvantagesConfig),
    "reinforce": (reinforce_advantages, ReinforceAdvantagesConfig),
    "gpg": (gpg_advantages, GPGAdvantagesConfig),
    "max_rl": (max_rl_advantages, MaxRLAdvantagesConfig),
    "pass_at_k": (pass_at_k_advantages, PassAtKAdvantagesConfig),
    "best_of_group": (best_of_group_advantages, BestOfGroupAdvantagesConfig),
    "gdpo": (gdpo_advantages, GDPOAdvantagesConfig),
    "optimal_token": (optimal_token_advantages, OptimalTokenAdvantagesConfig),
    "gigpo": (gigpo_advantages, GiGPOAdvantagesConfig),
}
"""Name to function and config."""


def make_advantage(name: str, options: Mapping[str, Any] | None = None) -> Advantage:
    """The estimator of a name in `ADVANTAGES`, or a user's at `module:function`.

    Args:
        name: of the estimator.
        options: fields of its config. A user's function gets them as the dataclass that annotates its fourth
            parameter, else as a dict.

    Raises:
        ConfigError: unknown name or option.
        PluginError: the user's function cannot be imported.
    """
    options, what = options or {}, f"advantage {name!r}"
    if ":" in name:
        function, kind = load_own_function(
            name, what="advantage estimator", parameters=("scores", "group_ids", "batch", "config")
        )
        return Advantage(function=function, config=own_config(kind, options, what=what))
    if name not in ADVANTAGES:
        raise ConfigError(
            f"advantage estimator: {name!r} is unknown; {did_you_mean(name, ADVANTAGES)}write one of "
            f"{', '.join(sorted(ADVANTAGES))}, or 'module:function'"
        )
    function, kind = ADVANTAGES[name]
    return Advantage(function=function, config=config_from(kind, options, what=what))
