"""Which workers a run needs, and the executors that place them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlhf_core import (
    ROLLOUT_BACKENDS,
    TRAIN_ENGINES,
    ConfigError,
    EngineConfig,
    OptimizerConfig,
    Role,
    RolloutConfig,
    env_vars_of,
    load_plugin,
)
from rlhf_rollout import ModelRewardConfig

from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.run import RunConfig
from rlhf_launch.placement.resolve import ResolvedBackends, WorkerNeeds
from rlhf_launch.workers.handles import Handle, LocalHandle
from rlhf_launch.workers.rollout_engine import RolloutWorker
from rlhf_launch.workers.train_rank import TrainWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """One worker to be placed."""

    name: str
    worker: type
    arguments: tuple[Any, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be there before the worker's process imports anything."""
    cpus: float = 1.0
    gpus: float = 0.0
    concurrency: int | None = None
    """Calls that may be under way at once; None for one at a time."""


class WorkerRoom(Protocol):
    """What a configuration reserves for each worker."""

    @property
    def cpus_per_worker(self) -> float:
        """CPU cores."""
        ...

    @property
    def gpus_per_worker(self) -> float:
        """GPUs, where there are any."""
        ...


class Executor(Protocol):
    """Places workers."""

    @property
    def transports(self) -> Sequence[str]:
        """Ways for the weights from trainer to generator, best first; `shm` is for workers on one host."""
        ...

    def place(self, plans: Sequence[WorkerPlan]) -> Sequence[Handle]:
        """Start all workers; a handle for each, in order."""
        ...

    def restart(self, name: str) -> Handle:
        """Start a worker anew in the room of the one of this name, which is closed or dead."""
        ...

    def close(self) -> None:
        """Give everything back; may be called twice."""
        ...


class LocalExecutor:
    """All workers in this process, each on a thread of its own."""

    transports = ("local",)

    def __init__(self) -> None:
        self._plans: dict[str, WorkerPlan] = {}

    def place(self, plans: Sequence[WorkerPlan]) -> list[LocalHandle]:
        """See Executor."""
        self._plans |= {plan.name: plan for plan in plans}
        return [self.restart(plan.name) for plan in plans]

    def restart(self, name: str) -> LocalHandle:
        """See Executor."""
        plan = self._plans[name]
        return LocalHandle(name, lambda: plan.worker(*plan.arguments))

    def close(self) -> None:
        """Nothing beyond the handles to give back."""


def open_executor(config: WorkerNeeds, components: ResolvedBackends) -> Executor:
    """The executor that the components name."""
    if components.executor == "local":
        return LocalExecutor()
    from rlhf_launch.placement.ray import RayCluster

    transports = ("nccl", "gloo") if components.device == "cuda" else ("shm", "gloo")
    placement = config.placement
    return RayCluster(placement.ray_address, transports=transports, timeout_s=placement.timeout_s)


def training_plans(config: RunConfig, components: ResolvedBackends, role: Role) -> list[WorkerPlan]:
    """The ranks of one training role; the reference has one rank."""
    trained = role in ("policy", "critic")
    lora = config.model.lora
    engine_config = replace(
        _engine_config(config, components, _model_of(config, role), role),
        optimizer=_optimizer_of(config, role),
        gradient_checkpointing=config.train.gradient_checkpointing,
        # A frozen reference takes no adapters, but starts from the same 4-bit weights as the policy.
        lora=lora if trained or (lora is not None and lora.quantize is not None) else None,
        average_decay=config.train.average_decay if role == "policy" else None,
        sequence_parallel_size=config.train.sequence_parallel_size if trained else 1,
        routing_replay=config.train.routing_replay and role == "policy",
    )
    can = load_plugin(TRAIN_ENGINES, components.engine).capabilities(engine_config)
    if role == "policy" and config.adapter_rank and not can.adapter_weights:
        raise ConfigError(
            f"weight_sync.adapters=adapter: the engine {components.engine} cannot send adapters alone with these "
            "settings (of a 4-bit policy no engine can); set weight_sync.adapters=merged"
        )
    ranks = config.train.ranks if trained else 1
    return rank_plans(role, components.engine, engine_config, ranks=ranks, room=config.placement)


def check_engines(config: RunConfig, components: ResolvedBackends) -> None:
    """Ask the engines of all roles whether they can honour their settings; nothing is loaded.

    Raises:
        ConfigError: one cannot, with the setting.
    """
    for role in roles_of(config):
        training_plans(config, components, role)
    reward_plans(config, components)


def reward_plans(config: WorkerNeeds, components: ResolvedBackends) -> dict[str, list[WorkerPlan]]:
    """The ranks of every part of the reward that has a model of its own, by the part's name."""
    plans = {}
    for name, part in (config.reward or RewardSection()).engine_parts().items():
        engine_config = _engine_config(config, components, part.path, "reward")
        engine = part.engine or components.engine
        # Options of the policy's engine mean nothing to another one.
        inherited = config.train.options if engine == components.engine else {}
        engine_config = replace(
            engine_config,
            dtype=part.dtype or engine_config.dtype,
            options=inherited if part.engine_options is None else part.engine_options,
        )
        room = config.placement
        plans[name] = rank_plans(f"reward-{name}", engine, engine_config, ranks=part.ranks, room=room)
    return plans


def _engine_config(config: WorkerNeeds, components: ResolvedBackends, model: str, role: Role) -> EngineConfig:
    return EngineConfig(
        model=model,
        role=role,
        dtype=config.model.dtype,
        device=components.device,
        max_tokens_per_micro_batch=config.train.max_tokens_per_micro_batch,
        attention=config.model.attention,
        packing=config.train.packing,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        options=config.train.options,
    )


def rank_plans(name: str, engine: str, config: EngineConfig, *, ranks: int, room: WorkerRoom) -> list[WorkerPlan]:
    """A worker for each rank of one engine.

    Raises:
        ConfigError: the engine cannot honour a setting; nothing was started.
    """
    environment = plugin_environment(TRAIN_ENGINES, engine, config)
    load_plugin(TRAIN_ENGINES, engine).capabilities(config)
    return [
        WorkerPlan(
            name=f"{name}-{rank}",
            worker=TrainWorker,
            arguments=(engine, config, environment),
            environment=environment,
            cpus=room.cpus_per_worker,
            gpus=room.gpus_per_worker if config.device.startswith("cuda") else 0.0,
        )
        for rank in range(ranks)
    ]


def rollout_plans(config: WorkerNeeds, components: ResolvedBackends, *, adapter_rank: int = 0) -> list[WorkerPlan]:
    """The rollout engines; `adapter_rank` is that of adapters which they will be sent alone."""
    rollout = config.rollout
    backend_config = RolloutConfig(
        model=config.model.policy,
        dtype=config.model.dtype,
        device=components.device,
        max_model_len=rollout.max_model_len or config.max_model_len_needed,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=rollout.tensor_parallel_size,
        adapter_rank=adapter_rank,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        options=rollout.options,
    )
    environment = plugin_environment(ROLLOUT_BACKENDS, components.backend, backend_config)
    gpus = config.placement.gpus_per_worker * rollout.tensor_parallel_size
    return [
        WorkerPlan(
            name=f"rollout-{index}",
            worker=RolloutWorker,
            arguments=(components.backend, backend_config, environment),
            environment=environment,
            cpus=config.placement.cpus_per_worker,
            gpus=gpus if components.device == "cuda" else 0.0,
            concurrency=10_000,
        )
        for index in range(rollout.engines)
    ]


def roles_of(config: RunConfig) -> list[Role]:
    """The training roles of a run, the policy first; reward models have plans of their own."""
    recipe = config.algorithm.recipe
    roles: list[Role] = ["policy"]
    if recipe.needs_critic:
        roles.append("critic")
    if recipe.needs_reference:
        roles.append("reference")
    return roles


def _model_of(config: RunConfig, role: Role) -> str:
    model = config.model
    judges = [part.path for part in config.reward.engine_parts().values() if isinstance(part, ModelRewardConfig)]
    start = {
        "policy": model.policy,
        "reference": model.reference or model.policy,
        "critic": model.critic or (judges or [model.policy])[0],
    }
    return start[role]


def _optimizer_of(config: RunConfig, role: Role) -> OptimizerConfig | None:
    if role not in ("policy", "critic"):
        return None
    optimizer = config.train.optimizer if role == "policy" else config.train.critic_optimizer
    if optimizer.schedule != "constant" and not optimizer.total_steps:
        steps = config.steps - (config.train.critic_warmup_steps if role == "policy" else 0)
        optimizer = replace(optimizer, total_steps=steps * config.train.epochs * config.train.minibatches)
    return optimizer


def plugin_environment(group: str, name: str, config: Any) -> dict[str, str]:
    """What the plugin wants in its process's environment, and where Python finds the user's own modules."""
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | env_vars_of(load_plugin(group, name), config)
