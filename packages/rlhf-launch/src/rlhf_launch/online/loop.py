"""The online loop: sample, score, estimate advantages, train, send the new weights, again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rlhf_algos import Checkpoint
from rlhf_core import ConfigError, RLHFError, StopRequest, did_you_mean

from rlhf_launch.bundles.keep import BundleKeeper, kept_step
from rlhf_launch.online.evaluation import Evaluator
from rlhf_launch.online.metrics import PhaseClock
from rlhf_launch.online.remarks import Remarks
from rlhf_launch.online.report import Reporter
from rlhf_launch.online.state import RunState
from rlhf_launch.online.trainer import Trainer
from rlhf_launch.samples.groups import MakeGroups
from rlhf_launch.samples.producer import Producer
from rlhf_launch.samples.prompts import PromptStream
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.rollout_pool import RolloutPool

OnStep = Callable[[int, Mapping[str, float]], bool | None]
"""Called after every step with the number of completed steps and the step's metrics.

False ends the run in good order, as if this step were its last: it is evaluated, saved and exported, and can be
resumed. An exception ends it at once and reaches the caller; the newest checkpoint is complete.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How many steps a run has, and what happens every so many of them."""

    steps: int
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the start and at the end only."""
    best_metric: str | None = None
    """The metric whose best checkpoint is kept beside the newest ones."""
    overlapping: bool = False
    """Whether generation overlaps training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun:
    """The parts of a run, up and connected."""

    schedule: Schedule
    trainer: Trainer
    producer: Producer
    pool: RolloutPool
    sync: WeightSync
    replacement: RolloutReplacement
    evaluator: Evaluator
    reporter: Reporter
    state: RunState
    stop: StopRequest
    """Whether the run was asked to end."""
    prompts: PromptStream
    """The stream that the producer draws from."""
    make_groups: MakeGroups
    """Gives what makes scored groups beside the training stream, with other settings of sampling."""
    bundles: BundleKeeper | None = None
    """Keeps steps for replays."""


def run_steps(run: OnlineRun, on_step: OnStep | None = None) -> None:
    """Run the steps that are left.

    Raises:
        RunStopped: the run was asked to end.
    """
    remarks = Remarks()
    for step in range(run.state.step, run.schedule.steps):
        run.stop.check()
        clock = PhaseClock(run.pool.waits.clock.now)
        _take_idle_seconds(run)  # what was between the steps counts for none
        with run.pool.generating():
            groups, waited = run.producer.collect()
        clock.add(waited.seconds)
        if run.pool.lost:
            with clock("replacement"):
                run.replacement()
        with run.replacement.suspended():
            run.producer.pause()
            with kept_step(run.bundles, step + 1, groups) as trace, run.state.changing():
                batch, metrics = run.trainer.step(groups, step, clock, trace)
                run.state.step = step + 1
            metrics |= waited.counts
            try:
                with clock("sync"):
                    sync = run.replacement.sync(step + 1)
                run.producer.resume(step + 1)
            except RLHFError:
                run.reporter.step(step + 1, metrics, waited.prompts)  # the step counts, and may be saved
                raise
        metrics |= clock.metrics(batch, overlapping=run.schedule.overlapping)
        metrics |= _take_idle_seconds(run)
        metrics |= sync.metrics
        metrics |= run.state.scales.metrics
        run.reporter.step(step + 1, metrics, waited.prompts)
        for line in run.state.fitted.news():
            run.reporter.say(line)
        for remark in remarks.new(metrics, passes=run.prompts.passes):
            run.reporter.say(remark)
        check_best_metric(run.schedule.best_metric, run.reporter.latest)
        stop = on_step is not None and on_step(step + 1, metrics) is False
        finish_step(run, last=stop or step + 1 == run.schedule.steps)
        if stop:
            return


def _take_idle_seconds(run: OnlineRun) -> dict[str, float]:
    """Seconds since the last call in which each role had nothing to do; of rollout engines, the mean."""
    idle = {**run.trainer.take_idle_seconds(), "rollout": run.pool.take_idle_seconds()}
    return {f"idle_seconds/{role}": seconds for role, seconds in idle.items()}


def check_best_metric(name: str | None, latest: Mapping[str, float]) -> None:
    """Refuse a best metric that the run does not have, after its first step rather than at its first checkpoint.

    Raises:
        ConfigError: names the nearest metric that there is. Those of evaluations come later and are not looked for.
    """
    if name is not None and not name.startswith("eval/") and name not in latest:
        raise ConfigError(
            f"evaluation.best_metric={name!r} is none of the run's metrics; {did_you_mean(name, latest)}there are "
            f"{', '.join(sorted(latest))}"
        )


def finish_step(run: OnlineRun, *, last: bool) -> None:
    """Save and evaluate the run, if that is due after this step.

    What is due is saved before it is evaluated: a reward that fails in an evaluation costs no trained step.
    """
    step, schedule = run.state.step, run.schedule
    saved = last or run.state.schedule.due(step)
    if saved:
        with run.replacement.suspended():
            _save(run)
    try:
        if last or _due(step, schedule.evaluate_every):
            evaluate(run)
    except BaseException:
        with run.replacement.suspended():
            run.state.publish(wait=True)
        raise
    score = _best_score(run)
    with run.replacement.suspended():
        if _worth_keeping(run, score, saved=saved):
            _save(run)
        run.state.rate(score)
        run.state.publish(wait=last)


def evaluate(run: OnlineRun, *, done: Collection[str] = ()) -> None:
    """Evaluate every held-out set and report it, but for those that are `done`.

    Raises:
        RunStopped: the run was asked to end.
    """
    evaluations = run.evaluator(run.state.step, done=done)
    while True:
        with run.stop.interruptible(), run.pool.generating():
            evaluation = next(evaluations, None)
        if evaluation is None:
            return
        run.reporter.evaluation(evaluation)


def save_early_end(run: OnlineRun) -> None:
    """Save a run that ends before its last step, if its state is whole and no checkpoint has it yet.

    Raises:
        RLHFError: a rank cannot save.
    """
    state, newest = run.state, run.state.newest
    if not state.whole or state.step == 0 or (state.step == newest and not run.schedule.overlapping):
        return
    for engine in run.trainer.trained:
        engine.check_answering()
    with run.replacement.suspended():
        _save(run)
        state.publish(wait=True)


def restore(run: OnlineRun, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint: engines, ledger, controllers, and the weights of the rollout engines."""
    run.sync(run.state.restore(checkpoint))


def _save(run: OnlineRun) -> None:
    """Begin a checkpoint; the rows of its steps are on the disk before it."""
    run.reporter.flush_to_disk()
    run.state.save()


def _best_score(run: OnlineRun) -> float | None:
    """The metric by which the best checkpoint is found, if it was measured at this step: never an older one."""
    name = run.schedule.best_metric
    return None if name is None else run.reporter.measured(name, run.state.step)


def _worth_keeping(run: OnlineRun, score: float | None, *, saved: bool) -> bool:
    """Whether an evaluation found better weights than any checkpoint has, at a step that was not saved."""
    evaluated = (run.schedule.best_metric or "").startswith("eval/")
    return evaluated and not saved and score is not None and run.state.store.improves(score)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
