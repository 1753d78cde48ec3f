"""Scored groups as tensors, for checkpoints: tokens and log-probs by the million are no matter for JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rlhf_core import (
    DroppedSample,
    LogProbMeaning,
    Packed,
    PackedDoubles,
    PackedFlags,
    PackedFloats,
    PackedInts,
    Score,
    Trajectory,
)
from rlhf_rollout import ScoredGroup
from torch import Tensor

_COLUMNS: Mapping[str, type[Packed[Any]]] = {
    "token_ids": PackedInts,
    "response_mask": PackedFlags,
    "rollout_log_probs": PackedFloats,
    "weight_versions": PackedInts,
}
"""What each trajectory has per token."""


def can_be_saved(group: ScoredGroup) -> bool:
    """Whether a group holds nothing but numbers and what JSON can hold: no images, no dates."""
    if any(trajectory.images or trajectory.shown for trajectory in group.trajectories):
        return False
    try:
        json.dumps(_plain(group))
    except (TypeError, ValueError):
        return False
    return True


def pack_groups(groups: Sequence[ScoredGroup]) -> dict[str, Tensor]:
    """The groups as flat tensors; `unpack_groups` gives them back to the last bit.

    Arrays per token are joined over all samples. `lengths` [samples] says where each ends, `reward_lengths` and
    `score_reward_lengths` [samples] the same of rewards at tokens, which are empty for most. `plain` is the rest,
    as JSON in bytes.
    """
    if not groups:
        return {}
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.scores]
    text = json.dumps([_plain(group) for group in groups])
    packed = {
        "plain": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),
        "lengths": torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64),
        **{name: _joined([getattr(s, name) for s in samples], kind) for name, kind in _COLUMNS.items()},
    }
    for name, owners in (("reward", samples), ("score_reward", scores)):
        packed[f"{name}_lengths"] = torch.tensor([len(one.rewards) for one in owners], dtype=torch.int64)
        packed[f"{name}s"] = _joined([one.rewards for one in owners], PackedDoubles)
    return packed


def unpack_groups(packed: Mapping[str, Tensor]) -> list[ScoredGroup]:
    """Inverse of `pack_groups`."""
    if not packed:
        return []
    plain = json.loads(packed["plain"].numpy().tobytes())
    columns = {name: _parts(packed[name], packed["lengths"]) for name in _COLUMNS}
    rewards = _parts(packed["rewards"], packed["reward_lengths"])
    score_rewards = _parts(packed["score_rewards"], packed["score_reward_lengths"])
    groups = []
    for group in plain:
        trajectories = tuple(
            Trajectory(
                **{
                    **sample,
                    **{name: next(column) for name, column in columns.items()},
                    "meaning": LogProbMeaning(**sample["meaning"]),
                    "rewards": next(rewards),
                }
            )
            for sample in group["samples"]
        )
        groups.append(
            ScoredGroup(
                trajectories=trajectories,
                scores=tuple(Score(**score, rewards=next(score_rewards)) for score in group["scores"]),
                dropped=tuple(DroppedSample(**sample) for sample in group["dropped"]),
                greedy_score=group["greedy_score"],
            )
        )
    return groups


def _plain(group: ScoredGroup) -> dict[str, Any]:
    """All of a group but its arrays."""
    return {
        "samples": [
            {
                "sample_id": sample.sample_id,
                "group_id": sample.group_id,
                "episode_id": sample.episode_id,
                "meaning": asdict(sample.meaning),
                "truncated": sample.truncated,
                "metadata": dict(sample.metadata),
            }
            for sample in group.trajectories
        ],
        "scores": [{"value": score.value, "components": dict(score.components)} for score in group.scores],
        "dropped": [asdict(sample) for sample in group.dropped],
        "greedy_score": group.greedy_score,
    }


def _joined(parts: Sequence[Packed[Any]], kind: type[Packed[Any]]) -> Tensor:
    return torch.from_numpy(np.array(kind.joined(parts)))


def _parts(joined: Tensor, lengths: Tensor) -> Iterator[np.ndarray]:
    """One array for each length."""
    return iter(np.split(joined.numpy(), np.cumsum(lengths.numpy())[:-1])) if len(lengths) else iter(())
