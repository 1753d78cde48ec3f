import json

import pytest
from rlhf_core import CheckpointError, RandomState
from rlhf_train.checkpoint.checkpoint import EngineState, Progress, load_checkpoint, save_checkpoint
from rlhf_train.parallel.ranks import RankInfo, TrainingRanks
from torch import device, equal, rand

RANKS = TrainingRanks(RankInfo())


def test_a_frozen_engine_keeps_its_counters_and_random_state(tmp_path):
    random = RandomState(7, device("cpu"))
    progress = Progress(steps_taken=3, skipped_in_a_row=1)
    save_checkpoint(None, tmp_path, EngineState(progress=progress, random=random.state), ranks=RANKS, stage=2)
    state = EngineState(progress=Progress(), random=[])
    load_checkpoint(None, tmp_path, state, ranks=RANKS, stage=2)
    assert state.progress == progress
    assert equal(state.random[0], random.state[0])


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"engine\.json is missing"):
        load_checkpoint(None, tmp_path, EngineState(progress=Progress(), random=[]), ranks=RANKS, stage=2)


@pytest.mark.parametrize("change", [{"stage": 3}, {"trained": True}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, change):
    empty = EngineState(progress=Progress(), random=[])
    save_checkpoint(None, tmp_path, empty, ranks=RANKS, stage=2)
    written = json.loads((tmp_path / "engine.json").read_text())
    (tmp_path / "engine.json").write_text(json.dumps(written | change))
    with pytest.raises(CheckpointError, match="resume with the same settings"):
        load_checkpoint(None, tmp_path, empty, ranks=RANKS, stage=2)


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


@pytest.mark.parametrize("name", ["engine.json", "random-0.pt", "zero/mp_rank_00_model_states.pt"])
def test_a_damaged_file_is_named(tmp_path, name):
    state = EngineState(progress=Progress(), random=RandomState(7, device("cpu")).state)
    save_checkpoint(None, tmp_path, state, ranks=RANKS, stage=2)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(file.read_bytes()[:-9] if file.exists() else b"PK")
    with pytest.raises(CheckpointError, match=f"cannot be loaded: the file .*{name}' is damaged"):
        load_checkpoint(None, tmp_path, state, ranks=RANKS, stage=2)


def test_a_missing_file_is_named(tmp_path):
    state = EngineState(progress=Progress(), random=RandomState(7, device("cpu")).state)
    save_checkpoint(None, tmp_path, state, ranks=RANKS, stage=2)
    (tmp_path / "random-0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"random-0\.pt' is missing"):
        load_checkpoint(None, tmp_path, state, ranks=RANKS, stage=2)
