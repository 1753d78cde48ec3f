"""A finished episode as flat arrays aligned with its tokens; multi-turn needs no special case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.data.sampling import LogProbMeaning


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Prompt, sampled and environment tokens in one row.

    A prompt of two tokens and a response of two, the last being end-of-text:

    >>> t = Trajectory(
    ...     sample_id="0/0", group_id="0", token_ids=(5, 6, 7, 2), response_mask=(False, False, True, True),
    ...     rollout_log_probs=(0.0, 0.0, -0.5, -0.1), weight_versions=(-1, -1, 3, 3))
    >>> t.response_length, t.prompt_length
    (2, 2)
    """

    sample_id: str
    """Unique in a run; reports name samples by it."""
    group_id: str
    """Samples of the same prompt share it."""
    token_ids: tuple[int, ...]
    """[length]"""
    response_mask: tuple[bool, ...]
    """[length] True where the policy sampled the token."""
    rollout_log_probs: tuple[float, ...]
    """[length] Sampler's log-prob where `response_mask` is True, 0 elsewhere."""
    weight_versions: tuple[int, ...]
    """[length] Version of the weights that sampled the token, -1 where none did."""
    meaning: LogProbMeaning = field(default_factory=LogProbMeaning)
    """What `rollout_log_probs` are conditioned on."""
    truncated: bool = False
    """True if the episode was cut off by a limit and did not end by itself."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's other columns (for instance `answer`), for reward functions."""
    rewards: tuple[float, ...] = ()
    """[length] What an environment gave for each turn, at the turn's last sampled token, 0 elsewhere; empty if no
    environment gave any. A score of the episode includes them: they say where in it parts of the score fell."""
    images: tuple[Any, ...] = ()
    """Images of the prompt and of environment messages, in the order of their placeholders in `token_ids`."""

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "response_mask": len(self.response_mask),
            "rollout_log_probs": len(self.rollout_log_probs),
            "weight_versions": len(self.weight_versions),
        }
        if self.rewards:
            lengths["rewards"] = len(self.rewards)
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory {self.sample_id!r}: arrays differ in length: {lengths}")
        if not self.token_ids or self.response_mask[0]:
            raise ValueError(
                f"trajectory {self.sample_id!r}: needs at least one prompt token before the first sampled one"
            )
        for position, (sampled, log_prob, version) in enumerate(
            zip(self.response_mask, self.rollout_log_probs, self.weight_versions, strict=True)
        ):
            if sampled and (not math.isfinite(log_prob) or log_prob > 1e-3 or version < 0):
                raise ValueError(
                    f"trajectory {self.sample_id!r}: sampled token at position {position} needs a finite "
                    f"log-prob <= 0 and a weight version >= 0, got {log_prob} and {version}"
                )
        for position, (sampled, reward) in enumerate(zip(self.response_mask, self.rewards, strict=False)):
            if not math.isfinite(reward) or (reward and not sampled):
                raise ValueError(
                    f"trajectory {self.sample_id!r}: the reward at position {position} is {reward}; rewards must "
                    "be finite, and 0 on tokens that the policy did not sample"
                )

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one (all of them if none was sampled)."""
        return self.response_mask.index(True) if True in self.response_mask else len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return sum(self.response_mask)

    @property
    def response_token_ids(self) -> tuple[int, ...]:
        """Everything after the prompt, environment tokens included."""
        return self.token_ids[self.prompt_length :]
