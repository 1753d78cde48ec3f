"""A handful of kills; `nox -s chaos` has hundreds."""

import pytest
from chaos.campaign import Campaign
from chaos.forms import forms, write_inputs
from chaos.warm import WarmStarter

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def starter():
    with WarmStarter() as starter:
        yield starter


@pytest.mark.parametrize(("form", "kills"), [("alternation", 2), ("asynchronous", 2), ("dpo", 1)])
def test_a_run_that_is_killed_and_resumed_loses_nothing(inputs, starter, form, kills):
    campaign = Campaign(forms(inputs)[form], inputs, seed=3, starter=starter)
    life = campaign.run_life(0, kills)
    assert len(life.kills) == kills
    assert life.resumes + life.begun_anew >= 1
    assert (life.differences, life.faults, life.left) == ([], [], [])
