"""Rollout: what generates samples, what scores them, and agents in environments.

Backends are chosen by name (`transformers`, `vllm`, `openai`) or used as classes; each needs the extra of its
name:

>>> from rlhf_core import ROLLOUT_BACKENDS, load_plugin
>>> backend = load_plugin(ROLLOUT_BACKENDS, "transformers")(config)      # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow
from rlhf_rollout.agents.environment_process import check_agent
from rlhf_rollout.agents.loop import AgentLoop, SingleTurn
from rlhf_rollout.agents.programs import ProgramLoop, ProgramTask
from rlhf_rollout.agents.tool_environment import DescribedTool, ToolEnvironment
from rlhf_rollout.agents.turn_tokens import TurnTokens
from rlhf_rollout.backends.openai.backend import OpenAIBackend, OpenAIOptions
from rlhf_rollout.backends.transformers.backend import TransformersBackend
from rlhf_rollout.backends.transformers.token_sampling import candidate_log_probs
from rlhf_rollout.backends.vllm.backend import VLLMBackend
from rlhf_rollout.backends.vllm.options import VLLMOptions
from rlhf_rollout.chat.messages import Message
from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.chat.tool_calls import ToolCallParser, split_calls, tool_call_parser
from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.environments.gymnasium import GymnasiumEnvironment, gymnasium_action, gymnasium_text
from rlhf_rollout.environments.mcp import MCPEnvironment
from rlhf_rollout.environments.openenv import OpenEnvEnvironment, openenv_text
from rlhf_rollout.environments.verifiers import VerifiersEnvironment, verifiers_rows
from rlhf_rollout.gateway.config import GatewayConfig
from rlhf_rollout.gateway.open_sessions import SessionAccess
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
from rlhf_rollout.rewards.grading.extract import extract_code
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
from rlhf_rollout.rewards.kinds.generative import (
    GenerativeReward,
    GenerativeRewardConfig,
    PairwiseReward,
    PairwiseRewardConfig,
)
from rlhf_rollout.rewards.kinds.http import HTTPReward, HTTPRewardConfig
from rlhf_rollout.rewards.kinds.judge import JudgeReward, JudgeRewardConfig
from rlhf_rollout.rewards.kinds.model import ModelReward, ModelRewardConfig
from rlhf_rollout.rewards.kinds.steps import StepReward, StepRewardConfig
from rlhf_rollout.rewards.parts import RewardPart
from rlhf_rollout.rewards.scoring import ScoredGroup, score_as_finished, score_group
from rlhf_rollout.sandbox.bubblewrap import BubblewrapSandbox
from rlhf_rollout.sandbox.choice import open_sandbox
from rlhf_rollout.sandbox.code_tool import CodeTool
from rlhf_rollout.sandbox.container import ContainerSandbox
from rlhf_rollout.sandbox.remote import RemoteSandbox
from rlhf_rollout.sandbox.unconfined import UnconfinedSandbox

if TYPE_CHECKING:
    from rlhf_rollout.gateway.app import Gateway
    from rlhf_rollout.sandbox.server import SandboxServer

__all__ = [
    "AgentConfig",
    "AgentLoop",
    "AgentTask",
    "BubblewrapSandbox",
    "ChatTokens",
    "CodeReward",
    "CodeRewardConfig",
    "CodeTool",
    "CombinedReward",
    "ContainerSandbox",
    "DescribedTool",
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
    "GenerativeReward",
    "GenerativeRewardConfig",
    "Generator",
    "GymnasiumEnvironment",
    "HTTPReward",
    "HTTPRewardConfig",
    "IsolatedReward",
    "IsolatedRewardConfig",
    "JoinedScorer",
    "JudgeReward",
    "JudgeRewardConfig",
    "LengthRewardConfig",
    "MCPEnvironment",
    "MathRewardConfig",
    "Message",
    "ModelReward",
    "ModelRewardConfig",
    "OpenAIBackend",
    "OpenAIOptions",
    "OpenEnvEnvironment",
    "PairwiseReward",
    "PairwiseRewardConfig",
    "ProgramLoop",
    "ProgramTask",
    "PythonReward",
    "RecordedSession",
    "RecordedTurn",
    "RegexRewardConfig",
    "RemoteSandbox",
    "RewardConfig",
    "RewardPart",
    "RewardSignature",
    "RewardTooSlow",
    "RobustReward",
    "SandboxServer",
    "ScoredGroup",
    "Scorer",
    "SessionAccess",
    "SingleTurn",
    "StepReward",
    "StepRewardConfig",
    "ToolCallParser",
    "ToolEnvironment",
    "TransformersBackend",
    "TurnPrompt",
    "TurnTokens",
    "UnconfinedSandbox",
    "VLLMBackend",
    "VLLMOptions",
    "VerifiersEnvironment",
    "ZeroIfTooSlow",
    "candidate_log_probs",
    "check_agent",
    "exact_match",
    "extract_code",
    "format_match",
    "fuzzy_match",
    "gather_or_cancel",
    "gymnasium_action",
    "gymnasium_text",
    "length_match",
    "math_answer",
    "open_sandbox",
    "openenv_text",
    "read_signature",
    "score_as_finished",
    "score_group",
    "split_calls",
    "tool_call_parser",
    "unreachable",
    "verifiers_rows",
]


def __getattr__(name: str) -> Any:
    """The servers, which need an extra, are imported when they are first asked for."""
    if name in ("Gateway", "SandboxServer"):
        try:
            if name == "Gateway":
                from rlhf_rollout.gateway.app import Gateway

                return Gateway
            from rlhf_rollout.sandbox.server import SandboxServer

            return SandboxServer
        except ImportError as error:
            what = "the gateway" if name == "Gateway" else "the server of a sandbox"
            raise ImportError(f"{what} needs {error.name}: install rlhf-rollout[gateway]") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
