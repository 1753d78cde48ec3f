"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_launch.checkpoints import CheckpointStore

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
        run.roles.sync(self.step)
