"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_launch.online.checkpoints import CheckpointStore, Unpublished

if TYPE_CHECKING:
    from rlhf_launch.online.loop import OnlineRun
    from rlhf_launch.workers.train_group import TrainGroup


class RunState:
    """The number of completed steps, and how a run is saved and restored.

    Besides the engines' own state there is the ledger: which prompts are in flight, and scored groups that wait for
    a step. Samples, seeds and the order of prompts follow from the seed and a prompt's position in the stream.
    """

    def __init__(self, store: CheckpointStore, *, step: int = 0) -> None:
        self.store = store
        self.step = step
        self._unpublished: Unpublished | None = None

    def save(self, run: OnlineRun) -> None:
        """Write a checkpoint of the run as it is now; it counts once `publish` has found it complete."""
        self.publish(run, wait=True)
        state = {
            **run.producer.state(),
            "kl": run.kl.state_dict(),
            "seed": run.config.seed,
            "score": self._score(run),
        }
        unpublished = self.store.begin(self.step, state)
        for group in _trained(run):
            group.save(unpublished.folder / group.name, background=run.config.checkpoint_in_background)
        self._unpublished = unpublished

    def publish(self, run: OnlineRun, *, wait: bool = False) -> None:
        """Make the checkpoint under way count if all ranks have written it; `wait` for them, or look only."""
        if self._unpublished is None or not (wait or all(group.saved() for group in _trained(run))):
            return
        for group in _trained(run):
            group.finish_save()
        self.store.publish(self._unpublished)
        self._unpublished = None

    def restore(self, run: OnlineRun) -> None:
        """Continue from the newest checkpoint: engines, ledger, controllers, and the generators' weights.

        Raises:
            DataError: there is no complete checkpoint.
        """
        folder, state = self.store.latest()
        for group in _trained(run):
            group.load(folder / group.name)
        run.kl.load_state_dict(state["kl"])
        self.step = state["step"]
        run.roles.sync(self.step)
        run.producer.restore(state, step=self.step)

    def _score(self, run: OnlineRun) -> float | None:
        """By which the best checkpoint is known."""
        name = run.config.keep_best
        if name is None:
            return None
        if name not in run.reporter.latest:
            known = ", ".join(sorted(run.reporter.latest))
            run.reporter.say(f"keep_best: step {self.step} has no metric {name!r}; there are {known}")
        return run.reporter.latest.get(name)


def _trained(run: OnlineRun) -> list[TrainGroup]:
    return [run.roles.policy, *([run.roles.critic] if run.roles.critic is not None else [])]
