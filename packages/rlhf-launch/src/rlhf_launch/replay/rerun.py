"""A kept step taken again on one process, and the numbers of then beside those of now."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rlhf_core import Batch, DataError, RaggedBatch, check_model_path

from rlhf_launch.bundles.bundle import Bundle, read_bundle
from rlhf_launch.bundles.trace import StepTrace
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.metrics import PhaseClock
from rlhf_launch.online.setup import plan_of, several_teachers, teacher_prompts
from rlhf_launch.online.trainer import Trainer
from rlhf_launch.placement.plans import TrainRole, roles_of
from rlhf_launch.replay.parting import (
    Parting,
    part_batches,
    part_models,
    part_reports,
    part_tensors,
)
from rlhf_launch.replay.report import print_replay
from rlhf_launch.replay.result import Replay
from rlhf_launch.replay.weights import (
    TRAINED,
    StartingWeights,
    check_convertible,
    export_state,
    find_weights,
    local_roles,
    run_checkpoints,
    starting_from,
)
from rlhf_launch.samples.groups import collate_groups
from rlhf_launch.workers.train_group import TrainGroup

TOLERANCE = 1e-4
TOLERANCE_16_BIT = 5e-2


def replay_step(
    bundle: Bundle | Path | str,
    overrides: Sequence[str] = (),
    *,
    weights: Path | None = None,
    tolerance: float | None = None,
    console: Console | None = None,
) -> Replay:
    """Take a kept step again on one process, and print where its numbers part from those of then.

    The samples and their scores are the bundle's; log-probs, values, advantages, losses and gradients are computed
    anew, by the torch engine unless `train.engine` is among the overrides.

    Args:
        bundle: a bundle, or its directory.
        overrides: `dotted.key=value` on top of the run's settings: another algorithm, `train.packing=false`,
            `model.dtype=float32`, `train.engine=deepspeed`, `train.minibatches=1`.
        weights: a checkpoint or a model to start from; by default those that the step began with.
        tolerance: see `Replay.tolerance`; by default 1e-4, where a side computes in 16 bits 5e-2.
        console: where the table goes; standard output if not given.

    Raises:
        UserError: the bundle is missing or damaged, an override is not understood, or the weights are nowhere;
            nothing heavy was started.
    """
    found = bundle if isinstance(bundle, Bundle) else read_bundle(Path(bundle))
    rerun = _Rerun(found, overrides, find_weights(found, weights), tolerance)
    result = rerun.result()
    print_replay(result, console or Console(highlight=False))
    return result


class _Rerun:
    """One replay: its settings first, then its numbers."""

    def __init__(
        self, bundle: Bundle, overrides: Sequence[str], start: StartingWeights, tolerance: float | None
    ) -> None:
        if bundle.images:
            raise DataError(
                f"the bundle {str(bundle.path)!r} is of a step whose prompts had images, which a bundle does not "
                "hold, so that the step cannot be taken again; its numbers are there to be read"
            )
        self.bundle, self.start = bundle, start
        self.then = bundle.config()
        self.notes: list[str] = []
        self.config = on_one_process(bundle.config(overrides), self.then, overrides)
        self.engine = self.config.train.engine
        check_convertible(self.then, start, self.engine)
        narrow = {self.then.model.dtype, self.config.model.dtype} != {"float32"}
        self.tolerance = (TOLERANCE_16_BIT if narrow else TOLERANCE) if tolerance is None else tolerance
        # The state of an optimizer fits the same kind of engine with weights of the same type alone.
        same_engine = self.engine == self.then.train.engine
        self.takes_state = same_engine and self.config.model.dtype == self.then.model.dtype
        self.optimizer_carried = start.kind == "beginning" or (start.kind == "state" and self.takes_state)
        self.order = bundle.order
        trains = (self.then.train, self.config.train)
        plans = [(train.minibatches, train.epochs_per_step) for train in trains]
        if plans[0] != plans[1] or self.then.seed != self.config.seed:
            self.order = None
            self.notes.append("losses and gradients: the minibatches are others, so they are not compared")
        self._check_models()

    def _check_models(self) -> None:
        model = self.config.model
        needed = {"model.path": model.path}
        if self.config.algorithm.recipe.needs_reference:
            needed["model.reference"] = model.reference or model.path
        if self.config.algorithm.recipe.needs_critic and model.critic is not None:
            needed["model.critic"] = model.critic
        if model.teacher is not None:
            needed["model.teacher"] = model.teacher
        needed |= {f"model.teachers.{name}": path for name, path in model.teachers.items()}
        for key, path in needed.items():
            check_model_path(path, what=key)

    def result(self) -> Replay:
        """Run the step and compare."""
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-replay-")))
            config = self._with_models(scratch)
            groups = stack.enter_context(local_roles(config, roles_of(config)))
            if self.start.kind == "state" and self.takes_state:
                self._load(groups, self.start)
            trace, partings, error = self._step(config, groups)
            partings += list(self._weights_after(groups, trace, scratch)) if error is None else []
        return Replay(
            bundle=self.bundle,
            config=self.config,
            weights=self.start.words,
            partings=tuple(partings),
            notes=tuple(self.notes),
            tolerance=self.tolerance,
            error=error,
        )

    def _with_models(self, scratch: Path) -> OnlineConfig:
        """The settings with models that hold the weights to start from, where these are no state of this engine."""
        start = self.start
        if start.kind == "beginning" or (start.kind == "state" and self.takes_state):
            return self.config
        models = start.folders
        if start.kind == "state":
            self.notes.append(
                f"{start.words} was read by the engine {self.then.train.engine} on one process and its models "
                "exported"
            )
            models = export_state(self._then_on_one_process(), models, scratch / "then")
        return starting_from(self.config, models)

    def _load(self, groups: dict[TrainRole, TrainGroup], start: StartingWeights) -> None:
        for role in TRAINED:
            if role in groups and role in start.folders:
                groups[role].load(start.folders[role])
            elif role in groups:
                self.notes.append(f"{role}: {start.words} has none, so it begins anew")

    def _step(
        self, config: OnlineConfig, groups: dict[TrainRole, TrainGroup]
    ) -> tuple[StepTrace, list[Parting], str | None]:
        """Take the step; an error is part of the result where the step ended in one then, too."""
        bundle = self.bundle
        samples = bundle.groups()
        trainer = Trainer(
            policy=groups["policy"],
            critic=groups.get("critic"),
            reference=groups.get("reference"),
            reference_is_policy=config.reference_is_policy,
            teacher=groups.get("teacher"),
            teachers=several_teachers(groups),
            teacher_prompts=teacher_prompts(config),
            scored=config.is_scored,
            recipe=config.recipe,
            kl=config.recipe.kl_controller(),
            plan=plan_of(config),
        )
        trainer.kl.load_state_dict(bundle.kl_state)
        trace = StepTrace(step=bundle.step, groups=samples, order=self._comparable_order())
        trace.pretraining = self._text()
        error = None
        partings = self._beside_the_sampler(trainer, collate_groups(samples))
        try:
            trainer.step(samples, bundle.step - 1, PhaseClock(), trace)
        except Exception as failure:
            if bundle.error is None:
                raise
            error = f"{type(failure).__name__}: {failure}"
        then = bundle.batch()
        if then is None:
            self.notes.append("the step ended before its samples were scored; there is nothing to compare with")
        elif trace.batch is not None:
            partings += part_batches(then, trace.batch.padded(), self.tolerance)
        partings += self._reports(trace)
        return trace, partings, error

    def _text(self) -> RaggedBatch | None:
        """The text of then; None where the settings of now leave it out."""
        text = self.bundle.pretraining()
        if text is None or self.config.data.pretrain:
            return text
        self.notes.append("the text of data.pretrain is left out, as the settings of now say")
        return None

    def _comparable_order(self) -> list[list[int]] | None:
        """The minibatches of then, up to where the optimizer's own state begins to matter."""
        if self.order is None or self.optimizer_carried:
            return self.order
        return self.order[:1]

    def _beside_the_sampler(self, trainer: Trainer, batch: Batch) -> list[Parting]:
        """Where no engine computed the log-probs then, those of now beside the sampler's."""
        batch_then = self.bundle.batch()
        scored = batch_then is None or "old_log_probs" in batch_then
        if scored and "log_probs" in self.then.recipe.old_outputs:
            return []
        now = trainer.policy.score(batch, ("log_probs",)).log_probs
        if now is None:
            return []
        self.notes.append("log_probs: none were kept, so the policy's of now are compared with the sampler's")
        then = batch["rollout_log_probs"]
        return [part_tensors("model outputs", "log_probs", then, now, batch.response_mask, batch, self.tolerance)]

    def _reports(self, trace: StepTrace) -> list[Parting]:
        if self.order is None:
            return []
        found = list(part_reports(self.bundle.reports, trace.reports, self.tolerance))
        if not self.optimizer_carried:
            self.notes.append(
                "the state of the optimizer is not carried over, so the first optimizer step is compared, up to "
                "its gradient"
            )
        if self.then.model.lora is not None and not self.optimizer_carried:
            found = [parting for parting in found if parting.stage != "gradient"]
            self.notes.append(
                "gradient: the adapters are merged into the weights and begin anew, so it is not compared"
            )
        return found

    def _weights_after(
        self, groups: dict[TrainRole, TrainGroup], trace: StepTrace, scratch: Path
    ) -> Iterator[Parting]:
        """The trained weights after the step beside those of the next checkpoint, if there is one."""
        store, step = run_checkpoints(self.bundle), self.bundle.step
        if self.order is None or not self.optimizer_carried:
            return
        if step not in store.steps():
            self.notes.append(f"weights after the step: there is no checkpoint of step {step} to compare them with")
            return
        roles: list[TrainRole] = [role for role in TRAINED if role in groups and (store.path(step) / role).is_dir()]
        for role in roles:
            groups[role].export(scratch / "now" / role)
        if self.takes_state:
            for role in roles:
                groups[role].load(store.path(step) / role)
                groups[role].export(scratch / "next" / role)
        else:
            folders: dict[TrainRole, Path] = {role: store.path(step) / role for role in roles}
            export_state(self._then_on_one_process(), folders, scratch / "next")
        for role in roles:
            yield part_models(role, scratch / "next" / role, scratch / "now" / role, self.tolerance)

    def _then_on_one_process(self) -> OnlineConfig:
        """The run's own settings and engine, as one process can have them."""
        return on_one_process(self.then, self.then, ["train.engine="])


def on_one_process(config: OnlineConfig, then: OnlineConfig, overrides: Sequence[str]) -> OnlineConfig:
    """Settings of a run as one process can have them.

    Args:
        config: the settings, overrides included.
        then: the run's own.
        overrides: what was asked for; the engine is torch unless they name one.
    """
    named = {override.partition("=")[0].strip() for override in overrides}
    engine = config.train.engine_name if "train.engine" in named else "torch"
    train: dict[str, Any] = {"engine": engine, "ranks": 1, "sequence_parallel_size": 1, "average_decay": None}
    if engine != then.train.engine and not any(name.startswith("train.options") for name in named):
        train["options"] = {}
    if engine == "torch":
        train |= {
            name: replace(getattr(config.train, name), kind="adamw") for name in ("optimizer", "critic_optimizer")
        }
    device = config.placement.device
    if device == "auto" or (device == "cuda" and not torch.cuda.is_available()):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.model.dtype if config.model.dtype != "auto" else then.model.dtype
    return replace(
        config,
        model=replace(config.model, dtype=dtype),
        train=replace(config.train, **train),
        rollout=replace(config.rollout, engines=1),
        placement=config.placement.of_one_process(device),
    )
