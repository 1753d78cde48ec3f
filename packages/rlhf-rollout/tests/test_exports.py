"""What the package exports, and what importing it does not import."""

import subprocess
import sys

import pytest
import rlhf_rollout


def test_all_is_sorted_and_pinned():
    assert rlhf_rollout.__all__ == [
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
    assert all(hasattr(rlhf_rollout, name) for name in rlhf_rollout.__all__)


@pytest.mark.stack
def test_importing_it_imports_no_optional_dependency():
    names = "transformers vllm math_verify sympy ray pytest starlette uvicorn openai aiohttp httpx tenacity"
    unwanted = [*names.split(), "gymnasium", "mcp", "openenv", "verifiers"]
    code = f"import sys, rlhf_rollout; print([m for m in {unwanted} if m in sys.modules])"
    # sympy comes with torch on some versions only when compiling; it must not come from here.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_gateway_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "rlhf_rollout.gateway.app", raising=False)
    with pytest.raises(ImportError, match=r"install rlhf-rollout\[gateway\]"):
        _ = rlhf_rollout.Gateway
    with pytest.raises(AttributeError, match="no attribute 'Gatway'"):
        _ = rlhf_rollout.Gatway
