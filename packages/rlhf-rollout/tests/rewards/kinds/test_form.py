"""Rewards by rules: form, likeness, length; as functions and with their options."""

import pytest
from reward_ground import score, values
from rlhf_core import PluginError, RewardError
from rlhf_rollout import PythonReward, format_match, fuzzy_match, length_match


def test_form():
    form = r"<think>.*</think>\s*\d+"
    assert format_match(" <think>a\nb</think>\n42\n", pattern=form) == 1.0
    assert format_match("<think>a</think> 42, I think", pattern=form) == 0.0
    assert format_match("So <think>a</think> 42, I think", pattern=form, whole=False) == 1.0


def test_likeness():
    assert fuzzy_match("work #### 72", "72") == 1.0
    assert fuzzy_match("", "") == 1.0
    assert fuzzy_match("abcd", "bcde") == 0.75
    assert fuzzy_match("abcd", "bcde", threshold=0.8) == 0.0


def test_length():
    assert length_match([1, 2, 3], "", high=2, slack=4) == 0.75
    assert length_match([], "", low=1, high=2) == 0.0


def test_options_reach_the_function_and_no_column_replaces_them():
    reward = PythonReward("rlhf_rollout:format_match", options={"pattern": "a+"})
    assert values(reward, ["aaa", "b"], pattern="b") == [1.0, 0.0]
    assert values(PythonReward(length_match, options={"high": 5}), ["x"]) == [1.0]


def test_unknown_options_are_refused():
    with pytest.raises(PluginError, match=r"no option 'patern'; it has .*pattern"):
        PythonReward(format_match, options={"patern": "a"})


def test_a_missing_option_is_a_missing_column():
    with pytest.raises(RewardError, match="needs the column 'pattern'"):
        score(PythonReward(format_match), ["x"])


def test_a_broken_pattern_is_named():
    with pytest.raises(RewardError, match="not a regular expression"):
        score(PythonReward(format_match, options={"pattern": "("}), ["x"])
