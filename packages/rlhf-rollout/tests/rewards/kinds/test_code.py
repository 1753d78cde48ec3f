"""The reward for programs that pass tests."""

import pytest
from reward_ground import score, values
from rlhf_core import CapabilityError, ConfigError, DataError, ProgramLimits, RewardError, SandboxError
from rlhf_rollout import CodeReward, CodeRewardConfig, UnconfinedSandbox

ASSERTS = "assert double(2) == 4\nassert double(-1) == -2"
RIGHT = "Like this:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


def reward(**settings):
    return CodeReward(CodeRewardConfig(**settings), sandbox=UnconfinedSandbox())


def test_asserts():
    texts = [RIGHT, "def double(x): return x * x", "```python\nexit(0)\n```", "```python\n```", "no code at all"]
    found = score(reward(), texts, tests=ASSERTS)
    assert [s.value for s in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.components["no_code"] for s in found] == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert [s.value for s in score(reward(partial=True), texts[:2], tests=ASSERTS)] == [1.0, 0.5]


def test_pairs_of_input_and_output():
    tests = [{"input": "2\n", "output": "4"}, {"input": "3", "output": "6\n"}, {"input": "0", "output": "1"}]
    text = "print(2 * int(input()))  "
    assert values(reward(), [text], tests=tests) == [0.0]
    assert values(reward(), [text], tests=tests[:2]) == [1.0]
    assert values(reward(partial=True), [text], tests=tests) == [pytest.approx(2 / 3)]


def test_columns_of_data_sets():
    check = "def check(candidate):\n    assert candidate(2) == N"
    made = reward(column="test", setup_column="test_setup_code")
    assert values(made, [RIGHT], test=check, entry_point="double", test_setup_code=["N = 4"]) == [1.0]
    assert CodeRewardConfig(sandbox="none", setup_column="x").make("code")[1] == {"tests", "x"}


def test_a_program_that_hangs_scores_nothing_and_says_so():
    made = reward(limits=ProgramLimits(wall_s=0.5))
    (found,) = score(made, ["while True: pass"], tests="assert f(1) == 1")
    assert (found.value, found.components["timeout"]) == (0.0, 1.0)


@pytest.mark.parametrize("tests", [None, "", [], [{"input": "1"}], 7, "pass"])
def test_rows_without_tests_are_refused(tests):
    with pytest.raises(DataError, match="'s0'"):
        values(reward(), ["print(1)"], tests=tests)
    with pytest.raises(DataError, match="needs the column 'tests'"):
        values(reward(), ["print(1)"])


def test_tests_in_python_are_for_programs_in_python():
    with pytest.raises(DataError, match="programs are run by node"):
        values(reward(command=("node", "main.js")), ["x"], tests=ASSERTS)


def test_a_sandbox_that_fails_is_no_score():
    class Broken:
        def run(self, program):
            raise SandboxError("out of order")

    with pytest.raises(RewardError, match="out of order") as caught:
        values(CodeReward(sandbox=Broken()), [RIGHT], tests=ASSERTS)
    assert caught.value.sample_ids == ("s0",)


def test_without_a_sandbox_it_is_refused_when_it_is_made(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapabilityError, match="reward 'code'"):
        CodeRewardConfig().make("code")


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="workers"):
        CodeRewardConfig(workers=0)
    with pytest.raises(ConfigError, match="tolerance"):
        CodeRewardConfig(tolerance=-1)
    with pytest.raises(ConfigError, match="command"):
        CodeRewardConfig(command=())
