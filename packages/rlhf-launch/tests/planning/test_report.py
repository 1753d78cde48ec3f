from dataclasses import replace

import pytest
from rlhf_launch.config.rollout import Overlap
from rlhf_launch.planning.calibration import Seconds
from rlhf_launch.planning.report import overlap_line


def seconds(**values):
    found = {name.replace("_", " "): Seconds(value=value, factor=1.5) for name, value in values.items()}
    return {**found, "step": Seconds(value=sum(values.values()), factor=1.5)}


@pytest.fixture
def config(make_config, settings):
    return make_config(settings)


BALANCED = seconds(generation=100.0, weight_sync=4.0, scoring=30.0, training=50.0)


def test_overlap_pays_where_generation_and_training_take_about_as_long(config):
    # 184 s in turns; generation (100 s) hides scoring and training (80 s), and the sync is left.
    said = overlap_line(config, BALANCED)
    assert said.startswith("overlap: pays, 104 s a step at best, 184 s in turns (rollout.overlap.max_staleness=1)")
    assert "up to 1 weight update old" in said


def test_overlap_hardly_pays_where_one_part_is_nearly_all(config):
    said = overlap_line(config, seconds(generation=100.0, weight_sync=4.0, scoring=1.0, training=3.0))
    assert said == "overlap: hardly pays, 104 s a step at best, 108 s in turns"


def test_overlap_that_is_on_says_how_old_samples_get(config):
    def with_overlap(**options):
        return replace(config, rollout=replace(config.rollout, overlap=Overlap(**options)))

    assert overlap_line(with_overlap(max_staleness=2), BALANCED).endswith(
        "samples are then up to 2 weight updates old"
    )
    paused = overlap_line(with_overlap(pause_while_training=True), BALANCED)
    assert paused.startswith("overlap: pays")
    assert "pause_while_training=false" in paused


def test_roles_that_share_devices_with_generation_cannot_overlap(config):
    placement = config.placement.sharing("rollout", "policy")
    assert "shares its devices with policy" in overlap_line(replace(config, placement=placement), BALANCED)
