"""Whole runs as functions, and the pieces of which a loop of one's own is made.

>>> from rlhf_algos import load_config                                           # doctest: +SKIP
>>> from rlhf_launch import OnlineConfig, train                                  # doctest: +SKIP
>>> result = train(load_config(OnlineConfig, "examples/gsm8k.yaml"))             # doctest: +SKIP

Runs: `train`, `generate`, `train_offline`, `run_chain` and `check_mismatch` take a configuration and block
until they are done, also in a notebook. Pieces: prompts, group makers, rewards, training and rollout engines,
weight sync; `examples/own_loop.py` is a loop of them. A name is imported from its module when it is first asked
for, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_launch.bundles.bundle import Bundle, read_bundle
    from rlhf_launch.chain.config import ChainConfig
    from rlhf_launch.chain.run import ChainResult, read_chain, run_chain
    from rlhf_launch.comparison.compare import Comparison, MetricShift, compare_runs
    from rlhf_launch.comparison.history import History, read_histories, store_histories
    from rlhf_launch.config.bundles import BundleSection
    from rlhf_launch.config.generate import GenerateConfig
    from rlhf_launch.config.reward import RewardSection
    from rlhf_launch.config.rollout import DynamicSampling, Overlap, RolloutSection
    from rlhf_launch.config.run import (
        AlgorithmSection,
        EvaluationSet,
        OnlineConfig,
        OnlineEvaluationSection,
        OnlineTrainSection,
    )
    from rlhf_launch.config.weight_sync import WeightSyncSection
    from rlhf_launch.generation.run import GenerationReport, generate
    from rlhf_launch.mismatch.attribution import Diagnosis, Finding, Gap
    from rlhf_launch.mismatch.run import MismatchReport, check_mismatch
    from rlhf_launch.offline.run import train_offline
    from rlhf_launch.online.evaluation import Evaluation, Evaluator, HeldOut, pass_at_k
    from rlhf_launch.online.loop import OnlineRun, OnStep, Schedule, restore, run_steps
    from rlhf_launch.online.metrics import PhaseClock
    from rlhf_launch.online.preflight import Inputs, check_inputs
    from rlhf_launch.online.report import Reporter, plot_run
    from rlhf_launch.online.run import RunResult, train
    from rlhf_launch.online.setup import open_producer, open_run, schedule_of
    from rlhf_launch.online.trainer import Trainer, UpdatePlan
    from rlhf_launch.placement.executor import Executor, LocalExecutor, WorkerPlan, WorkerRoom
    from rlhf_launch.placement.plans import engine_plans, rank_plans
    from rlhf_launch.placement.ray import RayCluster
    from rlhf_launch.placement.start import Workers, open_executor, start_workers
    from rlhf_launch.replay.parting import Parting
    from rlhf_launch.replay.rerun import replay_step
    from rlhf_launch.replay.result import Replay
    from rlhf_launch.samples.groups import GroupMaker, MakeGroups, collate_groups, rows_of_groups, staleness
    from rlhf_launch.samples.ledger import Ledger, LedgerLimits
    from rlhf_launch.samples.producer import CollectReport, Producer, ProducerConfig
    from rlhf_launch.samples.prompts import Prompt, PromptFormat, PromptStream, read_prompts
    from rlhf_launch.samples.reward import CheckedReward, Rewarder, check_reward, open_reward
    from rlhf_launch.samples.sampling import (
        GroupSampler,
        episode_sampler,
        greedy_sampling,
        response_sampler,
        trajectories_of,
    )
    from rlhf_launch.samples.saved_groups import pack_groups
    from rlhf_launch.seeds import request_seed
    from rlhf_launch.simulation.forecast import Alternatives, Forecast, forecast
    from rlhf_launch.simulation.records import RecordedRun, RecordedSetting, read_run, recorded
    from rlhf_launch.simulation.run import SimulatedRun, Simulation, SimulationReport
    from rlhf_launch.weight_sync.replacement import RolloutReplacement
    from rlhf_launch.weight_sync.report import SyncReport
    from rlhf_launch.weight_sync.sync import WeightSync
    from rlhf_launch.workers.handles import Handle, LocalHandle, close_workers
    from rlhf_launch.workers.process import spared_collector
    from rlhf_launch.workers.pulse import Pulse
    from rlhf_launch.workers.rollout_pool import RolloutPool
    from rlhf_launch.workers.train_group import TrainGroup
    from rlhf_launch.workers.train_rank import TrainWorker
    from rlhf_launch.workers.waits import Waits, WorkerLostError

_MODULES = {
    "bundles.bundle": ("Bundle", "read_bundle"),
    "chain.config": ("ChainConfig",),
    "chain.run": ("ChainResult", "read_chain", "run_chain"),
    "comparison.compare": ("Comparison", "MetricShift", "compare_runs"),
    "comparison.history": ("History", "read_histories", "store_histories"),
    "config.bundles": ("BundleSection",),
    "config.generate": ("GenerateConfig",),
    "config.reward": ("RewardSection",),
    "config.rollout": ("DynamicSampling", "Overlap", "RolloutSection"),
    "config.run": (
        "AlgorithmSection",
        "EvaluationSet",
        "OnlineConfig",
        "OnlineEvaluationSection",
        "OnlineTrainSection",
    ),
    "config.weight_sync": ("WeightSyncSection",),
    "generation.run": ("GenerationReport", "generate"),
    "mismatch.attribution": ("Diagnosis", "Finding", "Gap"),
    "mismatch.run": ("MismatchReport", "check_mismatch"),
    "offline.run": ("train_offline",),
    "online.evaluation": ("Evaluation", "Evaluator", "HeldOut", "pass_at_k"),
    "online.loop": ("OnStep", "OnlineRun", "Schedule", "restore", "run_steps"),
    "online.metrics": ("PhaseClock",),
    "online.preflight": ("Inputs", "check_inputs"),
    "online.report": ("Reporter", "plot_run"),
    "online.run": ("RunResult", "train"),
    "online.setup": ("open_producer", "open_run", "schedule_of"),
    "online.trainer": ("Trainer", "UpdatePlan"),
    "placement.executor": ("Executor", "LocalExecutor", "WorkerPlan", "WorkerRoom"),
    "placement.plans": ("engine_plans", "rank_plans"),
    "placement.ray": ("RayCluster",),
    "placement.start": ("Workers", "open_executor", "start_workers"),
    "replay.parting": ("Parting",),
    "replay.rerun": ("replay_step",),
    "replay.result": ("Replay",),
    "samples.groups": ("GroupMaker", "MakeGroups", "collate_groups", "rows_of_groups", "staleness"),
    "samples.ledger": ("Ledger", "LedgerLimits"),
    "samples.producer": ("CollectReport", "Producer", "ProducerConfig"),
    "samples.prompts": ("Prompt", "PromptFormat", "PromptStream", "read_prompts"),
    "samples.reward": ("CheckedReward", "Rewarder", "check_reward", "open_reward"),
    "samples.saved_groups": ("pack_groups",),
    "samples.sampling": (
        "GroupSampler",
        "episode_sampler",
        "greedy_sampling",
        "response_sampler",
        "trajectories_of",
    ),
    "seeds": ("request_seed",),
    "simulation.forecast": ("Alternatives", "Forecast", "forecast"),
    "simulation.records": ("RecordedRun", "RecordedSetting", "read_run", "recorded"),
    "simulation.run": ("SimulatedRun", "Simulation", "SimulationReport"),
    "weight_sync.replacement": ("RolloutReplacement",),
    "weight_sync.report": ("SyncReport",),
    "weight_sync.sync": ("WeightSync",),
    "workers.handles": ("Handle", "LocalHandle", "close_workers"),
    "workers.process": ("spared_collector",),
    "workers.pulse": ("Pulse",),
    "workers.rollout_pool": ("RolloutPool",),
    "workers.train_group": ("TrainGroup",),
    "workers.train_rank": ("TrainWorker",),
    "workers.waits": ("Waits", "WorkerLostError"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AlgorithmSection",
    "Alternatives",
    "Bundle",
    "BundleSection",
    "ChainConfig",
    "ChainResult",
    "CheckedReward",
    "CollectReport",
    "Comparison",
    "Diagnosis",
    "DynamicSampling",
    "Evaluation",
    "EvaluationSet",
    "Evaluator",
    "Executor",
    "Finding",
    "Forecast",
    "Gap",
    "GenerateConfig",
    "GenerationReport",
    "GroupMaker",
    "GroupSampler",
    "Handle",
    "HeldOut",
    "History",
    "Inputs",
    "Ledger",
    "LedgerLimits",
    "LocalExecutor",
    "LocalHandle",
    "MakeGroups",
    "MetricShift",
    "MismatchReport",
    "OnStep",
    "OnlineConfig",
    "OnlineEvaluationSection",
    "OnlineRun",
    "OnlineTrainSection",
    "Overlap",
    "Parting",
    "PhaseClock",
    "Producer",
    "ProducerConfig",
    "Prompt",
    "PromptFormat",
    "PromptStream",
    "Pulse",
    "RayCluster",
    "RecordedRun",
    "RecordedSetting",
    "Replay",
    "Reporter",
    "RewardSection",
    "Rewarder",
    "RolloutPool",
    "RolloutReplacement",
    "RolloutSection",
    "RunResult",
    "Schedule",
    "SimulatedRun",
    "Simulation",
    "SimulationReport",
    "SyncReport",
    "TrainGroup",
    "TrainWorker",
    "Trainer",
    "UpdatePlan",
    "Waits",
    "WeightSync",
    "WeightSyncSection",
    "WorkerLostError",
    "WorkerPlan",
    "WorkerRoom",
    "Workers",
    "check_inputs",
    "check_mismatch",
    "check_reward",
    "close_workers",
    "collate_groups",
    "compare_runs",
    "engine_plans",
    "episode_sampler",
    "forecast",
    "generate",
    "greedy_sampling",
    "open_executor",
    "open_producer",
    "open_reward",
    "open_run",
    "pack_groups",
    "pass_at_k",
    "plot_run",
    "rank_plans",
    "read_bundle",
    "read_chain",
    "read_histories",
    "read_prompts",
    "read_run",
    "recorded",
    "replay_step",
    "request_seed",
    "response_sampler",
    "restore",
    "rows_of_groups",
    "run_chain",
    "run_steps",
    "schedule_of",
    "spared_collector",
    "staleness",
    "start_workers",
    "store_histories",
    "train",
    "train_offline",
    "trajectories_of",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, whether they were imported or not."""
    return sorted({*globals(), *__all__})
