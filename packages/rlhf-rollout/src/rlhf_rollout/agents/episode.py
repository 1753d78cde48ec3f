"""An episode under way: the flat arrays of a Trajectory as they grow, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from rlhf_core import LogProbMeaning, PackedFlags, PackedFloats, PackedInts, Sample, Trajectory

Ending = Literal["done", "turns", "tokens", "length", "abort", "deadline"]
"""`done`: the environment ended it; `turns`: max_turns; `tokens`: no room for another turn; `length`: a turn was
cut at its max_tokens; `abort`: the generator gave a turn up; `deadline`: environment or episode took too long."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """The tokens of an episode so far, and columns of the same length with what is known of each token."""

    sample_id: str
    attempt: int = 0
    """How often it was tried before."""
    token_ids: PackedInts = field(default_factory=PackedInts)
    response_mask: PackedFlags = field(default_factory=PackedFlags)
    log_probs: PackedFloats = field(default_factory=PackedFloats)
    weight_versions: PackedInts = field(default_factory=PackedInts)
    rewards: dict[int, float] = field(default_factory=dict)
    """What the environment gave for turns, by the position of the turn's last token."""
    images: list[Any] = field(default_factory=list)
    turns: int = 0
    turn_start: int = 0
    """Position of the first token of the last turn."""
    info: dict[str, float] = field(default_factory=dict)
    meaning: LogProbMeaning = field(default_factory=LogProbMeaning)
    finish_reason: str = "stop"
    """Of the last turn."""

    def add_given(self, token_ids: Sequence[int], images: Sequence[Any] = ()) -> None:
        """Append tokens of the prompt or the environment, which are context and have no loss."""
        count = len(token_ids)
        self.token_ids += PackedInts.of(token_ids)
        self.response_mask += PackedFlags.full(count, False)
        self.log_probs += PackedFloats.full(count, 0.0)
        self.weight_versions += PackedInts.full(count, -1)
        self.images += images

    def add_turn(self, sample: Sample, meaning: LogProbMeaning) -> None:
        """Append a sampled turn, token by token as it was sampled."""
        self.turn_start = len(self.token_ids)
        self.token_ids += sample.token_ids
        self.response_mask += PackedFlags.full(sample.length, True)
        self.log_probs += sample.log_probs
        self.weight_versions += sample.weight_versions
        if not self.turns:  # a later turn may have less room, and so less of `min_tokens`
            self.meaning = meaning
        self.turns += 1
        self.finish_reason = sample.finish_reason

    def reward(self, amount: float) -> None:
        """Add to the reward of the turn that was just sampled, at its last token."""
        last = len(self.token_ids) - 1
        self.rewards[last] = self.rewards.get(last, 0.0) + amount

    def trajectory(self, group_id: str, metadata: Mapping[str, Any], ending: Ending) -> Trajectory:
        """The finished trajectory; `metadata` gets `turns`, `ending`, `earned`, `environment` (numbers to log)."""
        rewards = np.zeros(len(self.token_ids) if any(self.rewards.values()) else 0)
        for position, amount in self.rewards.items() if len(rewards) else ():
            rewards[position] = amount
        return Trajectory(
            sample_id=self.sample_id,
            group_id=group_id,
            token_ids=self.token_ids,
            response_mask=self.response_mask,
            rollout_log_probs=self.log_probs,
            weight_versions=self.weight_versions,
            meaning=self.meaning,
            truncated=ending != "done" or self.finish_reason != "stop",
            metadata={
                **metadata,
                "turns": self.turns,
                "ending": ending,
                "earned": float(sum(self.rewards.values())),
                "environment": dict(self.info),
            },
            rewards=rewards,
            images=tuple(self.images),
        )
