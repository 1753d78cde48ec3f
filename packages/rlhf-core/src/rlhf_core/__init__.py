"""Data types, seams and the weight-sync protocol that the rlhf packages, and replacements of them, share."""

from rlhf_core.accumulation import Accumulated, OneRank, Ranks, accumulate, score_in_micro_batches
from rlhf_core.adapters import LoraConfig
from rlhf_core.backends import BackendCapabilities, PauseMode, RolloutBackend, RolloutConfig
from rlhf_core.batch import Batch, collate, pad_rows
from rlhf_core.delta import DeltaSource
from rlhf_core.engines import EngineConfig, OptimizerConfig, Role, StepReport, TrainEngine
from rlhf_core.environments import Environment, Observation, ToolCall, Turn
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
from rlhf_core.forward import model_outputs
from rlhf_core.generation import FinishReason, GenerationRequest, GenerationResult, Sample
from rlhf_core.log_probs import chunked_log_probs, entropy_from_logits, log_probs_from_logits
from rlhf_core.loss import Loss, LossTerms, Mean, ModelOutputs, mean_of, merge_metrics
from rlhf_core.manifest import Bucket, TensorSpec, WeightManifest
from rlhf_core.masking import masked_mean, masked_sum
from rlhf_core.plugins import ROLLOUT_BACKENDS, TRAIN_ENGINES, load_object, load_plugin, plugin_names
from rlhf_core.random_state import RandomState
from rlhf_core.receiving import receive_weights
from rlhf_core.rewards import Failed, RewardFunction, Score, check_scores, keep_scored
from rlhf_core.sampling import LogProbMeaning, SamplingConfig
from rlhf_core.schedule import learning_rate
from rlhf_core.sending import send_weights
from rlhf_core.trajectory import Trajectory
from rlhf_core.transport import Link, Receiver, Sender, join, open_sender
from rlhf_core.weights import (
    ModuleWeights,
    PackingSource,
    WeightSource,
    check_base,
    check_coverage,
    copy_into,
)

__all__ = [
    "ROLLOUT_BACKENDS",
    "TRAIN_ENGINES",
    "Accumulated",
    "BackendCapabilities",
    "Batch",
    "Bucket",
    "CapabilityError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "DeltaSource",
    "EngineConfig",
    "EngineDiedError",
    "Environment",
    "Failed",
    "FinishReason",
    "GenerationRequest",
    "GenerationResult",
    "Link",
    "LogProbMeaning",
    "LoraConfig",
    "Loss",
    "LossTerms",
    "Mean",
    "ModelOutputs",
    "ModuleWeights",
    "Observation",
    "OneRank",
    "OptimizerConfig",
    "PackingSource",
    "PauseMode",
    "PluginError",
    "RLHFError",
    "RandomState",
    "Ranks",
    "Receiver",
    "ResourceError",
    "RewardError",
    "RewardFunction",
    "Role",
    "RolloutBackend",
    "RolloutConfig",
    "Sample",
    "SamplingConfig",
    "Score",
    "Sender",
    "StaleWeightsError",
    "StepReport",
    "TensorSpec",
    "ToolCall",
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
    "check_coverage",
    "check_scores",
    "chunked_log_probs",
    "collate",
    "copy_into",
    "entropy_from_logits",
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
    "open_sender",
    "pad_rows",
    "plugin_names",
    "receive_weights",
    "score_in_micro_batches",
    "send_weights",
]
