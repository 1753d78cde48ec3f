import re
from pathlib import Path

import pytest
import rlhf_launch
import yaml
from rlhf_algos import OfflineConfig, from_mapping, load_config
from rlhf_launch import ChainConfig, OnlineConfig, RoundsConfig

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(FOLDER.glob("**/*.yaml"))
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path):
    content = yaml.safe_load(path.read_text())
    kinds = {"stages": ChainConfig, "rounds": RoundsConfig, "rollout": OnlineConfig}
    kind = next((kind for key, kind in kinds.items() if key in content), OfflineConfig)
    assert load_config(kind, path)


ROUNDS = FOLDER.parent / "docs" / "rounds.md"


@pytest.mark.skipif(not ROUNDS.exists(), reason="the docs are not beside the packages here")
def test_the_files_of_the_page_on_rounds_are_configurations():
    files = re.findall(r"```yaml\n(.*?)```", ROUNDS.read_text(encoding="utf-8"), re.DOTALL)
    kinds = [from_mapping(RoundsConfig, yaml.safe_load(file), source="rounds.md").select.kind for file in files]
    assert kinds == ["best_of_n", "pairs", "conditional"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_s_run_is_a_configuration():
    (run,) = blocks("yaml")
    config = from_mapping(OnlineConfig, yaml.safe_load(run), source="README.md")
    assert (config.train.steps, config.algorithm.name) == (200, "grpo")


def test_the_readme_s_programs_name_what_there_is():
    programs = blocks("python")
    for program in programs:
        compile(program, "README.md", "exec")
    named = {name for program in programs for name in re.findall(r"from rlhf_launch import (.+)", program)}
    assert all(hasattr(rlhf_launch, name) for line in named for name in line.split(", "))
    loop = programs[-1]
    example = (FOLDER / "own_loop.py").read_text() if EXAMPLES else loop
    lines = [line.split("  #")[0].strip() for line in loop.splitlines()]
    assert all(line in example for line in lines)
