"""Losses, advantage estimators and offline training of language models on plain torch."""

from rlhf_core import LoraConfig

from rlhf_algos.config_files import dump_config, from_mapping, load_config
from rlhf_algos.data import DataSource, Row, read_rows
from rlhf_algos.encoding import Encoder, EncodingOptions, LengthLimit, TokenRow, load_encoder
from rlhf_algos.engine import TorchEngine
from rlhf_algos.engine_source import EngineSource
from rlhf_algos.kto import KTOConfig
from rlhf_algos.metrics import MetricsWriter, read_metrics
from rlhf_algos.offline import TrainResult, evaluate, train
from rlhf_algos.offline_config import (
    CheckpointConfig,
    EvalConfig,
    LearningConfig,
    OfflineConfig,
    RunConfig,
)
from rlhf_algos.offline_methods import METHODS, Method
from rlhf_algos.preference_losses import DPOConfig
from rlhf_algos.reference_free_losses import CPOConfig, ORPOConfig, SimPOConfig
from rlhf_algos.reward_losses import ProcessRewardConfig, RewardLossConfig
from rlhf_algos.sft import SFTConfig
from rlhf_algos.teacher import DistillConfig
from rlhf_algos.torch_models import TorchOptions

__all__ = [
    "METHODS",
    "CPOConfig",
    "CheckpointConfig",
    "DPOConfig",
    "DataSource",
    "DistillConfig",
    "Encoder",
    "EncodingOptions",
    "EngineSource",
    "EvalConfig",
    "KTOConfig",
    "LearningConfig",
    "LengthLimit",
    "LoraConfig",
    "Method",
    "MetricsWriter",
    "ORPOConfig",
    "OfflineConfig",
    "ProcessRewardConfig",
    "RewardLossConfig",
    "Row",
    "RunConfig",
    "SFTConfig",
    "SimPOConfig",
    "TokenRow",
    "TorchEngine",
    "TorchOptions",
    "TrainResult",
    "dump_config",
    "evaluate",
    "from_mapping",
    "load_config",
    "load_encoder",
    "read_metrics",
    "read_rows",
    "train",
]
