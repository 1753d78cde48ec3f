"""Rollout: generation backends, rewards, and agents in environments.

The backends are found by their entry points (`transformers`, `vllm`) and need the extra of their name:

>>> from rlhf_core import ROLLOUT_BACKENDS, load_plugin
>>> backend = load_plugin(ROLLOUT_BACKENDS, "transformers")(config)      # doctest: +SKIP
"""

from rlhf_rollout.agent_config import AgentConfig, AgentTask
from rlhf_rollout.agent_loop import AgentLoop, SingleTurn
from rlhf_rollout.code_reward import CodeReward, CodeRewardConfig
from rlhf_rollout.endpoints import EndpointsConfig
from rlhf_rollout.environment_calls import EnvironmentFailed, EnvironmentTooSlow
from rlhf_rollout.environment_reward import EnvironmentReward
from rlhf_rollout.http_reward import HTTPReward, HTTPRewardConfig
from rlhf_rollout.joined_scoring import JoinedScorer, Scorer
from rlhf_rollout.judge_reward import JudgeConfig, JudgeReward
from rlhf_rollout.math_reward import exact_match, math_answer
from rlhf_rollout.overlapped_scoring import ScoredGroup, score_as_finished
from rlhf_rollout.process_reward import ProcessReward, ProcessRewardConfig
from rlhf_rollout.python_reward import PythonReward
from rlhf_rollout.reward_policy import FaultPolicy, FaultReport, RobustReward
from rlhf_rollout.reward_signature import RewardSignature, read_signature
from rlhf_rollout.rewards import CombinedReward, ModelReward
from rlhf_rollout.sandbox import ProgramLimits, run_program
from rlhf_rollout.step_reward import StepReward, StepRewardConfig
from rlhf_rollout.text_rewards import format_match, fuzzy_match, length_match
from rlhf_rollout.too_slow import RewardTooSlow, ZeroIfTooSlow
from rlhf_rollout.tool_calls import tool_call_parser
from rlhf_rollout.tool_environment import ToolEnvironment

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
    "FaultPolicy",
    "FaultReport",
    "HTTPReward",
    "HTTPRewardConfig",
    "JoinedScorer",
    "JudgeConfig",
    "JudgeReward",
    "ModelReward",
    "ProcessReward",
    "ProcessRewardConfig",
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
