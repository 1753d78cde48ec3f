"""Which workers a run needs: a plan for each rank of its training engines and for each rollout engine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from rlhf_core import (
    ROLLOUT_BACKENDS,
    TRAIN_ENGINES,
    ConfigError,
    EngineConfig,
    OptimizerConfig,
    ResourceError,
    Role,
    RolloutConfig,
    SpansHosts,
    env_vars_of,
    load_plugin,
    receiver_bytes,
)
from rlhf_rollout import ModelRewardConfig

from rlhf_launch.config.placement import REWARD, TEACHER, EnginePlacement, is_training
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.placement.executor import WorkerPlan, WorkerRoom
from rlhf_launch.placement.resolve import ResolvedBackends, WorkerNeeds
from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.devices import ROLLOUT
from rlhf_launch.workers.rollout_engine import RolloutWorker
from rlhf_launch.workers.rollout_part import RolloutPart
from rlhf_launch.workers.train_rank import TrainWorker

TrainRole = str
"""The training roles of a run, reward models aside: `policy`, `critic`, `reference`, `teacher` or, where there are
several, `teacher <name>`. To its engine a teacher is a reference."""


def training_plans(config: OnlineConfig, backends: ResolvedBackends, role: TrainRole) -> list[WorkerPlan]:
    """The ranks of one training role."""
    trained = role in ("policy", "critic")
    lora, placed = config.model.lora, config.placement.of(role)
    ranks = ranks_of(config, role)
    kind: Role = "policy" if role == "policy" else "critic" if role == "critic" else "reference"
    shared_rows = config.train.sequence_parallel_size
    own = placed.options if isinstance(placed, EnginePlacement) else {}
    engine_config = replace(
        _engine_config(config, backends, model_of(config, role), kind),
        optimizer=_optimizer_of(config, role),
        gradient_checkpointing=config.train.gradient_checkpointing,
        # A frozen reference takes no adapters, but starts from the same 4-bit weights as the policy; a teacher is
        # a model of its own.
        lora=lora if trained or (role == "reference" and lora is not None and lora.quantize is not None) else None,
        average_decay=config.train.average_decay if role == "policy" else None,
        # A role with ranks of its own shares rows as the policy does where its ranks can be grouped so.
        sequence_parallel_size=shared_rows if ranks % shared_rows == 0 else 1,
        routing_replay=config.train.routing_replay and role == "policy",
        images=backends.images,
        options={**config.train.options, **own},
    )
    can = load_plugin(TRAIN_ENGINES, backends.engine).capabilities(engine_config)
    if role == "policy" and config.adapter_rank and not can.adapter_weights:
        raise ConfigError(
            f"weight_sync.adapters=adapter: the engine {backends.engine} cannot send adapters alone with these "
            "settings (of a 4-bit policy no engine can); set weight_sync.adapters=merged"
        )
    if role == "policy" and config.reference_is_policy and not can.scores_without_adapters:
        raise ConfigError(
            f"the reference is the policy with its adapters off, and the engine {backends.engine} cannot score so; "
            f"name a reference with workers of its own: model.reference={config.model.path}"
        )
    room = _room(config, role)
    plans = rank_plans(role.replace(" ", "-"), backends.engine, engine_config, ranks=ranks, room=room)
    return [replace(plan, role=role, devices=room.devices or role) for plan in plans]


def ranks_of(config: OnlineConfig, role: TrainRole) -> int:
    """Ranks of a training role; by default those of the policy."""
    placed = config.placement.of(role)
    own = placed.ranks if isinstance(placed, EnginePlacement) else None
    return config.train.ranks if own is None else own


def check_engines(config: OnlineConfig, backends: ResolvedBackends) -> None:
    """Ask the engines of all roles whether they can honour their settings; nothing is loaded.

    Raises:
        ConfigError: one cannot, with the setting.
    """
    all_training_plans(config, backends)


def all_training_plans(config: OnlineConfig, backends: ResolvedBackends) -> dict[str, list[WorkerPlan]]:
    """The ranks of every training engine of a run, reward models last, by the names of the roles."""
    plans: dict[str, list[WorkerPlan]] = {role: training_plans(config, backends, role) for role in roles_of(config)}
    return plans | {REWARD + part: ranks for part, ranks in reward_plans(config, backends).items()}


def reward_plans(config: WorkerNeeds, backends: ResolvedBackends) -> dict[str, list[WorkerPlan]]:
    """The ranks of every part of the reward that has a model of its own, by the part's name."""
    plans = {}
    for name, part in (config.reward or RewardSection()).engine_parts().items():
        role = REWARD + name
        placed = config.placement.reward.get(name) or EnginePlacement()
        engine_config = _engine_config(config, backends, part.path, part.role)
        engine = part.engine or backends.engine
        # Options of the policy's engine mean nothing to another one.
        inherited = config.train.options if engine == backends.engine else {}
        engine_config = replace(
            engine_config, dtype=part.dtype or engine_config.dtype, options={**inherited, **placed.options}
        )
        room = _room(config, role)
        ranks = rank_plans(f"reward-{name}", engine, engine_config, ranks=placed.ranks or 1, room=room)
        devices = room.devices or role
        plans[name] = [replace(plan, role=role, devices=devices) for plan in ranks]
    return plans


def _engine_config(config: WorkerNeeds, backends: ResolvedBackends, model: str, role: Role) -> EngineConfig:
    return EngineConfig(
        model=model,
        role=role,
        dtype=backends.dtype,
        device=backends.device,
        max_tokens_per_micro_batch=config.train.max_tokens_per_micro_batch,
        longest_row=config.max_length,
        max_skipped_steps=config.train.max_skipped_steps,
        attention=config.model.attention,
        packing=config.train.packing,
        max_tokens_per_mlp_tile=config.train.max_tokens_per_mlp_tile,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        options=config.train.options,
    )


def _room(config: WorkerNeeds, role: str) -> WorkerRoom:
    placement = config.placement
    placed = placement.of(role)
    shared = [members for members in config.shared if role in members]
    return WorkerRoom(
        cpus=placement.cpus_per_worker if placed.cpus is None else placed.cpus,
        threads=_threads_of_role(config),
        gpus=placed.gpus,
        devices=" + ".join(sorted(shared[0])) if shared else "",
        hosts=placed.hosts,
    )


def _heap_vars(device: str) -> dict[str, str]:
    """Variables for the C library's heap, of which a worker on the CPU has one for all threads.

    Workers run on threads, whose own heaps have at most 64 MiB: every larger tensor would be mapped by itself,
    given back when it is freed, and come again page by page (`keep_freed_memory`). What the user has set stands.
    """
    return {} if device.startswith("cuda") else {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}


def _threads_of_role(config: WorkerNeeds) -> int:
    """Threads of all workers of one role: roles mostly take turns, so each has all cores of this machine; half of
    them where generation goes on during training."""
    cores = len(os.sched_getaffinity(0))
    overlap = config.rollout.overlap
    return max(1, cores // 2) if overlap is not None and not overlap.pause_while_training else cores


def _thread_vars(room: WorkerRoom, device: str, *, workers: int) -> dict[str, str]:
    """Variables for the threads of each worker of a role; those that the user has set stand.

    Threads that wait must not spin: the cores are others' then.
    """
    if room.threads is None or device.startswith("cuda"):
        return {}
    each = max(1, room.threads // workers)
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"} if each > 1 else {}
    chosen = {"OMP_NUM_THREADS": str(each)} | waiting
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def rank_plans(
    name: str, engine: str, config: EngineConfig, *, ranks: int = 1, room: WorkerRoom | None = None
) -> list[WorkerPlan]:
    """A worker for each rank of one training engine.

    Args:
        name: of the engine; the ranks are `<name>-0`, `<name>-1`, ...
        engine: an installed engine's name (`torch`, `deepspeed`), or `module:Class`.
        config: of every rank.
        ranks: data-parallel ranks.
        room: what is reserved for each.

    Raises:
        ConfigError: the engine cannot honour a setting; nothing was started.
        ResourceError: several ranks of an engine that has one.
    """
    room = room or WorkerRoom()
    process = _thread_vars(room, config.device, workers=ranks) | _heap_vars(config.device)
    env_vars = process | plugin_env_vars(TRAIN_ENGINES, engine, config)
    can = load_plugin(TRAIN_ENGINES, engine).capabilities(config)
    if ranks > 1 and not can.several_ranks:
        raise ResourceError(
            f"{name}: the engine {engine} has one rank, and {ranks} are asked for; use deepspeed, or one rank"
        )
    if config.max_tokens_per_micro_batch == "auto" and not can.measures_micro_batches:
        raise ConfigError(
            f"{name}: the engine {engine} cannot find out how many tokens fit its memory; write a number for "
            "train.max_tokens_per_micro_batch"
        )
    if ranks % can.ranks_together:
        raise ConfigError(
            f"{name}: {ranks} rank(s) cannot be cut into groups of {can.ranks_together}, within which ranks share "
            f"rows, layers or shards (sequence_parallel_size, autotp_size, zero_hpz_partition_size); "
            "give a multiple"
        )
    return [
        WorkerPlan(
            name=f"{name}-{rank}",
            worker=TrainWorker,
            arguments=(engine, config, env_vars),
            env_vars=env_vars,
            cpus=room.cpus,
            gpus=_gpus(room, config.device, needs=1),
            together=can.ranks_together,
            devices=room.devices,
            hosts=room.hosts,
        )
        for rank in range(ranks)
    ]


def _gpus(room: WorkerRoom, device: str, *, needs: int) -> int:
    if not device.startswith("cuda"):
        return 0
    return needs if room.gpus is None else room.gpus


def engine_plans(
    backend: str, config: RolloutConfig, *, engines: int = 1, room: WorkerRoom | None = None
) -> list[WorkerPlan]:
    """A worker for each rollout engine.

    Args:
        backend: an installed backend's name (`vllm`, `transformers`, ...), or `module:Class`.
        config: of every engine.
        engines: how many.
        room: what is reserved for each; with `config.hosts`, for each of its parts.

    Raises:
        ConfigError: engines over several hosts, of a backend that keeps them on one.
    """
    room = room or WorkerRoom()
    process = _thread_vars(room, config.device, workers=engines * config.hosts) | _heap_vars(config.device)
    env_vars = process | plugin_env_vars(ROLLOUT_BACKENDS, backend, config)
    if config.hosts > 1 and not isinstance(load_plugin(ROLLOUT_BACKENDS, backend), SpansHosts):
        raise ConfigError(
            f"placement.rollout.hosts_per_engine={config.hosts}: the rollout backend {backend} keeps an engine on "
            "one host; vllm can divide its pipeline stages among several"
        )
    needs = config.tensor_parallel_size * config.pipeline_parallel_size // config.hosts
    plan = WorkerPlan(
        name="rollout",
        role="rollout",
        worker=RolloutWorker,
        arguments=(backend, config, env_vars),
        env_vars=env_vars,
        cpus=room.cpus,
        gpus=_gpus(room, config.device, needs=needs),
        concurrency=10_000,
        devices=room.devices,
        hosts=room.hosts,
    )
    return [
        replace(
            plan, name=f"rollout-{index}", parts=tuple(_part(plan, index, host) for host in range(1, config.hosts))
        )
        for index in range(engines)
    ]


def _part(plan: WorkerPlan, engine: int, host: int) -> WorkerPlan:
    """What an engine has on one of its other hosts."""
    backend, config, env_vars = plan.arguments
    arguments = (backend, replace(config, host=host), env_vars)
    return replace(plan, name=f"rollout-{engine}.{host}", worker=RolloutPart, arguments=arguments)


def rollout_plans(
    config: WorkerNeeds,
    backends: ResolvedBackends,
    *,
    adapter_rank: int = 0,
    weights: WeightSyncSection | None = None,
) -> list[WorkerPlan]:
    """The rollout engines.

    Args:
        config: the run.
        backends: what its backends and devices were found to be.
        adapter_rank: that of adapters which the engines will be sent alone.
        weights: how weights will be sent; None if none will.

    Raises:
        ConfigError: an engine over several hosts contradicts other settings.
        ResourceError: such an engine without Ray.
    """
    rollout = config.rollout
    shares_devices = any(ROLLOUT in members for members in config.shared)
    hosts = _hosts_per_engine(config, backends, shares_devices=shares_devices)
    backend_config = RolloutConfig(
        model=config.model.path,
        dtype=backends.dtype,
        device=backends.device,
        max_model_len=config.max_length,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=rollout.tensor_parallel_size,
        pipeline_parallel_size=rollout.pipeline_parallel_size,
        hosts=hosts,
        adapter_rank=adapter_rank,
        shares_devices=shares_devices,
        weight_buffer_bytes=weight_buffer_bytes(backends.device, weights, shares_devices=shares_devices),
        keep_kv_cache=weights is not None and weights.keep_kv_cache,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        options=rollout.options,
    )
    plans = engine_plans(backends.backend, backend_config, engines=rollout.engines, room=_room(config, "rollout"))
    return plans if rollout.request_seeds else [_with_own_stream(plan) for plan in plans]


def _with_own_stream(plan: WorkerPlan) -> WorkerPlan:
    """The engine with a seed of its own, since unseeded requests of engines with equal ones would draw the same."""
    backend, config, env_vars = plan.arguments
    own = replace(config, seed=request_seed(config.seed, plan.name) % 2**31)
    return replace(plan, arguments=(backend, own, env_vars))


def _hosts_per_engine(config: WorkerNeeds, backends: ResolvedBackends, *, shares_devices: bool) -> int:
    hosts, stages = config.placement.rollout.hosts_per_engine, config.rollout.pipeline_parallel_size
    if hosts == 1:
        return 1
    key = f"placement.rollout.hosts_per_engine={hosts}"
    if stages % hosts:
        raise ConfigError(
            f"{key} divides the pipeline stages of an engine among its hosts, and rollout.pipeline_parallel_size "
            f"is {stages}; make it {hosts} or a multiple (rollout.tensor_parallel_size is the GPUs of one stage, "
            "on one host)"
        )
    if shares_devices:
        raise ConfigError(
            f"{key}: an engine over several hosts has devices of its own; leave out the colocate_with that joins "
            "rollout with another role"
        )
    if isinstance(spread := config.placement.rollout.hosts, int):
        raise ConfigError(
            f"{key} says how many hosts one engine sits on, and placement.rollout.hosts={spread} "
            "how many all have; leave hosts out, or name the hosts"
        )
    if backends.executor != "ray":
        raise ResourceError(f"{key} needs placement.executor=ray; the {backends.executor} executor has one host")
    return hosts


def weight_buffer_bytes(device: str, weights: WeightSyncSection | None, *, shares_devices: bool) -> int:
    """Bytes of its GPU that a rollout worker may need for its end of a weight link, whose kind is not known yet."""
    if weights is None or not device.startswith("cuda") or weights.transport not in (None, "nccl"):
        return 0
    # On one device with the policy, weights come by memory that the sender has.
    return 0 if shares_devices else receiver_bytes("nccl", weights.bucket_bytes)


def roles_of(config: OnlineConfig) -> list[TrainRole]:
    """The training roles of a run, the policy first; reward models have plans of their own."""
    return [role for role in config.roles if is_training(role)]


def model_of(config: OnlineConfig, role: TrainRole) -> str:
    """What a training role loads."""
    model = config.model
    judges = [part.path for part in config.reward.engine_parts().values() if isinstance(part, ModelRewardConfig)]
    start = {
        "policy": model.path,
        "reference": model.reference or model.path,
        "critic": model.critic or (judges or [model.path])[0],
        "teacher": model.teacher or model.path,
        **{TEACHER + name: path for name, path in model.teachers.items()},
    }
    return start[role]


def _optimizer_of(config: OnlineConfig, role: TrainRole) -> OptimizerConfig | None:
    if role not in ("policy", "critic"):
        return None
    train = config.train
    if role == "critic":
        return train.critic_optimizer.config(train.updates(train.steps))
    return train.optimizer.config(train.updates(train.steps - train.critic_warmup_steps))


def plugin_env_vars(group: str, name: str, config: Any) -> dict[str, str]:
    """The variables that a plugin wants in its process, and where Python finds the user's own modules."""
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | env_vars_of(load_plugin(group, name), config)
