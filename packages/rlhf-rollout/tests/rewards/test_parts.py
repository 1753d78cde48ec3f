"""Every kind of reward, made from its configuration: what it scores and which columns it needs."""

import socket

import pytest
from reward_ground import score, servers, values
from rlhf_core import ConfigError, PluginError
from rlhf_rollout import (
    CodeRewardConfig,
    EndpointsConfig,
    EnvironmentRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    FuzzyRewardConfig,
    HTTPRewardConfig,
    JudgeRewardConfig,
    LengthRewardConfig,
    MathRewardConfig,
    PythonReward,
    RegexRewardConfig,
    StepRewardConfig,
    unreachable,
)


@pytest.fixture
def make():
    """Parts to rewards; closed at the end."""
    made = []

    def make(part, name="part"):
        reward, columns = part.make(name)
        made.append(reward)
        return reward, columns

    yield make
    for reward in made:
        if hasattr(reward, "close"):
            reward.close()


@pytest.mark.parametrize(
    ("part", "texts", "row", "expected"),
    [
        (ExactRewardConfig(answer="gold"), ["4", "5", "so #### 4"], {"gold": "4"}, [1.0, 0.0, 1.0]),
        (FuzzyRewardConfig(answer="gold", threshold=0.8), ["ABCD", "bcde"], {"gold": "abcd"}, [1.0, 0.0]),
        (RegexRewardConfig(pattern="a+"), ["aa", "ba"], {}, [1.0, 0.0]),
        (RegexRewardConfig(pattern="a+", whole=False), ["aa", "ba", "b"], {}, [1.0, 1.0, 0.0]),
        (LengthRewardConfig(high=1), ["x"], {}, [1.0]),
        (
            MathRewardConfig(answer="gold", isolated=False),
            ["It is 0.5", "1/3"],
            {"gold": "\\frac{1}{2}"},
            [1.0, 0.0],
        ),
    ],
)
def test_rules(make, part, texts, row, expected):
    reward, columns = make(part)
    assert values(reward, texts, **row) == expected
    assert columns == set(row)


def test_a_function_with_options_and_a_renamed_column(make):
    options = {"threshold": 0.5}
    part = FunctionRewardConfig(function="rlhf_rollout:fuzzy_match", options=options, columns={"answer": "gold"})
    reward, columns = make(part)
    assert columns == {"gold"}
    assert values(reward, ["abcd"], gold="abcd") == [1.0]
    with pytest.raises(PluginError, match="no parameter 'answr' to take the column 'gold'"):
        PythonReward(lambda completion, answer: 1.0, columns={"answr": "gold"})


@pytest.mark.stack
def test_a_function_that_is_not_there_is_refused_when_it_is_made(child_path):
    for isolated in (False, True):
        with pytest.raises(PluginError, match="nowhere"):
            FunctionRewardConfig(function="nowhere:f", isolated=isolated).make("x")


@pytest.mark.stack
def test_isolated_mathematics_scores_what_takes_for_ever_with_zero(make):
    reward, columns = make(MathRewardConfig(timeout_s=4.0))
    assert columns == {"answer"}
    # Evaluating this takes longer than anyone waits, and holds Python's lock meanwhile.
    found = score(reward, ["\\boxed{7}", "\\boxed{9^{9^{9^{9}}}}"], answer="7")
    assert [one.value for one in found] == [1.0, 0.0]
    assert [one.components["too_slow"] for one in found] == [0.0, 1.0]


@pytest.mark.stack
def test_isolated_patterns_that_backtrack_without_end(make):
    reward, _ = make(RegexRewardConfig(pattern="(a+)+b", isolated=True, timeout_s=1.0))
    found = score(reward, ["aab", "a" * 60])
    assert [one.value for one in found] == [1.0, 0.0]
    assert [one.components["too_slow"] for one in found] == [0.0, 1.0]


def test_services_and_judges(make):
    def scores(body):
        return 200, {"scores": [len(text) for text in body["completions"]]}

    def rates(body):
        return 200, {"choices": [{"message": {"content": "Fine. Rating: 10"}}]}

    with servers(scores, rates) as (service, judge):
        http, columns = make(HTTPRewardConfig(endpoints=EndpointsConfig(urls=(service.url,)), columns=("topic",)))
        assert values(http, ["a", "bb"], topic="t") == [1.0, 2.0]
        assert columns == {"topic"}
        asked, columns = make(
            JudgeRewardConfig(
                endpoints=EndpointsConfig(urls=(judge.url,)), model="m", template="{rubric} {completion}"
            )
        )
        assert values(asked, ["a"], rubric="Be strict.") == [1.0]
        assert columns == {"rubric"}
        assert unreachable([service.url]) == {}


def test_code(make):
    reward, columns = make(CodeRewardConfig(column="checks", sandbox="none"))
    assert columns == {"checks"}
    assert values(reward, ["x = 1", "x = 2"], checks="assert x == 1") == [1.0, 0.0]


def test_the_environment(make):
    reward, columns = make(EnvironmentRewardConfig())
    assert values(reward, ["a"]) == [0]
    assert columns == set()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: RegexRewardConfig(pattern="("), "not a regular expression"),
        (lambda: LengthRewardConfig(low=4, high=2), "low <= high"),
        (lambda: StepRewardConfig(path="m", placeholder="<s>", aggregate="sum"), "aggregate 'sum'"),
        (lambda: EndpointsConfig(urls=("http//host",)), "is not an address"),
        (lambda: EndpointsConfig(urls=("http://",)), "is not an address"),
        (lambda: EndpointsConfig(urls=("http://host:99999",)), "is not an address"),
    ],
)
def test_wrong_settings_are_refused_at_once(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_servers_that_cannot_be_reached_are_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/score"
        assert "Refused" in unreachable([url])[url]
