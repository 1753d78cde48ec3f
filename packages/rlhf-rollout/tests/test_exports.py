"""What the package exports, and what importing it does not import."""

import subprocess
import sys

import rlhf_rollout


def test_all_is_sorted_and_pinned():
    assert rlhf_rollout.__all__ == [
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
    assert all(hasattr(rlhf_rollout, name) for name in rlhf_rollout.__all__)


def test_importing_it_imports_no_optional_dependency():
    code = (
        "import sys, rlhf_rollout; "
        "print([m for m in ('transformers', 'vllm', 'math_verify', 'sympy', 'ray', 'pytest') if m in sys.modules])"
    )
    # sympy comes with torch on some versions only when compiling; it must not come from here.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
