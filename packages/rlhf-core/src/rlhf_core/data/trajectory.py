"""A finished episode as flat arrays aligned with its tokens; multi-turn needs no special case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.data.images import LoadsImages
from rlhf_core.data.packed import (
    FlagsLike,
    FloatsLike,
    IntsLike,
    PackedDoubles,
    PackedFlags,
    PackedFloats,
    PackedInts,
    Run,
)
from rlhf_core.data.sampling import LogProbMeaning

_NONE = PackedDoubles()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Prompt, sampled and environment tokens in one row. Per-token columns may be given as any sequences or arrays.

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
    token_ids: PackedInts
    """[length]"""
    response_mask: PackedFlags
    """[length] True where the policy sampled the token."""
    rollout_log_probs: PackedFloats
    """[length] Sampler's log-prob where `response_mask` is True, 0 elsewhere."""
    weight_versions: PackedInts
    """[length] Version of the weights that sampled the token, -1 where none did."""
    meaning: LogProbMeaning = field(default_factory=LogProbMeaning)
    """What `rollout_log_probs` are conditioned on."""
    truncated: bool = False
    """True if the episode was cut off by a limit and did not end by itself."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's other columns (for instance `answer`), for reward functions."""
    rewards: PackedDoubles = _NONE
    """[length] What an environment gave for each turn, at the turn's last sampled token, 0 elsewhere; empty if no
    environment gave any. A score of the episode includes them: they say where in it parts of the score fell."""
    episode_id: str = ""
    """Trajectories of one episode, the branches of its conversations, share it and have one score; the sample's own
    id if it is not given."""
    images: tuple[Any, ...] = ()
    """Images of the prompt and of environment messages, in the order of their placeholders in `token_ids`, one for
    each: no training engine takes such a row."""
    shown: LoadsImages | None = None
    """What a training engine is shown with `token_ids`, in which the places of the images are as long as the model
    runs them."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            sample_id: str,
            group_id: str,
            token_ids: IntsLike,
            response_mask: FlagsLike,
            rollout_log_probs: FloatsLike,
            weight_versions: IntsLike,
            meaning: LogProbMeaning = ...,
            truncated: bool = False,
            metadata: Mapping[str, Any] = ...,
            rewards: FloatsLike = (),
            episode_id: str = "",
            images: Sequence[Any] = (),
            shown: LoadsImages | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not self.episode_id:
            object.__setattr__(self, "episode_id", self.sample_id)
        for name, kind in _COLUMNS.items():
            given = getattr(self, name)
            packed = kind.of(given).compressed() if name in _REPEATING else kind.of(given)
            if packed is not given:
                object.__setattr__(self, name, packed)
        length, rewarded = len(self.token_ids), len(self.rewards)
        if not (
            length == len(self.response_mask) == len(self.rollout_log_probs) == len(self.weight_versions)
            and rewarded in (0, length)
        ):
            lengths = {name: len(getattr(self, name)) for name in _COLUMNS if name != "rewards" or rewarded}
            raise ValueError(f"trajectory {self.sample_id!r}: arrays differ in length: {lengths}")
        if not length or self.response_mask[0]:
            raise ValueError(
                f"trajectory {self.sample_id!r}: needs at least one prompt token before the first sampled one"
            )
        self._check_sampled()
        if rewarded:
            rewards, sampled = np.asarray(self.rewards), np.asarray(self.response_mask)
            wrong = ~np.isfinite(rewards) | ((rewards != 0) & ~sampled)
            if wrong.any():
                position = int(wrong.argmax())
                raise ValueError(
                    f"trajectory {self.sample_id!r}: the reward at position {position} is {rewards[position]}; "
                    "rewards must be finite, and 0 on tokens that the policy did not sample"
                )

    def _check_sampled(self) -> None:
        """Refuse a sampled token without a log-prob or a version."""
        if self._plainly_sampled():
            return
        sampled, log_probs = np.asarray(self.response_mask), np.asarray(self.rollout_log_probs)
        # NaN is in no range.
        known = (log_probs > -np.inf) & (log_probs <= _LARGEST) & (np.asarray(self.weight_versions) >= 0)
        if not (known | ~sampled).all():
            position = int((~known & sampled).argmax())
            raise ValueError(
                f"trajectory {self.sample_id!r}: sampled token at position {position} needs a finite "
                f"log-prob <= 0 and a weight version >= 0, got {self.rollout_log_probs[position]} and "
                f"{self.weight_versions[position]}"
            )

    def _plainly_sampled(self) -> bool:
        """Whether all tokens have a log-prob, and all after a prompt a version: without a look at every number."""
        for part in self.rollout_log_probs.parts:
            low, high = (part.value, part.value) if isinstance(part, Run) else (part.min(), part.max())
            if not (low > -np.inf and high <= _LARGEST):  # NaN is in no range
                return False
        first, *rest = self.weight_versions.parts
        if isinstance(first, Run) and first.value < 0:
            prompt = self.response_mask.parts[0]
            if not (isinstance(prompt, Run) and not prompt.value and prompt.count >= first.count):
                return False
        else:
            rest = [first, *rest]
        return all((part.value if isinstance(part, Run) else part.min()) >= 0 for part in rest)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one (all of them if none was sampled)."""
        try:
            return self.response_mask.index(True)
        except ValueError:
            return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return self.response_mask.count(True)

    @property
    def response_token_ids(self) -> PackedInts:
        """Everything after the prompt, environment tokens included."""
        return self.token_ids[self.prompt_length :]


_LARGEST = 1e-3
"""A log-prob that rounding may give."""
_REPEATING = frozenset({"response_mask", "weight_versions"})
_COLUMNS = {
    "token_ids": PackedInts,
    "response_mask": PackedFlags,
    "rollout_log_probs": PackedFloats,
    "weight_versions": PackedInts,
    "rewards": PackedDoubles,
}
"""What a trajectory has for each token."""
