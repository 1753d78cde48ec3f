"""Micro-batches whose sizes the engines of a run found by trials: said once, and kept for a resume."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_core import FittedTokens, TokenPass, fitted_as_values, fitted_from_values

from rlhf_launch.workers.train_group import TrainGroup


class FittedRoles:
    """What each role has found. Engines that are trained keep it in their own checkpoints; for the others, which
    have none, the run does."""

    def __init__(self, groups: Sequence[TrainGroup] = (), *, trained: Collection[str] = ()) -> None:
        """Of a run.

        Args:
            groups: the roles whose engines measure; none where the sizes are written in the configuration.
            trained: the names of those that take steps.
        """
        self._groups = {group.name: group for group in groups}
        self._trained = frozenset(trained)
        self._found: dict[str, dict[TokenPass, FittedTokens]] = {name: {} for name in self._groups}

    def news(self) -> list[str]:
        """What was found since the last call, a line each. Roles that have found all they will are not asked."""
        lines: list[str] = []
        for name, group in self._groups.items():
            said = self._found[name]
            if ("step" if name in self._trained else "score") in said:
                continue
            found = group.fitted_tokens()
            lines += [f"{name}, to {kind}: {fitted}" for kind, fitted in found.items() if kind not in said]
            self._found[name] = dict(found)
        return lines

    def state(self) -> dict[str, Any]:
        """What the roles that are not trained have found, as plain values."""
        return {name: fitted_as_values(found) for name, found in self._found.items() if name not in self._trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give the roles what they had found; those that are new, or not in the state, find it themselves."""
        for name in self._groups.keys() & state.keys():
            self._groups[name].take_fitted_tokens(fitted_from_values(state[name]))
