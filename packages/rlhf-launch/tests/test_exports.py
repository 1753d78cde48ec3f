"""What the package exports, and what importing it does not import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import rlhf_launch


def test_all_is_sorted_and_pinned():
    assert rlhf_launch.__all__ == [
        "AlgorithmSection",
        "Alternatives",
        "Bundle",
        "BundleSection",
        "ChainConfig",
        "ChainResult",
        "CheckedReward",
        "CollectReport",
        "Comparison",
        "CurriculumSection",
        "CurriculumStream",
        "Diagnosis",
        "DynamicSampling",
        "EasyToHard",
        "Evaluation",
        "EvaluationSet",
        "Evaluator",
        "Executor",
        "Finding",
        "Forecast",
        "Gap",
        "GenerateConfig",
        "GenerationReport",
        "GroupMaker",
        "GroupSampler",
        "Handle",
        "HeldOut",
        "History",
        "Inputs",
        "Ledger",
        "LedgerLimits",
        "LocalExecutor",
        "LocalHandle",
        "MakeGroups",
        "MetricShift",
        "MismatchReport",
        "MixturePoint",
        "OnStep",
        "OnlineConfig",
        "OnlineDataSection",
        "OnlineEvaluationSection",
        "OnlineRun",
        "OnlineTrainSection",
        "Overlap",
        "Parting",
        "PhaseClock",
        "Producer",
        "ProducerConfig",
        "Prompt",
        "PromptFormat",
        "PromptStream",
        "Pulse",
        "RayCluster",
        "RecordedRun",
        "RecordedSetting",
        "Replay",
        "Reporter",
        "RewardSection",
        "Rewarder",
        "RolloutPool",
        "RolloutReplacement",
        "RolloutSection",
        "RoundEvaluationSection",
        "RoundResult",
        "RoundsConfig",
        "RoundsResult",
        "RunResult",
        "Schedule",
        "ScoringReport",
        "SimulatedRun",
        "Simulation",
        "SimulationReport",
        "SyncReport",
        "TrainGroup",
        "TrainWorker",
        "Trainer",
        "UpdatePlan",
        "Waits",
        "WeightSync",
        "WeightSyncSection",
        "WorkerLostError",
        "WorkerPlan",
        "WorkerRoom",
        "Workers",
        "check_inputs",
        "check_mismatch",
        "check_reward",
        "close_workers",
        "collate_groups",
        "compare_runs",
        "engine_plans",
        "episode_sampler",
        "forecast",
        "generate",
        "greedy_sampling",
        "iterate",
        "open_executor",
        "open_producer",
        "open_reward",
        "open_run",
        "pack_groups",
        "pass_at_k",
        "plot_run",
        "rank_plans",
        "read_bundle",
        "read_chain",
        "read_histories",
        "read_prompts",
        "read_run",
        "recorded",
        "replay_step",
        "request_seed",
        "response_sampler",
        "restore",
        "rows_of_groups",
        "run_chain",
        "run_steps",
        "schedule_of",
        "score",
        "select_answers",
        "spared_collector",
        "staleness",
        "start_workers",
        "store_histories",
        "train",
        "train_offline",
        "trajectories_of",
    ]


def test_every_name_is_imported_when_it_is_asked_for():
    for name in rlhf_launch.__all__:
        assert getattr(rlhf_launch, name) is not None
    assert set(rlhf_launch.__all__) <= set(dir(rlhf_launch))
    with pytest.raises(AttributeError, match="no attribute 'run_online'"):
        _ = rlhf_launch.run_online


def test_a_function_is_not_hidden_by_a_folder_of_its_name():
    import rlhf_launch.cli.main
    import rlhf_launch.generation.run
    import rlhf_launch.offline.run
    import rlhf_launch.online.run

    assert all(
        callable(getattr(rlhf_launch, name)) for name in ("train", "generate", "train_offline", "score", "iterate")
    )


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(rlhf_launch.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"rlhf_launch.{home}" for name, home in rlhf_launch._HOMES.items()}
    assert sorted(seen) == sorted(rlhf_launch.__all__)


def loaded_after(code):
    """Which heavy modules a program has imported."""
    heavy = "('torch', 'transformers', 'ray', 'vllm', 'deepspeed', 'matplotlib', 'rlhf_core')"
    program = f"{code}\nimport sys; print([m for m in {heavy} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    assert loaded_after("import rlhf_launch") == "[]"


@pytest.mark.stack
def test_no_public_name_needs_ray_vllm_or_deepspeed():
    found = loaded_after("import rlhf_launch\nfor name in rlhf_launch.__all__: getattr(rlhf_launch, name)")
    assert not {"ray", "vllm", "deepspeed", "matplotlib"} & set(ast.literal_eval(found))
