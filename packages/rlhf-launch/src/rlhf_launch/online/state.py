"""The state of a run: what must be remembered to continue exactly where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_algos import Checkpoint, CheckpointSchedule, CheckpointStore, KLController, Unpublished
from rlhf_rollout import ScoredGroup

from rlhf_launch.online.fitted_roles import FittedRoles
from rlhf_launch.samples.producer import Producer
from rlhf_launch.samples.reward_scale import RewardScales
from rlhf_launch.samples.saved_groups import pack_groups, unpack_groups
from rlhf_launch.workers.train_group import TrainGroup


class RunState:
    """The number of completed steps, and how a run is saved and restored.

    Besides the engines' own state there is the ledger: which prompts are in flight, and scored groups that wait for
    a step. Samples, seeds and the order of prompts follow from the seed and a prompt's position in the stream.
    """

    def __init__(
        self,
        store: CheckpointStore,
        engines: Sequence[TrainGroup],
        producer: Producer,
        kl: KLController,
        *,
        schedule: CheckpointSchedule | None = None,
        background: bool = False,
        fitted: FittedRoles | None = None,
        scales: RewardScales | None = None,
    ) -> None:
        """Save and restore these parts of a run.

        Args:
            store: where checkpoints go.
            engines: those whose weights change.
            producer: its ledger and its position among the prompts are saved.
            kl: the controller of the KL coefficient.
            schedule: when a checkpoint is due; without one only at the end.
            background: whether engines that can may write while training goes on.
            fitted: the sizes of micro-batches that engines find by trials.
            scales: of normalised rewards.
        """
        self.store = store
        self.step = 0
        self.whole = True
        """Whether the engines' state is that after `step`; false inside a step, and for good after a failed one."""
        self._engines, self._producer, self._kl = engines, producer, kl
        self.schedule = schedule or CheckpointSchedule()
        self._background = background
        self.fitted = fitted or FittedRoles()
        self.scales = scales or RewardScales()
        self._unpublished: Unpublished | None = None
        self._accounts: tuple[dict[str, Any], list[ScoredGroup]] | None = None

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return max(self.store.steps(), default=0)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that takes a step.

        Where nothing is generated while the policy is trained, the producer's accounts at its end are those that a
        checkpoint of this step holds, whenever it is written: what began later begins again in a resumed run.
        """
        self.whole = False
        yield
        self.whole = True
        self._accounts = self._producer.state() if self._producer.rests else None

    def save(self) -> None:
        """Begin a checkpoint of the run as it is now; it counts once `publish` has found it complete."""
        self.publish(wait=True)
        self.schedule.saved()
        accounts, groups = self._accounts or self._producer.state()
        state = {**accounts, "kl": self._kl.state_dict(), "fitted_tokens": self.fitted.state()}
        state["reward_scales"] = self.scales.state()
        unpublished = self.store.begin(self.step, state, pack_groups(groups))
        for engine in self._engines:
            engine.save(unpublished.folder / engine.name, background=self._background)
        self._unpublished = unpublished

    def rate(self, score: float | None) -> None:
        """Note the score by which the best checkpoint is found, if a checkpoint was begun at this step."""
        if self._unpublished is not None and self._unpublished.step == self.step:
            self._unpublished = self._unpublished.rated(score)

    def publish(self, *, wait: bool = False) -> None:
        """Publish the checkpoint under way, if all ranks have written it; `wait` until they have."""
        if self._unpublished is None or not (wait or all(engine.saved() for engine in self._engines)):
            return
        for engine in self._engines:
            engine.finish_save()
        self.store.publish(self._unpublished)
        self._unpublished = None

    def restore(self, saved: Checkpoint) -> int:
        """Bring engines, ledger and controllers to a checkpoint; returns its step.

        The rollout engines must be brought to the policy's weights at that version next.
        """
        for engine in self._engines:
            engine.load(saved.path / engine.name)
        self.fitted.restore(saved.state["fitted_tokens"])
        self.scales.restore(saved.state.get("reward_scales", {}))
        self._kl.load_state_dict(saved.state["kl"])
        self.step = saved.step
        self._producer.restore(saved.state, unpack_groups(saved.tensors()), step=self.step)
        return self.step
