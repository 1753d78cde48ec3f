"""What a resumed run may have otherwise than the run that was begun, and what it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["none", "rounding", "course"]
"""What a changed setting does to a run: nothing to what is trained; other last bits; another course."""

_NONE = (
    *("output", "tensorboard", "evaluation.**", "checkpoint.**", "bundles.**", "placement.**", "reference_cache"),
    *("train.max_skipped_steps", "model.trust_remote_code", "rollout.overlap.max_in_flight"),
    *("reward.**.url", "reward.**.urls.**", "reward.**.timeout_s", "reward.**.workers"),
    *("reward.on_failure.**", "reward.**.on_failure.**", "train.steps", "train.epochs", "rounds"),
    # Known by their content, wherever they lie: see the fingerprint.
    *("model.path", "model.reference", "model.critic", "model.teacher", "model.tokenizer", "data.train.*.path"),
    "data.pretrain.*.path",
    *("reward.model", "reward.parts.*.path"),
)
_ROUNDING = (
    *("placement.device", "placement.**.ranks", "placement.**.options.**", "train.ranks"),
    *("train.max_tokens_per_micro_batch", "train.max_tokens_per_mlp_tile", "train.packing"),
    *("train.gradient_checkpointing", "train.sequence_parallel_size", "train.options.**", "model.attention"),
    *("rollout.engines", "rollout.max_num_seqs", "rollout.tensor_parallel_size", "rollout.options.**"),
    *("weight_sync.**", "versions.**"),
)
_BEST = ("evaluation.best_metric", "evaluation.greater_is_better")
"""The best value so far is a value of this metric."""
_LENGTH = ("train.steps", "train.epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One setting that is not what it was."""

    key: str
    before: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        if self.key.startswith("fingerprint."):
            what = self.key.removeprefix("fingerprint.")
            counted = isinstance(self.before, int) and isinstance(self.now, int)
            return f"{what} was {self.before}, is {self.now}" if counted else f"{what} has other content"
        return f"{self.key} was {self.before!r}, is {self.now!r}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What differs between two records of a run, in the order of their keys.

    Args:
        before: `settings`, `fingerprint` and `versions`, as `run.json` has them.
        now: the same of the run that is to go on.
    """
    left, right = _flat(before), _flat(now)
    schedules = _schedules(now["settings"])
    return [
        Difference(key=key, before=left.get(key), now=right.get(key), effect=_effect(key, fixed_length=schedules))
        for key in dict.fromkeys((*right, *left))
        if left.get(key) != right.get(key)
    ]


def _effect(key: str, *, fixed_length: bool) -> Effect:
    if key.startswith("fingerprint."):
        return "course"
    if key in _LENGTH and fixed_length:
        return "course"
    if key in _BEST:
        return "course"
    if any(_fits(pattern, key) for pattern in _ROUNDING):
        return "rounding"
    return "none" if any(_fits(pattern, key) for pattern in _NONE) else "course"


def _schedules(settings: Mapping[str, Any]) -> bool:
    """Whether a learning rate's course depends on the run's length, so that another length is another course."""
    train = settings.get("train") or {}
    optimizers = [train.get(name) or {} for name in ("optimizer", "critic_optimizer")]
    return any(
        one.get("schedule", "constant") != "constant" or 0 < (one.get("warmup") or 0) < 1 for one in optimizers
    )


def _fits(pattern: str, key: str) -> bool:
    """Whether a dotted key fits a pattern, in which `*` is one part and `**` any number of them."""
    parts = [{"*": r"[^.]+", "**": r".+"}.get(part, re.escape(part)) for part in pattern.split(".")]
    expression = r"\.".join(parts).replace(r"\..+\.", r"\.(?:.+\.)?")
    return re.fullmatch(expression, key) is not None or (
        pattern.endswith(".**") and key == pattern.removesuffix(".**")
    )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key; digests and versions below `fingerprint` and `versions`."""
    found = dict(_leaves(record["settings"], ""))
    found |= {f"fingerprint.{name}": value for name, value in record["fingerprint"].items() if name not in found}
    return found | {f"versions.{name}": value for name, value in record["versions"].items()}


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}{name}.")
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}{place}.")
    elif value not in ({}, [], ()):  # an empty group says nothing
        yield prefix.rstrip("."), value
