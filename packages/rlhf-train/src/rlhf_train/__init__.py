"""DeepSpeed ZeRO training engine for the policy, critic, reference and reward roles of RLHF.

DeepSpeed and Transformers are imported when an engine is constructed, not with this package.
"""

from rlhf_train.config.env_vars import env_vars
from rlhf_train.config.options import ZeroConfig
from rlhf_train.engine import DeepSpeedEngine
from rlhf_train.planned_memory import PlannedStates, pass_peak, planned_states
from rlhf_train.weights.merge_adapter import AdaptedModel, MergeConfig, load_adapted, merge_adapter
from rlhf_train.weights.source import ZeroWeights

__all__ = [
    "AdaptedModel",
    "DeepSpeedEngine",
    "MergeConfig",
    "PlannedStates",
    "ZeroConfig",
    "ZeroWeights",
    "env_vars",
    "load_adapted",
    "merge_adapter",
    "pass_peak",
    "planned_states",
]
