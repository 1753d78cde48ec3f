"""The layouts of the paper in docs/plan.md are those that the planner says now."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "plan_published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("plan_published", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["plan_published"]


def test_the_page_has_the_tables_of_the_script(published):
    assert published.block() in published.PAGE.read_text()


def test_pairs_share_the_gpus_and_fit_half_as_many(published):
    example = published.layouts()[-1]
    with published.configured(example) as (config, hosts):
        assert sum(host.gpus for host in hosts) == 16
        assert [set(members) for members in config.shared] == [{"policy", "reference"}, {"critic", "reward model"}]
