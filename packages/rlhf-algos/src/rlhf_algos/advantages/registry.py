"""Advantage estimators by name, with one signature: f(scores, group_ids, batch, **options)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, did_you_mean, load_object
from torch import Tensor

from rlhf_algos.advantages.groups import grpo_advantages, opo_advantages, remax_advantages, rloo_advantages

Estimator = Callable[..., Tensor]
"""f(scores [rows], group_ids [rows], batch, **options) -> advantages [rows] or [rows, length]."""


def _grpo(scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, **options: Any) -> Tensor:
    return grpo_advantages(scores, group_ids, **options)


def _group_mean(scores: Tensor, group_ids: Tensor, batch: Batch, **options: Any) -> Tensor:
    return grpo_advantages(scores, group_ids, scale="none", **options)


def _rloo(scores: Tensor, group_ids: Tensor, batch: Batch, **options: Any) -> Tensor:
    return rloo_advantages(scores, group_ids, **options)


def _opo(scores: Tensor, group_ids: Tensor, batch: Batch, **options: Any) -> Tensor:
    return opo_advantages(scores, group_ids, batch.response_mask.sum(dim=1), **options)


def _remax(scores: Tensor, group_ids: Tensor, batch: Batch) -> Tensor:
    return remax_advantages(scores, batch["greedy_scores"])


def _reinforce(scores: Tensor, group_ids: Tensor, batch: Batch) -> Tensor:
    return scores


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": _grpo,
    "group_mean": _group_mean,
    "rloo": _rloo,
    "opo": _opo,
    "remax": _remax,
    "reinforce": _reinforce,
}
"""Name to estimator."""


def estimator(name: str) -> Estimator:
    """The estimator of this name, or the user's at `module:function`.

    Raises:
        ConfigError: unknown name.
        PluginError: the user's function cannot be imported.
    """
    if ":" in name:
        return load_object(name, what="advantage estimator")
    if name not in ESTIMATORS:
        raise ConfigError(
            f"advantage estimator: {name!r} is unknown; {did_you_mean(name, ESTIMATORS)}write one of "
            f"{', '.join(sorted(ESTIMATORS))}, or 'module:function'"
        )
    return ESTIMATORS[name]
