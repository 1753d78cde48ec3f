"""Offline training: one loop for all methods.

data -> (reference log-probs, once) -> batch -> engine.step(batch, loss) -> evaluation, checkpoint, export
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    ConfigError,
    Mean,
    Metric,
    Ranks,
    RunStopped,
    StepReport,
    StopRequest,
    TrainEngine,
    mean_of,
    merge_metrics,
)

from rlhf_algos.losses.offline.responses import response_log_probs
from rlhf_algos.metrics import MetricsWriter
from rlhf_algos.offline.checkpoints import OfflineState, load_checkpoint, replace_directory, save_checkpoint
from rlhf_algos.offline.config import OfflineConfig
from rlhf_algos.offline.engine_source import EngineFactory, tokens_of_steps
from rlhf_algos.offline.order import batch_indices, steps_per_epoch
from rlhf_algos.offline.run_data import (
    OfflineData,
    add_reference,
    add_teacher,
    global_batch,
    load_data,
    own_units,
)
from rlhf_algos.offline.score_scale import keep_scale, scale_of_scores
from rlhf_algos.run_directory.checkpoints import Checkpoint, CheckpointStore
from rlhf_algos.run_directory.directory import Say, Start, open_run_directory
from rlhf_algos.run_directory.fingerprint import run_fingerprint
from rlhf_algos.run_directory.paths import with_absolute_paths
from rlhf_algos.run_directory.restarts import with_restarts
from rlhf_algos.run_directory.schedule import CheckpointSchedule
from rlhf_algos.run_directory.writing import naming_full_disk
from rlhf_algos.torch_engine.ranks import join_ranks, rank_of

_log = logging.getLogger(__name__)

_STOP = 2
"""What ranks agree on after a step: nothing (0), a checkpoint (1), or a checkpoint and the end."""

OfflineEvent = Callable[[str, int, Mapping[str, float]], None]
"""Told of progress as (`plan`, `train` or `eval`; step; numbers). `plan` comes first, with the total of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run left behind."""

    model: Path
    """Transformers directory of the final model, tokenizer included."""
    steps: int
    """Optimizer steps taken, those before a resume included."""
    metrics: Mapping[str, float]
    """Last evaluation, or last step if there was no eval set."""
    best: Path | None = None
    """Transformers directory of the best model by the chosen eval metric."""
    stopped_early: bool = False


def train(
    config: OfflineConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OfflineEvent | None = None,
    engines: EngineFactory | None = None,
    say: Say = _log.warning,
    stop: StopRequest | None = None,
) -> TrainResult:
    """Run the whole training that `config` describes.

    Args:
        config: the run.
        resume: continue the run in `config.output` from its last complete checkpoint, bit for bit.
        overwrite: move the run in `config.output` aside, and begin anew.
        on_event: told of progress.
        engines: opens the engines, any `rlhf_core.TrainEngine`; None for `TorchEngine` in this process. A teacher
            (`distill`) always runs in this process.
        say: told in words what a resumed run has otherwise than before, and what was damaged or left behind.
        stop: by which another thread may ask the run to end in good order. Ctrl-C, SIGTERM and SIGUSR1 ask, too,
            where the run has the main thread; a second Ctrl-C or SIGTERM ends it at once.

    Raises:
        RunStopped: the run was asked to end, and did so with a checkpoint of what it had learnt.
        UserError: something in the configuration or the data; before any model is loaded.
        ResourceError: the disk is full, or the output cannot be written.
        TrainingDivergedError: too many steps in a row were not finite.
    """
    start = Start(resume=resume, overwrite=overwrite)
    stop = stop or StopRequest()
    with naming_full_disk(config.output), stop.on_signals(say):
        return _train(with_absolute_paths(config), start, on_event, engines, say, stop)


def _train(
    config: OfflineConfig,
    start: Start,
    on_event: OfflineEvent | None,
    engines: EngineFactory | None,
    say: Say,
    stop: StopRequest,
) -> TrainResult:
    if engines is None:
        _check_one_process(config)
        engines = EngineFactory()
    if int(os.environ.get("RANK", "0")) == 0:
        start.check(config.output)
    data = load_data(config)
    ranks = join_ranks(torch.device(config.device))
    processes = ranks.size * engines.ranks
    if min(config.train.batch_size, len(data.train)) < processes:
        raise ConfigError(
            f"train.batch_size {config.train.batch_size} or the {len(data.train)} examples are fewer than the "
            f"{processes} "
            "processes; every one needs an example"
        )
    store = CheckpointStore(config.output / "checkpoints", keep=config.checkpoint.keep, say=say)
    with ExitStack() as stack:
        resumed = None
        if rank_of(ranks) == 0:
            fingerprint = _fingerprint(config, data, processes)
            directory = stack.enter_context(open_run_directory(config, fingerprint, store, start, say=say))
            resumed = directory.resumed

        def attempt(begin: Checkpoint | None) -> TrainResult:
            step = ranks.max(-1 if begin is None else begin.step)  # the first rank knows
            return _attempt(parts, None if step < 0 else step)

        parts = _Parts(
            config=config,
            data=data,
            engines=engines,
            ranks=ranks,
            store=store,
            on_event=on_event,
            stop=stop,
            say=say,
        )
        return with_restarts(attempt, resumed, store, limit=config.placement.restarts, stop=stop, say=say)


def _attempt(parts: _Parts, resumed: int | None) -> TrainResult:
    """The run on engines of its own, from a checkpoint's step or from the start, to its end."""
    config, data, ranks, engines = parts.config, parts.data, parts.ranks, parts.engines
    total = _total_steps(config, len(data.train))
    with ExitStack() as stack:
        if config.method.needs_reference(config.loss):
            data = add_reference(data, config, ranks, engines)
        if config.method.teacher(config.loss) is not None:
            data = add_teacher(data, config, ranks)
        engine = engines.start(config.engine(total, images=data.has_images))
        stack.callback(engine.close)
        state = OfflineState() if resumed is None else load_checkpoint(parts.store, resumed, engine)
        run = _Run(
            config=config,
            data=data,
            engine=engine,
            ranks=ranks,
            processes=ranks.size * engines.ranks,
            state=state,
            store=parts.store,
            schedule=CheckpointSchedule(every=config.checkpoint.every, minutes=config.checkpoint.minutes),
            on_event=parts.on_event,
            stop=parts.stop,
            say=parts.say,
        )
        metrics = stack.enter_context(
            MetricsWriter(
                config.output if rank_of(ranks) == 0 else config.output / f"rank-{rank_of(ranks)}",
                resume_step=state.step if state.step else None,
                tensorboard=config.tensorboard and rank_of(ranks) == 0,
            )
        )
        return _loop(run, metrics, total)


def _fingerprint(config: OfflineConfig, data: OfflineData, processes: int) -> dict[str, Any]:
    """What a resumed run must have in common with the one it continues, besides its settings."""
    model = config.model
    models = {
        "model.path": model.path,
        "model.reference": model.reference,
        "algorithm.teacher": config.method.teacher(config.loss),
    }
    made = run_fingerprint(
        data=config.data.train, tokenizer=data.encoder.tokenizer, models=models, seed=config.seed
    )
    digests = "".join(images.digest for _, images in data.shown)
    images = {"images": hashlib.sha256(digests.encode()).hexdigest()} if digests else {}
    return {**made, **images, "processes": processes}


def _check_one_process(config: OfflineConfig) -> None:
    """Refuse what needs workers, which this process does not start.

    Raises:
        ConfigError: several ranks, another engine, or Ray.
    """
    placement, train = config.placement, config.train
    asked = {
        f"train.ranks={train.ranks}": train.ranks > 1,
        f"train.engine={train.engine}": train.engine not in ("auto", "torch"),
        "placement.executor=ray": placement.executor == "ray",
        f"placement.restarts={placement.restarts}": placement.restarts > 0,
        f"placement.ray_address={placement.ray_address}": placement.ray_address is not None,
    }
    if found := [key for key, there in asked.items() if there]:
        raise ConfigError(
            f"{', '.join(found)}: `rlhf-algos` trains in this process (or in those of torchrun) with plain torch; "
            f"run the same file as `rlhf offline {config.algorithm.name}`, which places workers"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What stays from one attempt of a run to the next."""

    config: OfflineConfig
    data: OfflineData
    engines: EngineFactory
    ranks: Ranks
    store: CheckpointStore
    on_event: OfflineEvent | None
    stop: StopRequest
    say: Say


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    config: OfflineConfig
    data: OfflineData
    engine: TrainEngine
    ranks: Ranks
    processes: int
    """Everywhere, those of `ranks` times those behind the engine."""
    state: OfflineState
    store: CheckpointStore
    schedule: CheckpointSchedule
    on_event: OfflineEvent | None
    stop: StopRequest
    say: Say

    def tell(self, kind: str, values: Mapping[str, float]) -> None:
        if self.on_event is not None and rank_of(self.ranks) == 0:
            self.on_event(kind, self.state.step, values)


def _total_steps(config: OfflineConfig, examples: int) -> int:
    total = steps_per_epoch(examples, config.train.batch_size) * config.train.epochs
    return total if config.train.steps is None else min(total, config.train.steps)


def _loop(run: _Run, metrics: MetricsWriter, total: int) -> TrainResult:
    config, state = run.config, run.state
    reports = run.data.reports.values()
    counts = {name: sum(getattr(r, name) for r in reports) for name in ("examples", "truncated", "dropped")}
    run.tell("plan", {"total": total, **counts})
    values: Mapping[str, float] = {}
    first = state.step
    while state.step < total and not state.stopped_early:
        values = _train_step(run)
        if state.step == first + 1 and rank_of(run.ranks) == 0 and (fitted := tokens_of_steps(run.engine)):
            run.say(str(fitted))
        run.tell("train", values)
        every = config.evaluation.every
        due = bool(run.data.eval) and (state.step == total or bool(every and state.step % every == 0))
        if due:
            evaluated = evaluate(run.engine, run.data, config, run.ranks)
            _judge(run, evaluated)
            values = {**values, **{f"eval/{name}": value for name, value in evaluated.items()}}
            run.tell("eval", evaluated)
        metrics.write(state.step, values)
        # Clocks and signals differ between ranks: they save, and stop, together, as soon as one of them is to.
        wanted = run.ranks.max(_STOP if run.stop.reason is not None else int(run.schedule.due(state.step)))
        if wanted:
            run.schedule.saved()
            save_checkpoint(run.store, run.engine, state, ranks=run.ranks)
        if wanted == _STOP:
            _stop(run, total)
    model = config.output / "model"
    _export(run, model)
    best = config.output / "best"
    return TrainResult(
        model=model,
        steps=state.step,
        metrics=values,
        best=best if state.best is not None else None,
        stopped_early=state.stopped_early,
    )


def _stop(run: _Run, total: int) -> None:
    """End the run here, at its newest checkpoint.

    Raises:
        RunStopped: always.
    """
    run.stop.ask("another process of the run was asked to end")
    try:
        run.stop.check()
    except RunStopped as stopped:
        stopped.add_note(
            f"the newest checkpoint is that of step {run.state.step} of {total}; --resume continues from it"
        )
        raise


def _train_step(run: _Run) -> dict[str, float]:
    config, state = run.config, run.state
    per_epoch = steps_per_epoch(len(run.data.train), config.train.batch_size)
    epoch, step = divmod(state.step, per_epoch)
    indices = batch_indices(run.data.order(config, epoch), step=step, batch_size=config.train.batch_size)
    # A last batch smaller than the number of processes takes examples of the epoch's start, so that all have one.
    while len(indices) < run.processes:
        indices.append(run.data.order(config, epoch)[len(indices)])
    batch = global_batch([run.data.train[i] for i in indices], run.data, config, run.engine, run.ranks)
    own = batch.select_units(own_units(batch, run.ranks))
    report = run.engine.step(own, config.method.loss(config.loss))
    state.step += 1
    return _values(report) | {"epoch": state.step / per_epoch}


def _values(report: StepReport) -> dict[str, float]:
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "tokens": float(report.tokens),
        "skipped": float(report.skipped),
        **report.metrics,
    }


def evaluate(engine: TrainEngine, data: OfflineData, config: OfflineConfig, ranks: Ranks) -> dict[str, float]:
    """Loss and metrics over the whole eval set, dropout off; the same on all ranks.

    Where there is a reference, `kl` is the mean over answers of log(reference / policy), in nats: an estimate of
    KL(reference || policy) on the answers of the data.
    """
    loss = config.method.loss(config.loss)
    parts: list[Mapping[str, Metric]] = []
    size = config.evaluation.batch_size
    for start in range(0, len(data.eval), size):
        batch = global_batch(data.eval[start : start + size], data, config, engine, ranks)
        mine = own_units(batch, ranks)
        own = batch.select_units(mine or [0])
        outputs = engine.score(own, loss.outputs)
        terms = loss(outputs, own)
        if mine:
            metrics = {**terms.metrics, "loss": Mean(total=float(terms.total), weight=float(terms.weight))}
            if outputs.log_probs is not None and "ref_log_probs_sum" in own:
                metrics["kl"] = mean_of(own["ref_log_probs_sum"] - response_log_probs(outputs, own))
            parts.append(metrics)
    merged = merge_metrics(ranks.gather(merge_metrics(parts)))  # type: ignore[arg-type]
    return {name: mean.value for name, mean in merged.items()}


def _judge(run: _Run, evaluated: Mapping[str, float]) -> None:
    """Keep the best model so far, and count evaluations without improvement."""
    settings, state = run.config.evaluation, run.state
    name = settings.best_metric or run.config.method.best_metric
    if name not in evaluated:
        raise ConfigError(
            f"evaluation.best_metric {name!r} is not among the eval metrics: {', '.join(sorted(evaluated))}"
        )
    sign = settings.better_sign(name)
    value = evaluated[name]
    if math.isfinite(value) and (state.best is None or sign * value > sign * state.best):
        state.best, state.best_step, state.evaluations_without_gain = value, state.step, 0
        _export(run, run.config.output / "best")
        return
    state.evaluations_without_gain += 1
    if settings.patience and state.evaluations_without_gain >= settings.patience:
        state.stopped_early = True


def _export(run: _Run, path: Path) -> None:
    scale = None
    if getattr(run.config.loss, "keep_scale", False):
        scale = scale_of_scores(run.engine, run.data, run.config, run.ranks)

    def write(beside: Path) -> None:
        run.engine.export(beside)
        if rank_of(run.ranks) == 0:
            encoder = run.data.encoder
            (encoder.processor or encoder.tokenizer).save_pretrained(beside)
            _name_padding(beside / "config.json", run.data.encoder.pad_token_id)
            if scale is not None:
                keep_scale(beside / "config.json", scale)

    replace_directory(path, write, ranks=run.ranks)


def _name_padding(file: Path, pad_token_id: int) -> None:
    """Transformers' sequence classifiers find a row's last token by the padding token of the model's config."""
    settings = json.loads(file.read_text())
    if settings.get("pad_token_id") is None:
        file.write_text(json.dumps({**settings, "pad_token_id": pad_token_id}, indent=2) + "\n")
