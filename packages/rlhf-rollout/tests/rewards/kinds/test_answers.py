"""Verifiable rewards, in the main thread and, as in a run, in another one."""

import asyncio

import pytest
from rlhf_core import RewardError, Trajectory
from rlhf_rollout import PythonReward, exact_match, math_answer
from rlhf_rollout.rewards.kinds.answers import after_hashes


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("48/2 = 24, so \\boxed{72}", "48/2=<<48/2=24>>24\n#### 72", True),
        ("The answer is 72.", "... #### 72", True),
        ("6*12\n#### 72\n", "... #### 72", True),
        ("#### 1,042", "#### 1042", True),
        ("#### 1042", "#### 1,042", True),
        ("#### 73", "... #### 72", False),
        ("It is \\frac{1}{2}.", "0.5", True),
        ("so $x^2 + 2x + 1$", "(x+1)^2", True),
        ("no idea", "72", False),
        ("", "72", False),
        ("#### ", "72", False),
        ("\\boxed{\\frac{3}{4}}", "\\frac{6}{8}", True),
        ("\\boxed{-3}", "3", False),
    ],
)
def test_math_answer(completion, answer, right):
    assert math_answer(completion, answer) == float(right)


def test_a_gold_answer_without_mathematics_is_an_error_in_the_data():
    with pytest.raises(ValueError, match="gold answer"):
        math_answer("72", "")


def test_exact_match():
    assert exact_match(" Paris\n", "Paris") == 1.0
    assert exact_match("paris", "Paris") == 0.0
    assert exact_match("thinking ... #### 7", "#### 7") == 1.0


def test_after_hashes_takes_the_last_mark_and_its_line():
    assert after_hashes("#### 1\n#### 2 \nmore") == "2"
    assert after_hashes("no mark") == "no mark"


def test_it_works_in_the_thread_of_a_python_reward():
    def sample(index: int, answer: str) -> Trajectory:
        return Trajectory(
            sample_id=f"s{index}",
            group_id="g",
            token_ids=(5, 6),
            response_mask=(False, True),
            rollout_log_probs=(0.0, -0.1),
            weight_versions=(-1, 0),
            metadata={"prompt": "?", "answer": answer},
        )

    reward = PythonReward("rlhf_rollout:math_answer")
    scores = asyncio.run(reward.score([sample(0, "#### 4"), sample(1, "5")], ["2+2 = 4", "2+2 = 4"]))
    assert [score.value for score in scores] == [1.0, 0.0]
    with pytest.raises(RewardError, match="sample 's0': the gold answer"):
        asyncio.run(reward.score([sample(0, "")], ["4"]))
