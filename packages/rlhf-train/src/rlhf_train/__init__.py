"""DeepSpeed ZeRO training engine for the policy, critic, reference and reward roles of RLHF.

DeepSpeed and Transformers are imported when an engine is constructed, not with this package.
"""

from rlhf_train.checkpoint.background import PendingSave
from rlhf_train.config.options import ZeroConfig
from rlhf_train.config.process_environment import process_environment
from rlhf_train.engine import DeepSpeedEngine
from rlhf_train.memory import MemoryReport
from rlhf_train.reward_scale import RewardScale
from rlhf_train.weights.merge_adapter import MergeConfig, merge_adapter
from rlhf_train.weights.source import ZeroWeights

__all__ = [
    "DeepSpeedEngine",
    "MemoryReport",
    "MergeConfig",
    "PendingSave",
    "RewardScale",
    "ZeroConfig",
    "ZeroWeights",
    "merge_adapter",
    "process_environment",
]
