import json

import pytest
from rlhf_core import ConfigError
from rlhf_core.random_state import RandomState
from rlhf_train.checkpoint import Progress, load_checkpoint, save_checkpoint
from rlhf_train.process_group import RankInfo, TrainingRanks
from torch import device, equal, rand

RANKS = TrainingRanks(RankInfo())


def test_a_frozen_engine_keeps_its_counters_and_random_state(tmp_path):
    random = RandomState(7, device("cpu"))
    progress = Progress(steps_taken=3, skipped_in_a_row=1)
    save_checkpoint(None, tmp_path, ranks=RANKS, stage=2, progress=progress, random=random.state)
    found, state = load_checkpoint(None, tmp_path, ranks=RANKS, stage=2)
    assert found == progress
    assert equal(state[0], random.state[0])


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.json is missing"):
        load_checkpoint(None, tmp_path, ranks=RANKS, stage=2)


@pytest.mark.parametrize("change", [{"world_size": 8}, {"stage": 3}, {"trained": True}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, change):
    save_checkpoint(None, tmp_path, ranks=RANKS, stage=2, progress=Progress(), random=[])
    written = json.loads((tmp_path / "engine.json").read_text())
    (tmp_path / "engine.json").write_text(json.dumps(written | change))
    with pytest.raises(ConfigError, match="resume with the same settings"):
        load_checkpoint(None, tmp_path, ranks=RANKS, stage=2)


def test_the_engines_random_stream_is_its_own():
    random = RandomState(7, device("cpu"))
    outside = rand(1)
    with random:
        first = rand(2)
    assert not equal(outside, first)
    again = RandomState(7, device("cpu"))
    with again:
        assert equal(rand(1), first[:1])
    with again:
        assert equal(rand(1), first[1:])
