"""Data types, seams and the weight-sync protocol that the rlhf packages, and replacements of them, share."""

from rlhf_core.adapters.lora import LoraConfig
from rlhf_core.checks import check_choice, check_number, check_switch, check_whole
from rlhf_core.data.batch import Batch, collate, masked_mean, masked_sum, pad_rows
from rlhf_core.data.generation import FinishReason, GenerationRequest, GenerationResult, Sample
from rlhf_core.data.sampling import LogProbMeaning, SamplingConfig
from rlhf_core.data.trajectory import Trajectory
from rlhf_core.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDiedError,
    PluginError,
    ResourceError,
    RewardError,
    RLHFError,
    StaleWeightsError,
    TrainingDivergedError,
    UserError,
    WeightSyncError,
)
from rlhf_core.interfaces.engine_config import DType, EngineConfig, OptimizerConfig, Role, Schedule
from rlhf_core.interfaces.environments import Environment, Observation, ToolCall, Turn
from rlhf_core.interfaces.loss import Loss, LossTerms, Mean, ModelOutputs, mean_of, merge_metrics
from rlhf_core.interfaces.rewards import DroppedSample, RewardFunction, Score, check_scores, keep_scored
from rlhf_core.interfaces.rollout import BackendCapabilities, PauseMode, RolloutBackend, RolloutConfig
from rlhf_core.interfaces.training import (
    KeepsAverage,
    MemoryReport,
    PendingSave,
    ReportsMemory,
    SavesInBackground,
    SendsAdapters,
    StepReport,
    TrainCapabilities,
    TrainEngine,
)
from rlhf_core.model.forward import model_outputs
from rlhf_core.model.log_probs import chunked_log_probs, entropy_from_logits, log_probs_from_logits
from rlhf_core.options import config_from, did_you_mean, nearest
from rlhf_core.plugins import (
    ROLLOUT_BACKENDS,
    TRAIN_ENGINES,
    NeedsEnvVars,
    env_vars_of,
    load_object,
    load_plugin,
    plugin_names,
)
from rlhf_core.training.accumulation import Accumulated, OneRank, Ranks, accumulate, score_in_micro_batches
from rlhf_core.training.dealing import deal
from rlhf_core.training.learning_rate import learning_rate
from rlhf_core.training.random_state import RandomState
from rlhf_core.weight_sync.adapters import AdapterWeights
from rlhf_core.weight_sync.delta import DeltaSource
from rlhf_core.weight_sync.manifest import Bucket, TensorSpec, WeightManifest
from rlhf_core.weight_sync.receive import receive_weights
from rlhf_core.weight_sync.send import send_weights
from rlhf_core.weight_sync.source import (
    ModuleWeights,
    PackingSource,
    WeightSource,
    check_base,
    check_coverage,
    copy_into,
)
from rlhf_core.weight_sync.transports.transport import Link, Receiver, Sender, join, open_sender

__all__ = [
    "ROLLOUT_BACKENDS",
    "TRAIN_ENGINES",
    "Accumulated",
    "AdapterWeights",
    "BackendCapabilities",
    "Batch",
    "Bucket",
    "CapabilityError",
    "ConfigError",
    "DType",
    "DataError",
    "DeadlineExceeded",
    "DeltaSource",
    "DroppedSample",
    "EngineConfig",
    "EngineDiedError",
    "Environment",
    "FinishReason",
    "GenerationRequest",
    "GenerationResult",
    "KeepsAverage",
    "Link",
    "LogProbMeaning",
    "LoraConfig",
    "Loss",
    "LossTerms",
    "Mean",
    "MemoryReport",
    "ModelOutputs",
    "ModuleWeights",
    "NeedsEnvVars",
    "Observation",
    "OneRank",
    "OptimizerConfig",
    "PackingSource",
    "PauseMode",
    "PendingSave",
    "PluginError",
    "RLHFError",
    "RandomState",
    "Ranks",
    "Receiver",
    "ReportsMemory",
    "ResourceError",
    "RewardError",
    "RewardFunction",
    "Role",
    "RolloutBackend",
    "RolloutConfig",
    "Sample",
    "SamplingConfig",
    "SavesInBackground",
    "Schedule",
    "Score",
    "Sender",
    "SendsAdapters",
    "StaleWeightsError",
    "StepReport",
    "TensorSpec",
    "ToolCall",
    "TrainCapabilities",
    "TrainEngine",
    "TrainingDivergedError",
    "Trajectory",
    "Turn",
    "UserError",
    "WeightManifest",
    "WeightSource",
    "WeightSyncError",
    "accumulate",
    "check_base",
    "check_choice",
    "check_coverage",
    "check_number",
    "check_scores",
    "check_switch",
    "check_whole",
    "chunked_log_probs",
    "collate",
    "config_from",
    "copy_into",
    "deal",
    "did_you_mean",
    "entropy_from_logits",
    "env_vars_of",
    "join",
    "keep_scored",
    "learning_rate",
    "load_object",
    "load_plugin",
    "log_probs_from_logits",
    "masked_mean",
    "masked_sum",
    "mean_of",
    "merge_metrics",
    "model_outputs",
    "nearest",
    "open_sender",
    "pad_rows",
    "plugin_names",
    "receive_weights",
    "score_in_micro_batches",
    "send_weights",
]
