"""A user's function as a kind of reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import RewardFunction

from rlhf_rollout.rewards.functions.isolated import IsolatedRewardConfig, open_function
from rlhf_rollout.rewards.kind import RewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionRewardConfig(IsolatedRewardConfig, RewardConfig):
    """A Python function; see PythonReward for how it is called."""

    kind: Literal["function"] = "function"
    isolated: bool = False
    """Run the function in processes of its own, which are killed at the deadline: for what may hang, crash or hold
    Python's lock. `workers` and `prepare` belong to these processes."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs; imports the function."""
        return open_function(self, name=f"{name} ({self.function})", isolated=self.isolated)
