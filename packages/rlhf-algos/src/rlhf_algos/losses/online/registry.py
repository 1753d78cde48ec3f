"""Policy losses by name, for configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError, Loss, LossFunction, config_from, did_you_mean

from rlhf_algos.losses.online.clipped import PPOClipConfig, ReinforceConfig, ppo_clip, reinforce
from rlhf_algos.losses.online.covariance import ClipCovConfig, KLCovConfig, clip_cov, kl_cov
from rlhf_algos.losses.online.sequence import GMPOConfig, GSPOConfig, VESPOConfig, gmpo, gspo, vespo
from rlhf_algos.losses.online.soft_clip import CISPOConfig, DROConfig, SAPOConfig, cispo, dro, sapo
from rlhf_algos.losses.online.terms import PolicyTermsConfig
from rlhf_algos.losses.online.trust_region import DPPOConfig, dppo
from rlhf_algos.own_function import load_own_function, own_config

POLICY_LOSSES: Mapping[str, tuple[LossFunction, type[PolicyTermsConfig]]] = {
    "ppo_clip": (ppo_clip, PPOClipConfig),
    "reinforce": (reinforce, ReinforceConfig),
    "gspo": (gspo, GSPOConfig),
    "gmpo": (gmpo, GMPOConfig),
    "cispo": (cispo, CISPOConfig),
    "sapo": (sapo, SAPOConfig),
    "dro": (dro, DROConfig),
    "dppo": (dppo, DPPOConfig),
    "vespo": (vespo, VESPOConfig),
    "kl_cov": (kl_cov, KLCovConfig),
    "clip_cov": (clip_cov, ClipCovConfig),
}
"""Name to function and config."""


def make_policy_loss(name: str, options: Mapping[str, Any], *, report_entropy: bool = False) -> Loss:
    """The Loss of a name in `POLICY_LOSSES`, or of a user's `module:function`.

    Args:
        name: of the loss.
        options: fields of its config. A user's function gets them as the dataclass that annotates its third
            parameter, else as a dict.
        report_entropy: ask the engine for the entropy even if the loss does not need it.

    A user's function, or its config, may have an attribute `outputs`, the fields of ModelOutputs that it needs
    (default: log_probs); the function may have an attribute `add_columns`, f(global batch, config) -> batch, called
    before the step.

    Raises:
        ConfigError: unknown name or option.
        PluginError: the user's function cannot be imported.
    """
    if ":" in name:
        function, kind = load_own_function(name, what="policy loss", parameters=("outputs", "batch", "config"))
        config: Any = own_config(kind, options, what=f"policy loss {name!r}")
        outputs = tuple(getattr(config, "outputs", getattr(function, "outputs", ("log_probs",))))
    else:
        if name not in POLICY_LOSSES:
            raise ConfigError(
                f"policy loss: {name!r} is unknown; {did_you_mean(name, POLICY_LOSSES)}write one of "
                f"{', '.join(sorted(POLICY_LOSSES))}, or 'module:function'"
            )
        function, kind = POLICY_LOSSES[name]
        config = config_from(kind, options, what=f"policy loss {name!r}")
        outputs = config.outputs
    if report_entropy and "entropy" not in outputs:
        outputs = (*outputs, "entropy")
    return Loss(function=function, config=config, outputs=outputs)
