"""A whole online run: from a configuration to the exported model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rlhf_algos import (
    Checkpoint,
    CheckpointStore,
    Recipe,
    Start,
    data_fingerprint,
    naming_full_disk,
    open_run_directory,
    processor_of,
    read_metrics,
    replaced_folder,
    run_fingerprint,
    with_restarts,
)
from rlhf_core import StopRequest

from rlhf_launch.config.paths import absolute
from rlhf_launch.config.rollout import Overlap
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.evaluation import Evaluation
from rlhf_launch.online.loop import OnlineRun, OnStep, evaluate, restore, run_steps, save_early_end
from rlhf_launch.online.preflight import Inputs, check_inputs
from rlhf_launch.online.report import Reporter, plot_run
from rlhf_launch.online.setup import measure_rewards, open_run
from rlhf_launch.placement.fill import filled_here
from rlhf_launch.planning.command import say_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run has left."""

    steps: int
    """Completed steps, those before a resume included."""
    folder: Path
    """`config.yaml`, `metrics.jsonl`, `samples.jsonl`, `plot.png`, checkpoints, models."""
    model: Path
    """The trained policy, a Transformers directory."""
    best: Path | None
    """The best checkpoint, if one was looked for and found."""
    metrics: Mapping[str, float]
    """The newest value of every metric."""
    evaluations: Sequence[Evaluation]
    """In the order in which they were made; the newest of each set has examples."""
    seconds: Mapping[str, float]
    """Seconds of each phase, over all steps since the run was begun or resumed, or began again."""


def train(
    config: OnlineConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Improve a policy by reinforcement learning: a whole run, from the checks to the exported model.

    Leaves `config.yaml`, `run.json`, `metrics.jsonl`, `samples.jsonl` (what became of every prompt), TensorBoard
    files, `plot.png`, `checkpoints/` and `model/` (and `model-average/`, where the engine averages the weights) in
    the run's output directory. May be called under a running event loop, as in a notebook; it blocks until the run
    is over. With `placement.restarts` the run begins again from its newest checkpoint after it has lost a worker,
    or a wait has seen no progress.

    Args:
        config: the whole run.
        resume: continue the run in the output directory from its newest complete checkpoint.
        overwrite: move the run in the output directory aside, and begin anew.
        on_step: called after every step; may end the run (see `OnStep`).
        console: where progress is shown; standard output if not given.
        stop: by which another thread may ask the run to end in good order. Ctrl-C, SIGTERM and SIGUSR1 ask, too,
            where the run has the main thread; a second Ctrl-C or SIGTERM ends it at once.

    Raises:
        RunStopped: the run was asked to end, and did so with a checkpoint of what it had learnt.
        UserError: the input is at fault; nothing heavy was started.
        ResourceError: the disk is full, or the output cannot be written.
        RLHFError: something failed while running; the newest checkpoint is complete.
    """
    start = Start(resume=resume, overwrite=overwrite)
    with naming_full_disk(config.output):
        console, stop = console or Console(highlight=False), stop or StopRequest()
        with stop.on_signals(lambda line: console.print(line, soft_wrap=True)):
            return _train(absolute(config), start, on_step, console, stop)


def _train(
    config: OnlineConfig, start: Start, on_step: OnStep | None, console: Console, stop: StopRequest
) -> RunResult:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    start.check(config.output)
    config, layout = filled_here(config)
    if layout is not None:
        say(f"  {layout}")
    inputs, store = check_inputs(config), checkpoint_store(config, say=say)
    _describe(config, inputs, console)
    say_plan(config, inputs.backends, lambda line: say(f"  {line}"))
    checked = [inputs]

    def attempt(begin: Checkpoint | None) -> RunResult:
        # A run closes its reward; the next attempt makes it anew.
        found = checked.pop() if checked else check_inputs(config)
        return _attempt(config, found, store, begin, _Guests(on_step=on_step, console=console, stop=stop))

    with open_run_directory(config, _fingerprint(config, inputs), store, start, say=say) as directory:
        limit = config.placement.restarts
        result = with_restarts(attempt, directory.resumed, store, limit=limit, stop=stop, say=say)
    plot_run(config.output / "metrics.jsonl", config.output / "plot.png")
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guests:
    """What the caller of a run has brought."""

    on_step: OnStep | None
    console: Console
    stop: StopRequest


def _attempt(
    config: OnlineConfig, inputs: Inputs, store: CheckpointStore, begin: Checkpoint | None, guests: _Guests
) -> RunResult:
    """The run on workers of its own, from a checkpoint or from the start, to the exported model."""
    folder, step = config.output, 0 if begin is None else begin.step
    with ExitStack() as stack:
        written = Reporter(
            folder,
            steps=config.train.steps,
            start=step,
            tensorboard=config.tensorboard,
            console=guests.console,
        )
        reporter = stack.enter_context(written)
        with guests.stop.interruptible():
            run = stack.enter_context(open_run(config, inputs, store, reporter, guests.stop))
            if begin is not None:
                restore(run, begin)
        measure_rewards(config, inputs, run)
        with _saved_on_early_end(run):
            if not step or is_evaluation_due(config, step):
                evaluate(run, done=sets_evaluated(folder, step) if step else ())
            run_steps(run, guests.on_step)
        if config.train.average_decay is not None:
            with replaced_folder(folder / "model-average") as average:
                run.trainer.policy.export_average(average)
        with replaced_folder(folder / "model") as model:
            run.trainer.policy.export(model)
            section = config.model
            # A vision-language model's processor holds its tokenizer.
            processor = processor_of(section.path, inputs.tokenizer, trust_remote_code=section.trust_remote_code)
            (processor or inputs.tokenizer).save_pretrained(model)
    return RunResult(
        steps=run.state.step,
        folder=folder,
        model=folder / "model",
        best=store.best_path(),
        metrics=dict(reporter.latest),
        evaluations=tuple(reporter.evaluations),
        seconds=dict(reporter.totals),
    )


@contextmanager
def _saved_on_early_end(run: OnlineRun) -> Iterator[None]:
    """Whatever ends the block early, what was learnt is saved where that is possible, and the error says where."""
    try:
        yield
    except Exception as error:
        try:
            save_early_end(run)
        except Exception as failure:  # of whatever kind: what ended the run is what it is about
            error.add_note(f"the state after step {run.state.step} could not be saved: {failure}")
        steps, newest = run.schedule.steps, run.state.newest
        if newest:
            error.add_note(f"the newest checkpoint is that of step {newest} of {steps}; --resume continues from it")
        else:
            error.add_note("there is no checkpoint to continue from: no step was complete")
        raise


def is_evaluation_due(config: OnlineConfig, step: int) -> bool:
    """Whether an evaluation belongs to the end of this step."""
    every = config.evaluation.every
    return step >= config.train.steps or bool(every and step % every == 0)


def sets_evaluated(folder: Path, step: int) -> set[str]:
    """The held-out sets whose evaluation after `step` steps is among the metrics: a run may end between two."""
    rows = read_metrics(folder / "metrics.jsonl")
    names = [name for row in rows if row["step"] == step for name in row if name.startswith("eval/")]
    return {name.removeprefix("eval/").partition("/")[0] for name in names}


def checkpoint_store(config: OnlineConfig, *, say: Callable[[str], None]) -> CheckpointStore:
    """The checkpoints of a run, which keep its best one if it names a metric."""
    metric = config.evaluation.best_metric
    best = "max" if metric is None or config.evaluation.better_sign(metric) > 0 else "min"
    return CheckpointStore(config.output / "checkpoints", keep=config.checkpoint.keep, best=best, say=say)


def _fingerprint(config: OnlineConfig, inputs: Inputs) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was begun, besides its settings."""
    model = config.model
    models = {"model.path": model.path, "model.reference": model.reference, "model.critic": model.critic}
    models["model.teacher"] = model.teacher
    models |= {f"model.teachers.{name}": path for name, path in model.teachers.items()}
    judges = {f"reward {name}": part.path for name, part in config.reward.engine_parts().items()}
    pretrain = {f"data.pretrain[{place}]": data_fingerprint(one) for place, one in enumerate(config.data.pretrain)}
    return pretrain | run_fingerprint(
        data=config.data.train, tokenizer=inputs.tokenizer, models={**models, **judges}, seed=config.seed
    )


def _describe(config: OnlineConfig, inputs: Inputs, console: Console) -> None:
    """Say which parts, data and mode the run has."""
    for reason in inputs.backends.reasons:
        console.print(f"  {reason}")
    console.print(f"  reward: {inputs.reward.summary}", soft_wrap=True)
    dropped = f" ({inputs.dropped} overlong ones dropped)" if inputs.dropped else ""
    sizes = [f"{name} {len(held_out.prompts)}" for name, held_out in inputs.held_out.items()]
    console.print(f"  data: {len(inputs.prompts.prompts)} prompts{dropped}, held out: {', '.join(sizes) or 'none'}")
    if inputs.pretraining is not None:
        console.print(f"  text beside the samples: {inputs.pretraining}", soft_wrap=True)
    for warning in config.warnings:
        console.print(f"  warning: {warning}", soft_wrap=True)
    if config.rollout.overlap is not None:
        console.print(f"  overlap: {_described(config.recipe, config.rollout.overlap)}")


def _described(recipe: Recipe, overlap: Overlap) -> str:
    mode = "partial rollouts" if overlap.pause_while_training else "asynchronous"
    corrections = ", ".join(f"{c.level} {c.mode}" for c in getattr(recipe, "off_policy", ())) or "none"
    return f"{mode}, at most {overlap.max_staleness} version(s) behind; off-policy correction: {corrections}"
