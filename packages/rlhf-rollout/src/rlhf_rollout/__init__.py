"""Rollout: what generates samples, what scores them, and agents in environments.

Backends are chosen by name (`transformers`, `vllm`, `openai`) or used as classes; each needs the extra of its
name:

>>> from rlhf_core import ROLLOUT_BACKENDS, load_plugin
>>> backend = load_plugin(ROLLOUT_BACKENDS, "transformers")(config)      # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow
from rlhf_rollout.agents.loop import AgentLoop, SingleTurn
from rlhf_rollout.agents.tool_environment import ToolEnvironment
from rlhf_rollout.agents.turns import TurnTokens
from rlhf_rollout.backends.openai.backend import OpenAIBackend, OpenAIOptions
from rlhf_rollout.backends.transformers.backend import TransformersBackend
from rlhf_rollout.backends.transformers.token_sampling import candidate_log_probs
from rlhf_rollout.backends.vllm.backend import VLLMBackend
from rlhf_rollout.backends.vllm.options import VLLMOptions
from rlhf_rollout.chat.messages import Message
from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.chat.tool_calls import ToolCallParser, split_calls, tool_call_parser
from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.gateway.config import GatewayConfig
from rlhf_rollout.gateway.sessions import RecordedSession, RecordedTurn, TurnPrompt
from rlhf_rollout.generator import Generator
from rlhf_rollout.rewards.batched_scorer import JoinedScorer, Scorer
from rlhf_rollout.rewards.combine import CombinedReward
from rlhf_rollout.rewards.endpoints import EndpointConnections, Endpoints, EndpointsConfig, unreachable
from rlhf_rollout.rewards.faults import FailureHandling, FaultReport, RobustReward
from rlhf_rollout.rewards.functions.isolated import IsolatedReward, IsolatedRewardConfig
from rlhf_rollout.rewards.functions.python import PythonReward, RewardTooSlow
from rlhf_rollout.rewards.functions.signature import RewardSignature, read_signature
from rlhf_rollout.rewards.functions.verifier import ZeroIfTooSlow
from rlhf_rollout.rewards.kind import EngineRewardConfig, RewardConfig
from rlhf_rollout.rewards.kinds.answers import (
    ExactRewardConfig,
    FuzzyRewardConfig,
    MathRewardConfig,
    exact_match,
    fuzzy_match,
    math_answer,
)
from rlhf_rollout.rewards.kinds.code import CodeReward, CodeRewardConfig
from rlhf_rollout.rewards.kinds.environment import EnvironmentReward, EnvironmentRewardConfig
from rlhf_rollout.rewards.kinds.form import LengthRewardConfig, RegexRewardConfig, format_match, length_match
from rlhf_rollout.rewards.kinds.function import FunctionRewardConfig
from rlhf_rollout.rewards.kinds.http import HTTPReward, HTTPRewardConfig
from rlhf_rollout.rewards.kinds.judge import JudgeReward, JudgeRewardConfig
from rlhf_rollout.rewards.kinds.model import ModelReward, ModelRewardConfig
from rlhf_rollout.rewards.kinds.steps import StepReward, StepRewardConfig
from rlhf_rollout.rewards.parts import RewardPart
from rlhf_rollout.rewards.sandbox import ProgramLimits, ProgramResult, run_program
from rlhf_rollout.rewards.scoring import ScoredGroup, score_as_finished, score_group

if TYPE_CHECKING:
    from rlhf_rollout.gateway.app import Gateway

__all__ = [
    "AgentConfig",
    "AgentLoop",
    "AgentTask",
    "ChatTokens",
    "CodeReward",
    "CodeRewardConfig",
    "CombinedReward",
    "EndpointConnections",
    "Endpoints",
    "EndpointsConfig",
    "EngineRewardConfig",
    "EnvironmentFailed",
    "EnvironmentReward",
    "EnvironmentRewardConfig",
    "EnvironmentTooSlow",
    "ExactRewardConfig",
    "FailureHandling",
    "FaultReport",
    "FunctionRewardConfig",
    "FuzzyRewardConfig",
    "Gateway",
    "GatewayConfig",
    "Generator",
    "HTTPReward",
    "HTTPRewardConfig",
    "IsolatedReward",
    "IsolatedRewardConfig",
    "JoinedScorer",
    "JudgeReward",
    "JudgeRewardConfig",
    "LengthRewardConfig",
    "MathRewardConfig",
    "Message",
    "ModelReward",
    "ModelRewardConfig",
    "OpenAIBackend",
    "OpenAIOptions",
    "ProgramLimits",
    "ProgramResult",
    "PythonReward",
    "RecordedSession",
    "RecordedTurn",
    "RegexRewardConfig",
    "RewardConfig",
    "RewardPart",
    "RewardSignature",
    "RewardTooSlow",
    "RobustReward",
    "ScoredGroup",
    "Scorer",
    "SingleTurn",
    "StepReward",
    "StepRewardConfig",
    "ToolCallParser",
    "ToolEnvironment",
    "TransformersBackend",
    "TurnPrompt",
    "TurnTokens",
    "VLLMBackend",
    "VLLMOptions",
    "ZeroIfTooSlow",
    "candidate_log_probs",
    "exact_match",
    "format_match",
    "fuzzy_match",
    "gather_or_cancel",
    "length_match",
    "math_answer",
    "read_signature",
    "run_program",
    "score_as_finished",
    "score_group",
    "split_calls",
    "tool_call_parser",
    "unreachable",
]


def __getattr__(name: str) -> Any:
    """The gateway, whose server needs an extra, is imported when it is first asked for."""
    if name == "Gateway":
        try:
            from rlhf_rollout.gateway.app import Gateway
        except ImportError as error:
            raise ImportError(f"the gateway needs {error.name}: install rlhf-rollout[gateway]") from error
        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
