from pathlib import Path

import pytest
import yaml
from rlhf_algos import OfflineConfig, load_config
from rlhf_launch.config.run import OnlineConfig

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path):
    online = "rollout" in yaml.safe_load(path.read_text())
    assert load_config(OnlineConfig if online else OfflineConfig, path)
