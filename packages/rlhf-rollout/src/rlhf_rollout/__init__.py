"""Rollout: generation backends, rewards, and agents in environments.

The backends are found by their entry points (`transformers`, `vllm`) and need the extra of their name:

>>> from rlhf_core import ROLLOUT_BACKENDS, load_plugin
>>> backend = load_plugin(ROLLOUT_BACKENDS, "transformers")(config)      # doctest: +SKIP
"""

from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow
from rlhf_rollout.agents.loop import AgentLoop, SingleTurn
from rlhf_rollout.agents.tool_environment import ToolEnvironment
from rlhf_rollout.chat.tool_calls import tool_call_parser
from rlhf_rollout.rewards.batched_scorer import JoinedScorer, Scorer
from rlhf_rollout.rewards.combine import CombinedReward, ModelReward
from rlhf_rollout.rewards.endpoints import EndpointsConfig
from rlhf_rollout.rewards.faults import FailureHandling, FaultReport, RobustReward
from rlhf_rollout.rewards.function import PythonReward
from rlhf_rollout.rewards.isolated import IsolatedReward, IsolatedRewardConfig
from rlhf_rollout.rewards.kinds.code import CodeReward, CodeRewardConfig
from rlhf_rollout.rewards.kinds.environment import EnvironmentReward
from rlhf_rollout.rewards.kinds.http import HTTPReward, HTTPRewardConfig
from rlhf_rollout.rewards.kinds.judge import JudgeConfig, JudgeReward
from rlhf_rollout.rewards.kinds.math import exact_match, math_answer
from rlhf_rollout.rewards.kinds.steps import StepReward, StepRewardConfig
from rlhf_rollout.rewards.kinds.text import format_match, fuzzy_match, length_match
from rlhf_rollout.rewards.sandbox import ProgramLimits, run_program
from rlhf_rollout.rewards.scoring import ScoredGroup, score_as_finished
from rlhf_rollout.rewards.signature import RewardSignature, read_signature
from rlhf_rollout.rewards.too_slow import RewardTooSlow, ZeroIfTooSlow

__all__ = [
    "AgentConfig",
    "AgentLoop",
    "AgentTask",
    "CodeReward",
    "CodeRewardConfig",
    "CombinedReward",
    "EndpointsConfig",
    "EnvironmentFailed",
    "EnvironmentReward",
    "EnvironmentTooSlow",
    "FailureHandling",
    "FaultReport",
    "HTTPReward",
    "HTTPRewardConfig",
    "IsolatedReward",
    "IsolatedRewardConfig",
    "JoinedScorer",
    "JudgeConfig",
    "JudgeReward",
    "ModelReward",
    "ProgramLimits",
    "PythonReward",
    "RewardSignature",
    "RewardTooSlow",
    "RobustReward",
    "ScoredGroup",
    "Scorer",
    "SingleTurn",
    "StepReward",
    "StepRewardConfig",
    "ToolEnvironment",
    "ZeroIfTooSlow",
    "exact_match",
    "format_match",
    "fuzzy_match",
    "length_match",
    "math_answer",
    "read_signature",
    "run_program",
    "score_as_finished",
    "tool_call_parser",
]
