"""The recipes of examples/recipes on a tiny model: a few of them here, all with `nox -s recipes`."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "recipes"


@pytest.fixture(scope="module")
def tiny():
    sys.path.insert(0, str(FOLDER))
    import tiny

    yield tiny
    sys.path.remove(str(FOLDER))


def test_every_file_is_run(tiny):
    assert {path.stem for path in FOLDER.glob("*.yaml")} <= set(tiny.RECIPES)


@pytest.mark.stack
def test_recipes_learn(tiny, tmp_path):
    outcomes = tiny.run(["sft", "rm", "dpo", "grpo"], 1, tmp_path)
    gains = {name: found[0].after - found[0].before for name, found in outcomes.items()}
    assert gains["sft"] > 0.1
    assert gains["rm"] > 0.2
    assert gains["dpo"] > 0.05
    assert gains["grpo"] > 0.02
    assert "| `grpo` | right |" in tiny.table(outcomes)
