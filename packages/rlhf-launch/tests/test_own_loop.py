"""The example of a loop of one's own learns, from public pieces alone, also under a running event loop."""

import ast
import asyncio
import importlib.util
from pathlib import Path

import pytest
from rlhf_core.testing.tiny import save_tiny_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside the packages here")


def example():
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.stack
def test_the_reward_rises(tmp_path):
    async def cell():
        return example().train(save_tiny_model(tmp_path / "model"), steps=16)

    rewards = asyncio.run(cell())  # as in a notebook
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_it_uses_the_packages_tops_only():
    imported = [
        node.module for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert {name for name in imported if name.startswith("rlhf")} == {
        "rlhf_algos",
        "rlhf_core",
        "rlhf_launch",
        "rlhf_rollout",
    }
