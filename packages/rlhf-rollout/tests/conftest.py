"""Makes the tests' own modules importable, here and in child processes."""

import os
import sys
from pathlib import Path

import pytest

MODULES = str(Path(__file__).parent / "reward_modules")
sys.path.insert(0, MODULES)
# Modules beside the tests.
sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "families"))


@pytest.fixture(scope="session")
def child_path():
    """Child processes find the tests' reward functions too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [MODULES, os.environ.get("PYTHONPATH")])))
        yield
