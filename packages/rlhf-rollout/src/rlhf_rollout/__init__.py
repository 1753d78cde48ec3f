"""Rollout: generation backends, and rewards from functions and models.

The backends are found by their entry points (`transformers`, `vllm`) and need the extra of their name:

>>> from rlhf_core import ROLLOUT_BACKENDS, load_plugin
>>> backend = load_plugin(ROLLOUT_BACKENDS, "transformers")(config)      # doctest: +SKIP
"""

from rlhf_rollout.math_reward import exact_match, math_answer
from rlhf_rollout.python_reward import PythonReward, RewardSignature, read_signature
from rlhf_rollout.rewards import CombinedReward, ModelReward, Scorer

__all__ = [
    "CombinedReward",
    "ModelReward",
    "PythonReward",
    "RewardSignature",
    "Scorer",
    "exact_match",
    "math_answer",
    "read_signature",
]
