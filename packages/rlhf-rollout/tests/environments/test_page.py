"""What docs/environments.md says can be written."""

import re
from pathlib import Path

import pytest
import rlhf_rollout
import yaml
from rlhf_rollout import AgentConfig

PAGE = (Path(__file__).parents[4] / "docs" / "environments.md").read_text(encoding="utf-8")
RUNS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["rollout"]["agent"]["environment"])
def test_the_page_s_settings_fit_the_environments(run):
    config = AgentConfig(**run["rollout"]["agent"])
    assert callable(config.environment_maker())  # the options fit the constructor


def test_the_page_names_all_environments():
    named = {run["rollout"]["agent"]["environment"].rpartition(":")[2] for run in RUNS}
    assert named == {
        "GymnasiumEnvironment",
        "MCPEnvironment",
        "OpenEnvEnvironment",
        "VerifiersEnvironment",
    }
    assert all(hasattr(rlhf_rollout, name) for name in named)
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(program, "environments.md", "exec")
