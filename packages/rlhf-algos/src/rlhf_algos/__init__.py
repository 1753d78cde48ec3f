"""Losses, advantage estimators and offline training of language models on plain torch."""

from rlhf_core import LoraConfig

from rlhf_algos.config.loader import dump_config, from_mapping, load_config
from rlhf_algos.data.encoding import Encoder, EncodingOptions, LengthLimit, TokenRow, load_encoder
from rlhf_algos.data.sources import DataSource, Row, read_rows
from rlhf_algos.losses.offline.kto import KTOConfig
from rlhf_algos.losses.offline.preference import DPOConfig
from rlhf_algos.losses.offline.reference_free import CPOConfig, ORPOConfig, SimPOConfig
from rlhf_algos.losses.offline.reward_model import ProcessRewardLossConfig, RewardLossConfig
from rlhf_algos.losses.offline.sft import SFTConfig
from rlhf_algos.metrics import MetricsWriter, read_metrics
from rlhf_algos.offline.config import (
    CheckpointConfig,
    EvalConfig,
    LearningConfig,
    OfflineConfig,
    RunConfig,
)
from rlhf_algos.offline.engine_source import EngineFactory
from rlhf_algos.offline.loop import TrainResult, evaluate, train
from rlhf_algos.offline.methods import METHODS, Method
from rlhf_algos.offline.teacher import DistillConfig
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_algos.torch_engine.model import TorchOptions

__all__ = [
    "METHODS",
    "CPOConfig",
    "CheckpointConfig",
    "DPOConfig",
    "DataSource",
    "DistillConfig",
    "Encoder",
    "EncodingOptions",
    "EngineFactory",
    "EvalConfig",
    "KTOConfig",
    "LearningConfig",
    "LengthLimit",
    "LoraConfig",
    "Method",
    "MetricsWriter",
    "ORPOConfig",
    "OfflineConfig",
    "ProcessRewardLossConfig",
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
