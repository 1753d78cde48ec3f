"""A run's directory: begun, resumed with the same meaning, moved aside; never spoilt."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rlhf_algos.run_directory.checkpoints import CheckpointStore
from rlhf_algos.run_directory.directory import Start, open_run_directory
from rlhf_core import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Train:
    batch_size: int = 4
    steps: int = 10
    ranks: int = 1
    optimizer: dict = field(default_factory=lambda: {"schedule": "constant", "warmup": 0.0})


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path
    train: Train = field(default_factory=Train)
    evaluation: dict = field(default_factory=lambda: {"every": 0})
    seed: int = 0


FINGERPRINT = {"data.train[0]": {"bytes": 3, "sha256": "a"}, "tokenizer": "t"}


def fill(folder):
    (folder / "weights").write_text("w")


class Runs:
    def __init__(self, folder):
        self.config = Config(output=folder)
        self.store = CheckpointStore(folder / "checkpoints", say=self.say)
        self.said = []

    def say(self, line):
        self.said.append(line)

    def open(self, config=None, *, fingerprint=FINGERPRINT, **start):
        return open_run_directory(config or self.config, fingerprint, self.store, Start(**start), say=self.say)

    def record(self):
        return json.loads((self.config.output / "run.json").read_text())

    def saved(self, *steps):
        """A run that has ended after these checkpoints; its id."""
        with self.open() as run:
            for step in steps:
                self.store.write(step, {}, fill)
            return run.run_id


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path / "run")


def test_a_run_leaves_its_record_and_its_configuration(runs):
    with runs.open() as run:
        assert run.folder.is_absolute()
        assert run.resumed is None
    record = runs.record()
    assert record["run_id"] == run.run_id
    assert record["settings"]["train"]["batch_size"] == 4
    assert record["fingerprint"] == FINGERPRINT
    assert {"torch", "rlhf-algos"} <= set(record["versions"])
    assert "batch_size: 4" in (runs.config.output / "config.yaml").read_text()


@pytest.mark.parametrize("held", ["checkpoints", "metrics.jsonl", "model", "best"])
def test_what_an_earlier_run_left_is_not_spoilt(runs, held):
    runs.saved(*([1] if held == "checkpoints" else []))
    folder = runs.config.output
    if held == "metrics.jsonl":
        (folder / held).write_text("{}\n")
    else:
        (folder / held).mkdir(exist_ok=True)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ConfigError, match=r"--resume .* --overwrite"), runs.open():
        pass
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_start_that_came_to_nothing_is_no_hindrance(runs):
    first = runs.saved()
    with runs.open() as run:
        assert run.run_id != first


def test_overwrite_moves_the_earlier_run_aside_and_loses_nothing(runs, tmp_path):
    first = runs.saved(1)
    with runs.open(overwrite=True) as run:
        assert run.resumed is None
        assert runs.store.steps() == []
    aside = tmp_path / f"run.{first}"
    assert (aside / "checkpoints" / "step-000001" / "weights").read_text() == "w"
    assert str(aside) in runs.said[0]
    with runs.open(overwrite=True):  # there is nothing to move
        pass
    assert len(runs.said) == 1


def test_overwrite_and_resume_contradict_each_other():
    with pytest.raises(ConfigError, match="write only one"):
        Start(resume=True, overwrite=True)


def test_two_runs_do_not_share_a_directory(runs):
    with runs.open():
        for start in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match="is in use by process"), runs.open(**start):
                pass


def test_resume_goes_on_from_the_newest_checkpoint_as_the_same_run(runs):
    first = runs.saved(1, 2)
    with runs.open(resume=True) as run:
        assert (run.run_id, run.step) == (first, 2)
        assert run.resumed.path.name == "step-000002"
    assert runs.said == [f"resumed run {first} after step 2"]
    assert [note["step"] for note in runs.record()["resumed"]] == [2]


def test_a_run_without_a_checkpoint_yet_is_resumed_from_its_beginning(runs):
    first = runs.saved()
    with runs.open(resume=True) as run:
        assert (run.run_id, run.step, run.resumed) == (first, 0, None)
    assert "from its beginning" in runs.said[0]


def test_nothing_to_resume(runs, tmp_path):
    with pytest.raises(DataError, match="holds no run"), runs.open(resume=True):
        pass
    assert not runs.config.output.exists()
    runs.saved()
    (runs.config.output / "model").mkdir()
    with pytest.raises(DataError, match="has ended and left no checkpoint"), runs.open(resume=True):
        pass


def test_a_damaged_newest_checkpoint_is_said_and_passed_over(runs):
    runs.saved(1, 2)
    (runs.store.path(2) / "weights").unlink()
    with runs.open(resume=True) as run:
        assert run.step == 1
    assert "step-000002" in runs.said[0]


class TestOtherSettings:
    def resume(self, runs, *, fingerprint=FINGERPRINT, evaluation=None, **train):
        config = replace(runs.config, train=replace(runs.config.train, **train))
        if evaluation:
            config = replace(config, evaluation=evaluation)
        with runs.open(config, fingerprint=fingerprint, resume=True) as run:
            return run

    def test_what_changes_the_run_is_refused_and_nothing_is_rewritten(self, runs):
        runs.saved(1)
        before = runs.record()
        with pytest.raises(ConfigError, match=r"would be another one: train.batch_size was 4, is 5\. Restore"):
            self.resume(runs, batch_size=5)
        for other in ({"tokenizer": "u"}, {"data.train[0]": {"bytes": 3, "sha256": "b"}}):
            with pytest.raises(ConfigError, match=rf"{next(iter(other))[:9]}.* has other content"):
                self.resume(runs, fingerprint={**FINGERPRINT, **other})
        with (
            pytest.raises(ConfigError, match="seed was 0, is 1"),
            runs.open(replace(runs.config, seed=1), resume=True),
        ):
            pass
        assert runs.record() == before

    def test_what_changes_nothing_is_said(self, runs):
        runs.saved(1)
        self.resume(runs, steps=20, evaluation={"every": 5})
        assert "  changed: train.steps was 10, is 20" in runs.said
        assert "  changed: evaluation.every was 0, is 5" in runs.said
        assert runs.record()["settings"]["train"]["steps"] == 20
        assert "train.steps was 10, is 20" in runs.record()["resumed"][0]["changed"]

    def test_what_changes_the_last_bits_is_said_so(self, runs):
        runs.saved(1)
        self.resume(runs, ranks=2)
        assert "  changed, so the last bits may differ: train.ranks was 1, is 2" in runs.said

    @pytest.mark.parametrize("optimizer", [{"schedule": "cosine"}, {"schedule": "constant", "warmup": 0.1}])
    def test_another_length_is_another_course_where_the_learning_rate_follows_it(self, runs, optimizer):
        runs.config = replace(runs.config, train=Train(optimizer=optimizer))
        runs.saved(1)
        with pytest.raises(ConfigError, match=r"train\.steps was 10, is 20"):
            self.resume(runs, steps=20)

    def test_a_record_that_cannot_be_read_is_refused(self, runs):
        runs.saved(1)
        (runs.config.output / "run.json").write_text("{")
        with pytest.raises(DataError, match="is not the record of a run"):
            self.resume(runs)


def test_an_error_gives_the_directory_back(runs):
    with pytest.raises(ZeroDivisionError), runs.open():
        1 / 0  # noqa: B018
    with runs.open():
        pass
