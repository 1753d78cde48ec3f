"""The conformance kit of rlhf-core, run on a backend that depends on nothing else of the rlhf packages."""

import json
import subprocess
import sys

import pytest
from rlhf_core import ROLLOUT_BACKENDS, CapabilityError, ConfigError, RolloutConfig, load_plugin, plugin_names
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_rollout_plain import PlainBackend


class TestTied(RolloutBackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return PlainBackend


class TestUntied(TestTied):
    tied = False


@pytest.mark.skipif("plain" not in plugin_names(ROLLOUT_BACKENDS), reason="on the path, but not installed")
def test_it_is_found_by_name():
    assert load_plugin(ROLLOUT_BACKENDS, "plain") is PlainBackend


def test_it_needs_rlhf_core_alone():
    code = (
        "import sys, rlhf_rollout_plain; print([name for name in sys.modules if name.split('.')[0] in "
        "('transformers', 'vllm', 'ray', 'rlhf_rollout', 'rlhf_train', 'rlhf_algos', 'rlhf_launch')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_it_cannot_do_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="downloads nothing"):
        PlainBackend(RolloutConfig(model="some/hub-name"))
    path = save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="no options"):
        PlainBackend(RolloutConfig(model=path, options={"flash": True}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(CapabilityError, match="'gpt2'"):
        PlainBackend(RolloutConfig(model=path))
