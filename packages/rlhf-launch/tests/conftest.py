import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from rlhf_algos import from_mapping
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.config.run import OnlineConfig

REWARD_MODULES = Path(__file__).parent / "reward_modules"


@pytest.fixture(scope="session", autouse=True)
def reward_modules():
    """Make the tests' reward functions importable, here and in child processes."""
    sys.path.insert(0, str(REWARD_MODULES))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REWARD_MODULES), before]))
    yield
    sys.path.remove(str(REWARD_MODULES))
    os.environ.pop("PYTHONPATH")
    if before:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Two tiny models and a file of prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_model(folder / "policy")
    save_tiny_model(folder / "reward", head="scalar", seed=1)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def settings(folder, tmp_path):
    """A small run in this process, as the mapping a YAML file would hold."""
    return {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl"), "hold_out": 4},
        "lengths": {"max_prompt_tokens": 16},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "rollout": {"backend": "transformers", "samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
        # Few tokens at a time: the plan of a run goes through a whole micro-batch of its shortest rows.
        "train": {
            "engine": "torch",
            "max_tokens_per_micro_batch": 512,
            "prompts_per_step": 4,
            "steps": 3,
            "optimizer": {"learning_rate": 1e-3},
        },
        "placement": {"executor": "local", "device": "cpu", "timeout_s": 300},
        "output": str(tmp_path / "run"),
    }


@pytest.fixture
def busy_cores():
    """As many processes as there are cores burn them while a test runs."""
    program = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(program))
            stack.callback(process.kill)  # before the exit of Popen, which waits for its end
        yield


@pytest.fixture
def make_config():
    """Settings to an OnlineConfig, with dotted changes on top."""

    def make(settings, **changes):
        settings = json.loads(json.dumps(settings))
        for key, value in changes.items():
            inner = settings
            *path, last = key.split("__")
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return from_mapping(OnlineConfig, settings, source="test")

    return make
