from pathlib import Path

import pytest
import yaml
from rlhf_algos import from_mapping
from rlhf_launch.config.run import RunConfig
from rlhf_launch.offline.run import ScaledOfflineConfig

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path):
    settings = yaml.safe_load(path.read_text())
    offline = isinstance(settings["model"], str)
    assert from_mapping(ScaledOfflineConfig if offline else RunConfig, settings, source=str(path))
