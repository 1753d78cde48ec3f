"""From a configuration to a finished run: place the workers, connect them, run the loop, leave the results."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rlhf_algos import dump_config
from rlhf_core import ConfigError

from rlhf_launch.config.rollout import Overlap
from rlhf_launch.config.run import RunConfig
from rlhf_launch.online.checkpoints import CheckpointStore
from rlhf_launch.online.loop import OnlineRun, Roles, report_evaluations, train
from rlhf_launch.online.preflight import Inputs, check_inputs
from rlhf_launch.online.report import Reporter, plot_run
from rlhf_launch.online.state import RunState
from rlhf_launch.placement.plans import (
    Executor,
    open_executor,
    reward_plans,
    roles_of,
    rollout_plans,
    training_plans,
)
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.producer import During, Producer, ProducerConfig
from rlhf_launch.samples.prompts import PromptStream
from rlhf_launch.samples.reward import Rewarder, open_reward
from rlhf_launch.samples.sample import group_sampler
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.handles import Handle
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup


def run_online(config: RunConfig, *, resume: bool = False, console: Console | None = None) -> OnlineRun:
    """A whole run: checks, training, evaluation before and after, export, plot. Returns the finished run.

    Leaves `config.yaml`, `metrics.jsonl`, TensorBoard files, `plot.png`, `checkpoints/` and `model/` (and
    `model-average/`, where the engine averages the weights) in `config.output_dir`.

    Raises:
        UserError: the input is at fault; nothing heavy was started.
        RLHFError: something failed while running; the newest checkpoint is complete.
    """
    console = console or Console(highlight=False)
    inputs = check_inputs(config)
    folder = Path(config.output_dir)
    store = CheckpointStore(folder / "checkpoints", keep=config.keep_checkpoints, best=config.best_is)
    start = store.latest()[1]["step"] if resume else 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    for reason in inputs.components.reasons:
        console.print(f"  {reason}")
    console.print(f"  reward: {inputs.reward.summary}", soft_wrap=True)
    dropped = f" ({inputs.dropped} overlong ones dropped)" if inputs.dropped else ""
    console.print(f"  data: {len(inputs.prompts)} prompts{dropped}, {_held_out(inputs)}")
    if config.rollout.overlap is not None:
        console.print(f"  overlap: {_described(config, config.rollout.overlap)}")
    with ExitStack() as stack:
        reporter = stack.enter_context(
            Reporter(folder, steps=config.steps, start=start, tensorboard=config.tensorboard, console=console)
        )
        run = stack.enter_context(open_run(config, inputs, store, reporter))
        if resume:
            run.state.restore(run)
            reporter.say(f"resumed after step {run.state.step}")
        report_evaluations(run)
        train(run)
        run.roles.policy.export(folder / "model")
        if config.train.average_decay is not None:
            run.roles.policy.export_average(folder / "model-average")
        inputs.tokenizer.save_pretrained(folder / "model")
    plot_run(folder / "metrics.jsonl", folder / "plot.png")
    return run


@contextmanager
def open_run(config: RunConfig, inputs: Inputs, store: CheckpointStore, reporter: Reporter) -> Iterator[OnlineRun]:
    """Place and connect all workers; they are closed when the block ends, however it ends."""
    with ExitStack() as stack:
        begin = time.perf_counter()
        stack.callback(inputs.reward.close)
        executor = open_executor(config, inputs.components)
        stack.callback(executor.close)
        roles = _place_roles(config, inputs, executor, stack, reporter)
        reporter.say(f"  all up after {time.perf_counter() - begin:.1f} s")
        # What is there now stays: the collector need not look through it again with every request in flight.
        gc.freeze()
        prompts = PromptStream(inputs.prompts, seed=config.seed, shuffle=config.data.shuffle)
        producer = open_producer(config, prompts, roles.pool, roles.rewarder)
        stack.callback(producer.close)
        yield OnlineRun(
            config=config,
            recipe=config.recipe,
            roles=roles,
            prompts=prompts,
            producer=producer,
            held_out=inputs.held_out,
            kl=config.recipe.kl_controller(),
            reporter=reporter,
            state=RunState(store),
        )


def _place_roles(
    config: RunConfig, inputs: Inputs, executor: Executor, stack: ExitStack, reporter: Reporter
) -> Roles:
    """One placement for all workers; training and rollout engines start at the same time."""
    judges = reward_plans(config, inputs.components)
    plans = {role: training_plans(config, inputs.components, role) for role in roles_of(config)}
    plans |= {f"reward {name}": judge for name, judge in judges.items()}
    engines = rollout_plans(config, inputs.components, adapter_rank=config.adapter_rank)
    handles: list[Handle] = list(
        executor.place([*(plan for plans_ in plans.values() for plan in plans_), *engines])
    )
    for handle in handles[: -len(engines)]:
        stack.callback(handle.close)
    timeout_s = config.placement.timeout_s
    groups: dict[str, TrainGroup] = {}
    for role, role_plans in plans.items():
        groups[role] = TrainGroup(role, handles[: len(role_plans)], timeout_s=timeout_s)
        handles = handles[len(role_plans) :]
    pool = RolloutPool(handles, timeout_s=timeout_s)
    stack.callback(pool.close)
    if inputs.components.executor != "local":
        # In processes of their own; within one process, DeepSpeed must have made torch's process group before vLLM.
        pool.begin()
    for role, group in groups.items():
        reporter.say(f"  {role}: {group.ranks} rank(s) of {inputs.components.engine}, {group.start():.1f} s")
    reporter.say(f"  rollout: {pool.engines} engine(s) of {inputs.components.backend}, {pool.start():.1f} s")
    sync = WeightSync(
        groups["policy"], pool, transports=executor.transports, timeout_s=timeout_s, options=config.weight_sync
    )
    reporter.say(f"  weights travel by {sync.transport}")
    reward, close = open_reward(
        inputs.reward, {name: groups[f"reward {name}"] for name in judges}, inputs.tokenizer
    )
    stack.callback(close)
    limit = config.placement.max_restarts
    replacement = RolloutReplacement(executor, pool, sync, limit=limit, timeout_s=timeout_s)
    pool.replace_with(replacement)
    stack.callback(replacement.stop)
    return Roles(
        policy=groups["policy"],
        critic=groups.get("critic"),
        reference=groups.get("reference"),
        pool=pool,
        sync=sync,
        replacement=replacement,
        rewarder=Rewarder(reward, inputs.tokenizer),
    )


def open_producer(config: RunConfig, prompts: PromptStream, pool: RolloutPool, rewarder: Rewarder) -> Producer:
    """The producer of a run, in the mode that `rollout.overlap` names."""
    rollout, per_step = config.rollout, config.train.prompts_per_step
    overlap, dynamic = rollout.overlap, rollout.dynamic_sampling
    limits = LedgerLimits(
        per_step=per_step,
        steps=config.steps,
        max_staleness=overlap.max_staleness if overlap is not None else 0,
        max_in_flight=overlap.max_in_flight if overlap is not None else 0,
        max_misses=dynamic.max_rounds * per_step if dynamic is not None else 0,
    )
    during: During = "rest"
    if overlap is not None:
        if overlap.pause_while_training and pool.pause_mode is None:
            raise ConfigError(
                "rollout.overlap: pause_while_training=true needs a rollout backend that can pause; leave it out "
                "to let generation go on"
            )
        during = "pause" if overlap.pause_while_training else "run"
    return Producer(
        group_sampler(
            pool,
            rollout.sampling,
            rollout.agent,
            rewarder.tokenizer,
            max_tokens=config.max_length,
            seed=config.seed,
        ),
        rewarder,
        prompts,
        Ledger(limits),
        pool,
        ProducerConfig(
            samples=rollout.samples_per_prompt,
            during_training=during,
            filter_flat=dynamic is not None,
            timeout_s=config.placement.timeout_s,
        ),
    )


def _described(config: RunConfig, overlap: Overlap) -> str:
    mode = "partial rollouts" if overlap.pause_while_training else "asynchronous"
    corrections = ", ".join(f"{c.level} {c.mode}" for c in config.recipe.off_policy) or "none"
    return f"{mode}, at most {overlap.max_staleness} version(s) behind; off-policy correction: {corrections}"


def _held_out(inputs: Inputs) -> str:
    sizes = [f"{name} {len(held_out.prompts)}" for name, held_out in inputs.held_out.items()]
    return f"held out: {', '.join(sizes) or 'none'}"
