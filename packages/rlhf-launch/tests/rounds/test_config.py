import pytest
from rlhf_algos import PairsConfig, ThresholdConfig, from_mapping, load_config
from rlhf_core import ConfigError
from rlhf_launch.config.printing import printed
from rlhf_launch.rounds.config import RoundsConfig
from rlhf_launch.rounds.parts import RoundFolder, evaluation_config, generation_config, training_config

BASE = {"model": "m", "data": {"train": "p.jsonl"}, "output": "out", "reward": {"function": "a:b"}}


def make(**changes):
    return from_mapping(RoundsConfig, BASE | changes, source="test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rounds": []}, "rounds must be at least 1"),
        ({"model": {"path": "m", "reference": "r"}}, "write reference: round"),
        ({"data": {"train": "p.jsonl", "hold_out": 3}}, "name held-out prompts in evaluation.data"),
        ({"select": {"kind": "pairs"}}, "write select.kind: best_of_n or threshold or quantile or conditional"),
        ({"algorithm": "dpo"}, "write select.kind: pairs"),
        ({"algorithm": "kto"}, "write select.kind: pairs or labels"),
        ({"algorithm": "prm"}, "cannot train on chosen answers"),
        ({"select": {"kind": "best"}}, "must be one of best_of_n"),
        ({"rounds": [{"seed": 3}]}, r"rounds\[0\]: 'seed' is the same in all rounds"),
        ({"rounds": [{}, {"train": {"epoch": 3}}]}, r"rounds\[1\]: unknown key 'train.epoch'"),
        ({"rounds": [{}, {"algorithm": "dpo"}]}, r"rounds\[1\]: select.kind=best_of_n"),
        ({"evaluation": {"samples": 4, "temperature": 0}}, "makes all samples of a prompt equal"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_round_has_the_settings_of_all_with_its_own_on_top():
    own = {"select": {"kind": "pairs", "min_margin": 0.5}, "algorithm": {"name": "dpo", "beta": 0.3}}
    config = make(
        rounds=[{}, {"select": {"kind": "threshold", "threshold": 0.2}}, own],
        train={"epochs": 3, "optimizer": {"learning_rate": 1e-5}},
    )
    assert config.count == 3
    assert config.of_round(1) == make(rounds=1, train={"epochs": 3, "optimizer": {"learning_rate": 1e-5}})
    assert config.of_round(2).select == ThresholdConfig(threshold=0.2)
    third = config.of_round(3)
    assert (third.select, third.algorithm.loss.beta) == (PairsConfig(min_margin=0.5), 0.3)
    assert (third.train.epochs, third.train.optimizer.learning_rate) == (3, 1e-5)


def test_the_parts_of_a_round():
    config = make(
        lengths={"max_prompt_tokens": 10},
        rollout={"sampling": {"max_tokens": 20}},
        train={"engine": "torch", "max_skipped_steps": 2},
        evaluation={"data": "held.jsonl"},
    )
    folder = RoundFolder.of(config.output, 2)
    first, second = (generation_config(config, n, model="now", folder=folder) for n in (1, 2))
    assert (second.model.path, second.train.engine, second.train.max_skipped_steps) == ("now", "torch", 2)
    assert first.seed != second.seed
    trained = training_config(config, 2, model="now", first="m", folder=folder)
    # No row that was generated is cut.
    assert (trained.lengths.longest, trained.model.path, trained.model.reference) == (30, "now", None)
    assert str(trained.data.train[0].path) == "out/round-02/chosen.jsonl"
    evaluated = evaluation_config(config, 2, model="new", folder=folder)
    assert evaluated.generation.rollout.sampling.temperature == 0
    assert evaluated.generation.data.train[0].path == "held.jsonl"


def test_a_condition_is_asked_for_by_those_that_know_it():
    rule = {"kind": "conditional", "levels": 4, "template": "{prompt} [{attributes}]"}
    config = make(select=rule, data={"train": "p.jsonl", "prompt_template": "Q: {} A:"}, evaluation={"data": "h"})
    folder = RoundFolder.of(config.output, 1)
    templates = [generation_config(config, n, model="m", folder=folder).data.prompt_template for n in (1, 2)]
    assert templates == ["Q: {} A:", "Q: {} [score:4] A:"]
    asked = [evaluation_config(config, n, model="m", folder=folder) for n in (0, 1)]
    assert [each.generation.data.prompt_template for each in asked] == templates
    lengths = [generation_config(config, n, model="m", folder=folder).lengths.max_prompt_tokens for n in (1, 2)]
    assert lengths == [None, 1024 + len("{} [score:4]")]
    assert training_config(config, 1, model="m", first="m", folder=folder).lengths.longest > 1024 + 256


def test_what_is_printed_is_read_back(tmp_path):
    config = make(rounds=[{}, {"rollout": {"samples_per_prompt": 4}}], select={"kind": "quantile", "quantile": 0.5})
    (tmp_path / "rounds.yaml").write_text(printed(config))
    assert load_config(RoundsConfig, tmp_path / "rounds.yaml") == config
