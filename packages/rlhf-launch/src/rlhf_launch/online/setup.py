"""The workers and parts of an online run: placed, started and connected, as a configuration says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_algos import CheckpointSchedule, CheckpointStore, ShowsTeacherMore
from rlhf_core import ConfigError, SamplingConfig, StopRequest
from rlhf_rollout import AgentConfig, AgentLoop, EnvironmentRewardConfig, ProgramLoop, tool_call_parser

from rlhf_launch.bundles.keep import BundleKeeper
from rlhf_launch.config.placement import REWARD, TEACHER
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.evaluation import Evaluator
from rlhf_launch.online.fitted_roles import FittedRoles
from rlhf_launch.online.loop import OnlineRun, Schedule
from rlhf_launch.online.preflight import Inputs
from rlhf_launch.online.report import Reporter
from rlhf_launch.online.state import RunState
from rlhf_launch.online.trainer import Trainer, UpdatePlan
from rlhf_launch.placement.plans import all_training_plans, rollout_plans
from rlhf_launch.placement.resolve import resolved
from rlhf_launch.placement.start import Workers, executor_of, start_workers
from rlhf_launch.samples.curriculum import CurriculumStream, dataset_names
from rlhf_launch.samples.groups import GroupMaker, MakeGroups
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.pretraining import PretrainingStream, PretrainingText
from rlhf_launch.samples.producer import During, Producer, ProducerConfig
from rlhf_launch.samples.prompts import PromptStream, policy_tokenizer
from rlhf_launch.samples.reward import Rewarder, open_reward
from rlhf_launch.samples.reward_scale import RewardScales
from rlhf_launch.samples.sampling import (
    GATEWAY_MODEL,
    GroupSampler,
    episode_sampler,
    greedy_sampling,
    open_gateway,
    response_sampler,
)
from rlhf_launch.samples.teacher_prompts import TeacherPrompts
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.devices import SharedDevices, described_turns
from rlhf_launch.workers.process import spared_collector
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits

if TYPE_CHECKING:
    from rlhf_rollout import Gateway


@contextmanager
def open_run(
    config: OnlineConfig,
    inputs: Inputs,
    store: CheckpointStore,
    reporter: Reporter,
    stop: StopRequest | None = None,
) -> Iterator[OnlineRun]:
    """Place and connect all workers; they are closed when the block ends, however it ends.

    Args:
        config: the run.
        inputs: what the preflight found.
        store: its checkpoints.
        reporter: its reports.
        stop: by which it may be asked to end.
    """
    stop = stop or StopRequest()
    waits = Waits(config.placement.timeout_s)
    with ExitStack() as stack:
        begin = time.perf_counter()
        stack.callback(inputs.reward.close)
        workers = stack.enter_context(_start(config, inputs, reporter, waits))
        pool = workers.pool
        if inputs.backends.images and not pool.takes_images:
            raise ConfigError(
                f"the policy is shown images, and the rollout backend {inputs.backends.backend} with this model "
                "takes none; use rollout.backend: vllm with a vision-language model, or leave the images out"
            )
        options = config.weight_sync
        policy, transports = workers.training["policy"], workers.executor.transports
        sync = WeightSync(policy, pool, transports=transports, options=options)
        reporter.say(f"  weights travel by {sync.transport}")
        reporter.say(f"  {sync.prove()}")
        scales = RewardScales(config.reward.normalize)
        reward, close = open_reward(inputs.reward, workers.training, inputs.tokenizer, scales)
        stack.callback(close)
        limit = config.placement.engine_restarts
        replacement = RolloutReplacement(workers.executor, pool, sync, limit=limit)
        pool.replace_with(replacement)
        stack.callback(replacement.stop)
        reporter.say(f"  all up after {time.perf_counter() - begin:.1f} s")
        stack.enter_context(spared_collector())
        rewarder = Rewarder(reward, inputs.tokenizer)
        make_groups = group_makers(
            config, pool, rewarder, stack, inputs.image_token_ids, processor=inputs.agent_processor
        )
        prompts = prompt_stream(config, inputs)
        producer = open_producer(config, prompts, make_groups, pool, stop)
        stack.callback(producer.close)
        trainer = open_trainer(config, workers, inputs.pretraining)
        if "policy" not in trainer.asked_before(config.train.critic_warmup_steps):
            reporter.say("  no scoring pass of the policy: each update takes its own log-probs, or the sampler's")
        state = RunState(
            store,
            trainer.trained,
            producer,
            trainer.kl,
            schedule=CheckpointSchedule(every=config.checkpoint.every, minutes=config.checkpoint.minutes),
            background=config.checkpoint.in_background,
            fitted=fitted_roles(config, workers, trainer),
            scales=scales,
        )
        yield OnlineRun(
            schedule=schedule_of(config),
            trainer=trainer,
            producer=producer,
            pool=pool,
            sync=sync,
            replacement=replacement,
            evaluator=Evaluator(inputs.held_out, make_groups, waits),
            reporter=reporter,
            stop=stop,
            state=state,
            prompts=prompts,
            make_groups=make_groups,
            bundles=BundleKeeper(
                resolved(config, inputs.backends),
                trainer.trained,
                trainer.kl,
                newest=lambda: state.newest,
                say=reporter.say,
            ),
        )


@contextmanager
def _start(config: OnlineConfig, inputs: Inputs, reporter: Reporter, waits: Waits) -> Iterator[Workers]:
    """One placement for all workers of the run."""
    backends = inputs.backends
    training = all_training_plans(config, backends)
    rows = config.train.prompts_per_step * config.rollout.samples_per_prompt
    executor = executor_of(config, backends, step_tokens=rows * config.max_length)
    rollout = rollout_plans(config, backends, adapter_rank=config.adapter_rank, weights=config.weight_sync)

    def say(line: str) -> None:
        reporter.say(f"  {line}")

    for line in described_turns(config.roles, config.shared):
        say(line)
    devices = SharedDevices(config.shared)
    with start_workers(executor, training, rollout, waits=waits, devices=devices, say=say) as workers:
        yield workers


def prompt_stream(config: OnlineConfig, inputs: Inputs) -> PromptStream:
    """The endless stream of training prompts, mixed by weights where the configuration gives any, or by a
    curriculum."""
    data = config.data
    if data.curriculum is not None:
        names = dataset_names([source.path for source in data.train])
        rules, where = data.curriculum, data.description
        return CurriculumStream(inputs.prompts, rules, seed=config.seed, names=names, data=where)
    sets = inputs.prompts
    weighted = any(source.weight is not None for source in config.data.train)
    return PromptStream(
        sets.prompts,
        seed=config.seed,
        shuffle=config.data.shuffle,
        mixture=(sets.sizes, sets.weights) if weighted else None,
    )


def measure_rewards(config: OnlineConfig, inputs: Inputs, run: OnlineRun) -> None:
    """Measure the scales of a reward that has none yet, on answers of the policy with its weights of now.

    Raises:
        ConfigError: the scores of a part do not differ.
    """
    scales = run.state.scales
    if not (wanted := scales.prompts):
        return
    prompts = list(inputs.prompts.prompts)
    drawn = random.Random(f"{config.seed}/reward-scale").sample(prompts, min(wanted, len(prompts)))
    sampling = config.rollout.sampling
    with scales.measuring(), run.stop.interruptible(), run.pool.generating():
        run.make_groups(sampling).groups(drawn, label="reward-scale", samples=1, waits=run.pool.waits)
    run.reporter.say(f"  rewards normalised by {len(drawn)} answers before the first step: {scales}")


def schedule_of(config: OnlineConfig) -> Schedule:
    """What happens every so many steps."""
    return Schedule(
        steps=config.train.steps,
        evaluate_every=config.evaluation.every,
        best_metric=config.evaluation.best_metric,
        overlapping=config.rollout.overlap is not None,
    )


def pretraining_stream(config: OnlineConfig, text: PretrainingText | None) -> PretrainingStream | None:
    """The endless stream of text that the policy learns beside its samples; None without any."""
    if text is None:
        return None
    train = config.train
    rows = train.prompts_per_step * config.rollout.samples_per_prompt // train.minibatches
    return PretrainingStream(
        text,
        seed=config.seed,
        rows=rows if train.pretrain_rows is None else train.pretrain_rows,
        updates=train.updates(1),
        shuffle=config.data.shuffle,
        mixed=any(source.weight is not None for source in config.data.pretrain),
    )


def open_trainer(config: OnlineConfig, workers: Workers, text: PretrainingText | None = None) -> Trainer:
    """The training engines of a run with its algorithm."""
    return Trainer(
        policy=workers.training["policy"],
        critic=workers.training.get("critic"),
        reference=workers.training.get("reference"),
        reference_is_policy=config.reference_is_policy,
        teacher=workers.training.get("teacher"),
        teachers=several_teachers(workers.training),
        teacher_prompts=teacher_prompts(config),
        scored=config.is_scored,
        recipe=config.recipe,
        kl=config.recipe.kl_controller(),
        plan=plan_of(config),
        rewards=tuple(group for name, group in workers.training.items() if name.startswith(REWARD)),
        one_at_a_time=workers.executor.one_process,
        pretraining=pretraining_stream(config, text),
    )


def several_teachers(training: Mapping[str, TrainGroup]) -> dict[str, TrainGroup]:
    """Those of the training engines that are one of several teachers, by the teacher's name."""
    return {name.removeprefix(TEACHER): group for name, group in training.items() if name.startswith(TEACHER)}


def teacher_prompts(config: OnlineConfig) -> TeacherPrompts | None:
    """What the teacher is shown in the place of the samples' own prompts; None where that is nothing else."""
    recipe = config.recipe
    if not isinstance(recipe, ShowsTeacherMore):
        return None
    return TeacherPrompts(policy_tokenizer(config.model), recipe)


def fitted_roles(config: OnlineConfig, workers: Workers, trainer: Trainer) -> FittedRoles:
    """The roles whose engines find the size of their micro-batches by trials."""
    if config.train.max_tokens_per_micro_batch != "auto":
        return FittedRoles()
    return FittedRoles(list(workers.training.values()), trained=[group.name for group in trainer.trained])


def plan_of(config: OnlineConfig) -> UpdatePlan:
    """How often the samples of a step are trained on, and in which portions."""
    train = config.train
    return UpdatePlan(
        minibatches=train.minibatches,
        epochs=train.epochs_per_step,
        critic_warmup_steps=train.critic_warmup_steps,
        seed=config.seed,
        score_always=config.scores_always,
    )


def group_makers(
    config: OnlineConfig,
    pool: RolloutPool,
    rewarder: Rewarder,
    stack: ExitStack,
    image_token_ids: Collection[int] = (),
    *,
    processor: Any = None,
) -> MakeGroups:
    """What gives, for any settings of sampling, what makes scored groups: single responses or episodes.

    What episodes need, a gateway or processes, is closed with the stack. `processor`: the policy's, where programs
    show it images.
    """
    sampler: Callable[[SamplingConfig], GroupSampler] = partial(
        response_sampler, pool, seed=config.request_seed, image_token_ids=image_token_ids
    )
    if config.rollout.agent is not None:
        gateway = None
        if config.rollout.agent.uses_gateway:
            gateway = stack.enter_context(
                open_gateway(
                    pool,
                    rewarder.tokenizer,
                    config.rollout.agent,
                    max_length=config.max_length,
                    processor=processor,
                )
            )
        play = partial(episode_sampler, seed=config.request_seed, image_token_ids=image_token_ids)
        sampler = _episode_samplers(config, config.rollout.agent, pool, rewarder.tokenizer, stack, gateway, play)

    def make(sampling: SamplingConfig, *, greedy_scores: bool = False) -> GroupMaker:
        likeliest = sampler(greedy_sampling(sampling)) if greedy_scores else None
        return GroupMaker(sampler(sampling), rewarder, greedy=likeliest)

    return make


def _episode_samplers(
    config: OnlineConfig,
    agent: AgentConfig,
    pool: RolloutPool,
    tokenizer: Any,
    stack: ExitStack,
    gateway: Gateway | None,
    play: Callable[[AgentLoop | ProgramLoop], GroupSampler],
) -> Callable[[SamplingConfig], GroupSampler]:
    """One sampler for each settings of sampling, however often it is asked for."""
    parts = config.reward.all_parts(environment=True).values()
    alone = all(isinstance(part, EnvironmentRewardConfig) for part in parts)
    made: dict[str, GroupSampler] = {}

    def loop_of(sampling: SamplingConfig) -> AgentLoop | ProgramLoop:
        if gateway is not None:
            return ProgramLoop(gateway, agent, sampling=sampling, model=GATEWAY_MODEL, needs_reward=alone)
        calls = tool_call_parser(tokenizer)
        longest = config.max_length
        loop = AgentLoop(pool, tokenizer, agent, sampling=sampling, max_tokens=longest, parse_tool_calls=calls)
        stack.callback(loop.close)
        return loop

    def sampler(sampling: SamplingConfig) -> GroupSampler:
        key = repr(sampling)
        if key not in made:
            made[key] = play(loop_of(sampling))
        return made[key]

    return sampler


def open_producer(
    config: OnlineConfig,
    prompts: PromptStream,
    make_groups: MakeGroups,
    pool: RolloutPool,
    stop: StopRequest | None = None,
) -> Producer:
    """The producer of a run, in the mode that `rollout.overlap` names."""
    rollout, per_step = config.rollout, config.train.prompts_per_step
    overlap, dynamic = rollout.overlap, rollout.dynamic_sampling
    limits = LedgerLimits(
        per_step=per_step,
        steps=config.train.steps,
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
        make_groups(rollout.sampling, greedy_scores=config.recipe.needs_greedy_scores),
        prompts,
        Ledger(limits),
        pool,
        ProducerConfig(
            samples=rollout.samples_per_prompt,
            during_training=during,
            filter_flat=dynamic is not None,
        ),
        pool.waits,
        stop,
    )
