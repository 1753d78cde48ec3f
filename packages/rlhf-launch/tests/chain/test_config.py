"""Chains as files: what their stages may say, and what is refused before anything is loaded."""

import pytest
import yaml
from rlhf_algos import OfflineConfig, from_mapping
from rlhf_core import ConfigError
from rlhf_launch.chain.config import ChainConfig
from rlhf_launch.chain.run import read_chain
from rlhf_launch.config.run import OnlineConfig


def stages(**changes):
    found = {
        "sft": {"command": "offline", "algorithm": "sft", "model": "base", "data": {"train": "a"}},
        "rm": {"command": "offline", "algorithm": "rm", "model": "stage.sft", "data": {"train": "b"}},
        "ppo": {
            "command": "train",
            "algorithm": "ppo",
            "model": {"path": "stage.sft", "critic": "stage.rm.best"},
            "data": {"train": "c"},
            "reward": {
                "parts": {"one": {"kind": "model", "path": "stage.rm"}, "two": {"kind": "length", "high": 9}}
            },
            "rollout": {"samples_per_prompt": 1},
        },
    }
    for key, value in changes.items():
        name, _, field = key.partition("__")
        found[name] = value if not field else {**found[name], field: value}
    return found


def chain(**changes):
    return from_mapping(ChainConfig, {"stages": stages(**changes), "output": "out", "seed": 3}, source="test")


def test_models_flow_from_stage_to_stage():
    found = chain(rm__seed=7)
    assert found.needs("sft") == ()
    assert found.needs("rm") == ("sft",)
    assert found.needs("ppo") == ("sft", "rm")
    ppo = found.stage("ppo", {"sft": "out/sft/model", "rm": "out/rm/model"}, {"rm": "out/rm/best"})
    assert isinstance(ppo, OnlineConfig)
    assert (ppo.model.path, ppo.model.critic) == ("out/sft/model", "out/rm/best")
    assert ppo.reward.parts["one"].path == "out/rm/model"
    assert str(ppo.output) == "out/ppo"
    parsed = found.parsed()
    assert isinstance(parsed["rm"], OfflineConfig)
    assert [stage.seed for stage in parsed.values()] == [3, 7, 3]
    # What is to come is stood for by the model that it begins with.
    assert [stage.model.path for stage in parsed.values()] == ["base"] * 3
    with pytest.raises(ConfigError, match=r"'rm' left no best model; give it data\.hold_out"):
        found.stage("ppo", {"sft": "a", "rm": "b"}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rm__model": "stage.sfd"}, r"stages\.rm\.model=stage\.sfd: did you mean 'sft'\?.*earlier ones are sft"),
        ({"sft__model": "stage.sft"}, "it is the first one"),
        ({"sft__model": "stage.rm"}, "it is the first one"),
        ({"rm__command": "offlin"}, r"stages\.rm\.command says what the stage runs, found 'offlin'"),
        ({"rm": "rm.yaml"}, r"stages\.rm must hold the settings of a run, found str"),
        ({"rm__output": "x"}, r"stages\.rm\.output is given by the chain \(out/rm\)"),
        ({"rm__modle": "x"}, r"unknown key 'stages\.rm\.modle'"),
        ({"ppo__train": {"stepps": 3}}, r"stages\.ppo\.train\.stepps"),
        ({"Two Words": {}}, "'Two Words' is no name for a stage"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        chain(**changes)


def test_only_offline_stages_leave_a_best_model():
    more = {"command": "offline", "algorithm": "dpo", "model": "stage.ppo.best", "data": {"train": "a"}}
    with pytest.raises(ConfigError, match=r"stage\.ppo\.best: only offline stages"):
        chain(dpo=more)


def test_a_chain_needs_a_stage():
    with pytest.raises(ConfigError, match="stages is empty"):
        from_mapping(ChainConfig, {"stages": {}}, source="test")


def test_settings_on_top_of_a_file(tmp_path):
    path = tmp_path / "chain.yaml"
    path.write_text(yaml.safe_dump({"stages": stages()}, sort_keys=False))
    found = read_chain(path, ["stages.ppo.train.steps=7", "seed=2"])
    assert found.parsed()["ppo"].train.steps == 7
    assert found.seed == 2
    with pytest.raises(ConfigError, match=r"chain\.yaml.*stages\.ppo\.train\.stepz"):
        read_chain(path, ["stages.ppo.train.stepz=7"])
