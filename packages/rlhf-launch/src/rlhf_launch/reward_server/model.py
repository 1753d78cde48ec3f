"""The reward model of a server: rows of token ids in, scores out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rlhf_core import Batch, CapabilityError, EngineConfig, RewardError, pad_rows


class RewardModel:
    """A sequence classifier with one label in this process: the engine that a run's `reward.model` is."""

    def __init__(self, config: EngineConfig, *, pad_token_id: int) -> None:
        """`config` is of the role reward."""
        from rlhf_algos import TorchEngine

        self._engine = TorchEngine(config)
        self._pad = pad_token_id

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The score of each row.

        Raises:
            RewardError: one is not finite.
        """
        if not rows:
            return []
        masks = [[True] * len(row) for row in rows]
        batch = Batch(
            token_ids=pad_rows([list(row) for row in rows], value=self._pad, dtype=torch.long),
            attention_mask=pad_rows(masks, value=False, dtype=torch.bool),
            # What is a response matters to no score; the first token can never be one.
            response_mask=pad_rows([[False, *mask[1:]] for mask in masks], value=False, dtype=torch.bool),
        )
        scores = self._engine.score(batch, ("scores",)).scores
        if scores is None:
            raise CapabilityError("the engine gave no scores; it is not in the role reward")
        found = scores.tolist()
        if bad := [number for number, score in enumerate(found) if not math.isfinite(score)]:
            raise RewardError(f"the model's score of {len(bad)} row(s) is not finite, the first is row {bad[0]}")
        return found

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.close()
