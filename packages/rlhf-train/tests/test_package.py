import subprocess
import sys

import pytest
import rlhf_train


def test_the_public_names_are_pinned():
    assert rlhf_train.__all__ == [
        "AdaptedModel",
        "DeepSpeedEngine",
        "MergeConfig",
        "PlannedStates",
        "ZeroConfig",
        "ZeroWeights",
        "env_vars",
        "load_adapted",
        "merge_adapter",
        "pass_peak",
        "planned_states",
    ]


@pytest.mark.stack
def test_importing_the_package_imports_no_heavy_one():
    code = "import rlhf_train, sys; print([m for m in ('deepspeed', 'transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_finds_the_engine():
    from rlhf_core import TRAIN_ENGINES, load_plugin

    assert load_plugin(TRAIN_ENGINES, "deepspeed") is rlhf_train.DeepSpeedEngine
