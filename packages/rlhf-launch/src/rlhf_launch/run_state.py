"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import LogProbMeaning, Score, Trajectory

from rlhf_launch.checkpoints import CheckpointStore
from rlhf_launch.collecting import Group

if TYPE_CHECKING:
    from rlhf_launch.online import OnlineRun


class RunState:
    """The number of completed steps, and how a run is saved and restored.

    Besides the engines' own state there is little: samples, seeds and the order of prompts follow from the step
    and the seed, so nothing random is carried from one step to the next.
    """

    def __init__(self, store: CheckpointStore, *, step: int = 0) -> None:
        self.store = store
        self.step = step
        self.surplus: Sequence[Group] = ()
        """Scored groups that the next step opens with."""

    def save(self, run: OnlineRun) -> Path:
        """Write a checkpoint of the run as it is now."""

        def fill(folder: Path) -> None:
            run.roles.policy.save(folder / "policy")
            if run.roles.critic is not None:
                run.roles.critic.save(folder / "critic")

        state = {
            "prompt_position": run.prompts.position,
            "kl": run.kl.state_dict(),
            "seed": run.config.seed,
            "surplus": [group_to_plain(group) for group in self.surplus],
        }
        return self.store.write(self.step, state, fill)

    def restore(self, run: OnlineRun) -> None:
        """Continue from the newest checkpoint: engines, position, controllers, and the generators' weights.

        Raises:
            DataError: there is no complete checkpoint.
        """
        folder, state = self.store.latest()
        run.roles.policy.load(folder / "policy")
        if run.roles.critic is not None:
            run.roles.critic.load(folder / "critic")
        run.prompts.position = state["prompt_position"]
        run.kl.load_state_dict(state["kl"])
        self.step = state["step"]
        self.surplus = [group_from_plain(group) for group in state["surplus"]]
        run.roles.sync(self.step)


def group_to_plain(group: Group) -> dict[str, Any]:
    """A group as JSON can hold it."""
    return {
        "trajectories": [asdict(trajectory) for trajectory in group.trajectories],
        "scores": [asdict(score) for score in group.scores],
    }


def group_from_plain(data: Mapping[str, Any]) -> Group:
    """Inverse of `group_to_plain`."""
    return Group(
        trajectories=tuple(_trajectory(item) for item in data["trajectories"]),
        scores=tuple(Score(**{**item, "rewards": tuple(item["rewards"])}) for item in data["scores"]),
    )


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    tuples = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Trajectory(**{**data, **tuples, "meaning": LogProbMeaning(**data["meaning"])})
