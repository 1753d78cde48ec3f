import pytest
import torch
from rlhf_algos.advantages.estimator import Advantage, AdvantageConfig
from rlhf_algos.advantages.registry import ADVANTAGES, make_advantage
from rlhf_core import Batch, ConfigError, PluginError

MASK = torch.tensor([[True, True], [True, False]])
ROWS = Batch(
    token_ids=torch.ones(2, 2, dtype=torch.long),
    attention_mask=MASK,
    response_mask=MASK,
    columns={"greedy_scores": torch.tensor([0.5, 0.5])},
)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"scale": "none"}, [-1.0, 1.0]),
        ("grpo", {}, [-(0.5**0.5), 0.5**0.5]),
        ("rloo", {}, [-2.0, 2.0]),
        ("reinforce", {}, [1.0, 3.0]),
        ("remax", {}, [0.5, 2.5]),
        ("opo", {}, [1 - 5 / 3, 3 - 5 / 3]),
    ],
)
def test_by_name_and_options(name, options, expected):
    advantage = make_advantage(name, options)
    got = advantage(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), ROWS)
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_every_config_says_what_its_estimator_needs():
    for name, (_, kind) in ADVANTAGES.items():
        assert issubclass(kind, AdvantageConfig), name
    assert make_advantage("remax").says("needs_greedy_scores")
    assert make_advantage("grpo").says("min_samples_per_prompt") == 2
    assert make_advantage("grpo", {"singleton": "score"}).says("min_samples_per_prompt") == 1
    assert make_advantage("reinforce").says("min_samples_per_prompt") == 1


def test_a_function_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "own_estimators.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    factor: float = 1.0\n"
        "    min_samples_per_prompt: int = 3\n"
        "def typed(scores, group_ids, batch, config: Config):\n    return scores * config.factor\n"
        "def untyped(scores, group_ids, batch, config):\n    return scores * config['factor']\n"
        "def short(scores, group_ids):\n    return scores\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, at_least in (("typed", 3), ("untyped", 1)):
        advantage = make_advantage(f"own_estimators:{name}", {"factor": 2.0})
        assert advantage(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), ROWS).tolist() == [2, 6]
        assert advantage.says("min_samples_per_prompt") == at_least
    with pytest.raises(ConfigError, match="did you mean 'factor'"):
        make_advantage("own_estimators:typed", {"facto": 2.0})
    with pytest.raises(ConfigError, match="scores, group_ids, batch, config"):
        make_advantage("own_estimators:short")
    with pytest.raises(ConfigError, match="write a function"):
        make_advantage("own_estimators:Config")


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="did you mean 'rloo'"):
        make_advantage("rlo")
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        make_advantage("grpo", {"scal": "none"})
    with pytest.raises(ConfigError, match="group, batch, advantages, none"):
        make_advantage("grpo", {"scale": "std"})
    with pytest.raises(PluginError):
        make_advantage("no_such_module:f")


def test_a_config_without_properties_has_the_defaults():
    assert Advantage(function=lambda *_: torch.zeros(1), config={"a": 1}).says("score_parts") == ()
