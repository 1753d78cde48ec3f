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


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        # what a policy of 135M parameters found out in twenty steps of GRPO
        ("To find 39 - 39, we need to perform the inverse", "0", False),
        ("To find 68 + 59, we need to combine the numbers", "127", False),
        ("39 - 39 =", "0", False),
        ("\\boxed{68+59}", "127", False),
        ("$68 \\times 2$", "136", False),
        ("(2+3)*4", "20", False),
        ("84/2", "42", False),
        ("1/3 + 1/3", "2/3", False),
        ("$x = 3 + 4$", "7", False),
        # what is worked out, or needs no more work
        ("68+59=127", "127", True),
        ("$x = 7$", "7", True),
        ("-30", "-30", True),
        ("1/2", "0.5", True),
        ("-3/4", "-0.75", True),
        ("50%", "0.5", True),
        ("2^10", "1024", True),
        ("$3 \\cdot 10^6$", "3000000", True),
        ("$\\sqrt{16}$", "4", True),
        ("$2+3\\sqrt{2}$", "$2+3\\sqrt{2}$", True),
        ("68+59", "68+59", True),
        ("$(3, -4)$", "$(3,-4)$", True),
    ],
)
def test_a_calculation_is_no_answer_where_a_number_was_asked_for(completion, answer, right):
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
