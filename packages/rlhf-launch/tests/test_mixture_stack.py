"""Mixtures of experts through whole runs: generator and trainer agree on every step's tokens, after every sync."""

import json

import pytest
from rlhf_algos import from_mapping
from rlhf_core.testing.tiny import save_tiny_experts
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.run import train

pytestmark = pytest.mark.stack

TOLERANCE = 1e-4
STEPS = 4
ZERO3_UNDER_RAY = {"engine": "deepspeed", "ranks": 2}
TORCH_HERE = {"engine": "torch"}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Paths of tiny models, by family."""
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: save_tiny_experts(folder / family, family) for family in ("mixtral", "qwen3_moe", "jamba")}


@pytest.fixture
def gaps(mixtures, settings):
    """The largest difference between sampler's and trainer's log-probs of the tokens of each step."""

    def run(family, backend, engine, learning_rate):
        settings["model"]["path"] = mixtures[family]
        settings["rollout"] |= {"backend": backend}
        settings["train"] |= {**engine, "steps": STEPS, "optimizer": {"learning_rate": learning_rate}}
        settings["placement"] |= {"executor": "ray" if engine.get("ranks", 1) > 1 else "local"}
        result = train(from_mapping(OnlineConfig, settings, source="test"))
        lines = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
        rows = [row for row in lines if "reward" in row]
        assert [row["weight_version"] for row in rows] == list(range(1, STEPS + 1))
        assert all(row["staleness/max"] == 0 and row["grad_norm"] > 0 for row in rows)
        return [row["mismatch/log_prob_max"] for row in rows]

    return run


@pytest.mark.parametrize(("family", "learning_rate"), [("qwen3_moe", 0.0), ("mixtral", 1e-3)], ids=str)
def test_zero_3_on_two_ranks_and_vllm_under_ray(gaps, family, learning_rate):
    assert max(gaps(family, "vllm", ZERO3_UNDER_RAY, learning_rate)) < TOLERANCE


@pytest.mark.parametrize(("family", "learning_rate"), [("mixtral", 0.0), ("qwen3_moe", 1e-3)], ids=str)
def test_the_torch_engine_and_vllm_in_one_process(gaps, family, learning_rate):
    assert max(gaps(family, "vllm", TORCH_HERE, learning_rate)) < TOLERANCE


@pytest.mark.parametrize("learning_rate", [0.0, 1e-3])
def test_jamba_on_the_transformers_backend(gaps, learning_rate):
    """vLLM has no kernel for its layers on a CPU."""
    assert max(gaps("jamba", "transformers", TORCH_HERE, learning_rate)) < TOLERANCE
