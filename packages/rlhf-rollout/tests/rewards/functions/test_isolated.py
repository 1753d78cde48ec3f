"""IsolatedReward: a worker that hangs, dies and prints, for real. Starting one takes seconds, so it is shared."""

import asyncio
import os
import time

import pytest
from reward_ground import score, trajectory, values
from rlhf_core import ConfigError, PluginError, RewardError
from rlhf_rollout import FailureHandling, IsolatedReward, IsolatedRewardConfig, RobustReward

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def pid_file(tmp_path_factory):
    return tmp_path_factory.mktemp("worker") / "pid"


@pytest.fixture(scope="module")
def reward(child_path, pid_file):
    options = {"pid_file": str(pid_file), "scale": 2.0}
    made = IsolatedReward(IsolatedRewardConfig(function="faulty_rewards:faulty", timeout_s=3.0, options=options))
    yield made
    made.close()


def alive(word: str) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if word.encode() in file.read().split(b"\0"):
                    return True
        except OSError:
            continue
    return False


def test_scores_options_and_prints(reward):
    assert values(reward, ["", "a", "bb"]) == [0.0, 2.0, 4.0]
    assert values(reward, []) == []


@pytest.mark.parametrize(
    ("fault", "message", "sample_ids"),
    [
        ("raise", "raised ValueError for samples 's0', 's1': cannot judge", ()),
        ("too few", "returned 1 scores for 2", ()),
        ("nan", "returned nan for sample 's1'", ("s1",)),
    ],
)
def test_faults_of_the_function_come_through_and_cost_no_process(reward, fault, message, sample_ids):
    with pytest.raises(RewardError, match=message) as raised:
        score(reward, ["a", fault])
    assert raised.value.sample_ids == sample_ids
    assert values(reward, ["a"]) == [2.0]


def test_batches_of_several_callers_wait_for_each_other(reward):
    async def all_of_them():
        return await asyncio.gather(*(reward.score([trajectory(i)], ["x" * i]) for i in range(8)))

    assert [scores[0].value for scores in asyncio.run(all_of_them())] == [2.0 * i for i in range(8)]


def test_a_hanging_function_is_killed_with_its_children_and_replaced(reward, pid_file):
    with pytest.raises(RewardError, match=r"did not return within 3 s.*'s0'"):
        score(reward, ["hang"])
    deadline = time.monotonic() + 120
    while alive(pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid_file.read_text())
    assert values(reward, ["fine"]) == [8.0]


def test_a_policy_drops_just_the_sample_that_kills_the_process(reward):
    first, lost = score(RobustReward(reward, FailureHandling(attempts=1, then="drop")), ["a", "die"])
    assert (first.value, lost.sample_id) == (2.0, "s1")
    assert "lost its process (exit -9)" in lost.reason


def test_a_function_that_is_not_there_is_a_mistake_of_the_user(child_path):
    reward = IsolatedReward(IsolatedRewardConfig(function="faulty_rewards:nothing"))
    with pytest.raises(PluginError, match="has no attribute 'nothing'"):
        score(reward, ["a"])


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="workers"):
        IsolatedRewardConfig(function="a:b", workers=0)


def test_a_worker_prepares_outside_the_deadline(child_path):
    config = IsolatedRewardConfig(
        function="faulty_rewards:prepared", prepare="faulty_rewards:prepare", timeout_s=2.0
    )
    made = IsolatedReward(config)
    try:
        assert made.check() == frozenset()
        assert values(made, ["a"]) == [7.0]
    finally:
        made.close()
    broken = IsolatedReward(
        IsolatedRewardConfig(function="faulty_rewards:faulty", prepare="faulty_rewards:nothing")
    )
    with pytest.raises(PluginError, match="no attribute 'nothing'"):
        broken.check()
    broken.close()


def test_closing_ends_a_batch_that_hangs_at_once(child_path, tmp_path):
    options = {"pid_file": str(tmp_path / "pid")}
    made = IsolatedReward(IsolatedRewardConfig(function="faulty_rewards:faulty", options=options, timeout_s=600.0))

    async def close_in_the_middle():
        call = asyncio.ensure_future(made.score([trajectory(0)], ["hang"]))
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(made.close)
        with pytest.raises(RewardError, match="lost its process"):
            await asyncio.wait_for(call, 60)

    asyncio.run(close_in_the_middle())
    deadline = time.monotonic() + 120
    while alive((tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive((tmp_path / "pid").read_text())
