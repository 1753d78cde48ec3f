"""The account of a run's prompts, step by step: what `samples.jsonl` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf_rollout import ScoredGroup

from rlhf_launch.samples.groups import version_span
from rlhf_launch.samples.prompts import PromptStream

Unused = Literal["filtered", "dropped"]
"""Why a step does not count a prompt as used: its scores are equal, or no sample has one."""


class PromptAccount:
    """What became of every prompt, by its position in the stream: written with the step that it was settled in.

    Each position is in the account once: `used` with the step that trained on it, `filtered` or `dropped` with the
    step that was collected next. Of a used or filtered prompt it says how long the samples are (`lengths`, in
    tokens) and which weights the oldest and newest of their tokens are of (`versions`); of a dropped one, the
    reason.
    """

    def __init__(self, prompts: PromptStream) -> None:
        self._prompts = prompts
        self._unused: list[dict[str, Any]] = []

    def note(self, position: int, group: ScoredGroup, outcome: Unused) -> None:
        """Note a prompt that no step uses."""
        self._unused.append(self._entry(position, group, outcome))

    def settle(self, groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
        """The entries of a step that trains on these groups, in the order of their prompts.

        Where nothing else is left, a step trains on groups that were filtered, whose advantages are zero. Their
        entries stay what they are.
        """
        known = {entry["position"] for entry in self._unused}
        used = [
            self._entry(position, group, "used")
            for group in groups
            if (position := position_of(group)) not in known
        ]
        entries = sorted([*used, *self._unused], key=lambda entry: entry["position"])
        self._unused = []
        return entries

    def state(self) -> list[dict[str, Any]]:
        """The entries that no step has taken yet."""
        return list(self._unused)

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state."""
        self._unused = [dict(entry) for entry in state]

    def _entry(self, position: int, group: ScoredGroup, outcome: str) -> dict[str, Any]:
        entry = {"position": position, "row": self._prompts.at(position).prompt_id, "outcome": outcome}
        if outcome == "dropped":
            return entry | {"reason": group.dropped[0].reason}
        span = version_span(group.trajectories)
        spans = {} if span is None else {"versions": list(span)}
        return entry | {"lengths": [t.response_length for t in group.trajectories]} | spans


def position_of(group: ScoredGroup) -> int:
    """The position in the stream of the prompt that a training group is of."""
    return int(group.trajectories[0].group_id)
