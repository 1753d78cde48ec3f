"""PythonReward: calling conventions, refusals before the run, and every way a function can fail."""

import asyncio
import json
import threading
import time

import pytest
from rlhf_core import PluginError, RewardError, Score, Trajectory
from rlhf_rollout import PythonReward, RewardSignature, read_signature


def trajectory(index: int, **metadata) -> Trajectory:
    return Trajectory(
        sample_id=f"s{index}",
        group_id="g",
        token_ids=(5, 6, 7),
        response_mask=(False, True, True),
        rollout_log_probs=(0.0, -0.5, -0.1),
        weight_versions=(-1, 0, 0),
        metadata={"prompt": f"p{index}", "answer": str(index), **metadata},
    )


def score(function, texts=("0", "1", "x"), **options) -> list[Score]:
    reward = PythonReward(function, **options)
    trajectories = [trajectory(index) for index in range(len(texts))]
    return asyncio.run(reward.score(trajectories, list(texts)))


def values(function, **options) -> list[float]:
    return [one.value for one in score(function, **options)]


# ------------------------------------------------------------ calling conventions


def test_one_sample_per_call():
    def reward(completion, prompt, answer):
        assert prompt == f"p{answer}"
        return float(completion == answer)

    assert values(reward) == [1.0, 1.0, 0.0]


def test_a_batch_per_call_gets_columns_as_lists():
    calls = []

    def reward(completions, prompts, answer, **columns):
        calls.append((completions, prompts, answer, columns["completion_ids"]))
        return [len(text) for text in completions]

    assert values(reward) == [1.0, 1.0, 1.0]
    assert calls == [(["0", "1", "x"], ["p0", "p1", "p2"], ["0", "1", "2"], [[6, 7]] * 3)]


def test_async_functions_of_either_kind():
    async def one(completion, **columns):
        await asyncio.sleep(0)
        return int(completion == columns["answer"])

    async def many(completions):
        await asyncio.sleep(0)
        return [0.5] * len(completions)

    assert values(one) == [1.0, 1.0, 0.0]
    assert values(many) == [0.5, 0.5, 0.5]


def test_async_calls_overlap():
    inside, most = 0, 0

    async def one(completion):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return 0.0

    values(one)
    assert most == 3


def test_callable_objects_and_default_columns():
    class Judge:
        def __call__(self, completion, difficulty=2.0):
            return difficulty

    assert values(Judge()) == [2.0, 2.0, 2.0]


def test_dicts_become_components():
    (first, *_) = score(lambda completion: {"score": 1, "length": len(completion), "tidy": True})
    assert first == Score(value=1.0, components={"length": 1.0, "tidy": 1.0})


def test_arrays_are_lists():
    import torch

    assert values(lambda completions: torch.tensor([0.0, 1.0, 2.0])) == [0.0, 1.0, 2.0]


def test_it_runs_off_the_event_loops_thread():
    main = threading.get_ident()
    assert values(lambda completion: float(threading.get_ident() != main)) == [1.0, 1.0, 1.0]


def test_by_path():
    assert PythonReward("rlhf_rollout:exact_match").name == "rlhf_rollout:exact_match"
    assert values("rlhf_rollout:exact_match") == [1.0, 1.0, 0.0]


def test_no_trajectories_no_scores():
    assert score(lambda completion: 1 / 0, texts=()) == []


# ------------------------------------------------------------ refusals before the run


def test_the_signature_is_read():
    def reward(completions, prompts, answer, *, scale=1.0, **rest):
        return []

    assert read_signature(reward, name="r") == RewardSignature(
        batched=True,
        columns=frozenset({"prompts", "answer", "scale"}),
        required=frozenset({"prompt", "answer"}),
        any_columns=True,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda text: 0,
        lambda: 0,
        lambda completion, completions: 0,
        lambda *completions: 0,
        lambda completion, /: 0,
        lambda completion, prompts: 0,
        lambda **columns: 0,
    ],
    ids=["other name", "nothing", "both", "star", "positional only", "mixed", "only **"],
)
def test_other_signatures_are_refused_with_what_to_write(function):
    with pytest.raises(PluginError, match="def reward"):
        PythonReward(function, name="r")


@pytest.mark.parametrize("path", ["no_such_module_here:f", "math:no_such", "math", "math:pi"])
def test_paths_that_lead_nowhere_are_refused(path):
    with pytest.raises(PluginError):
        PythonReward(path)


# ------------------------------------------------------------ failures of the function


def raises(completion):
    if completion == "1":
        raise ValueError("cannot judge this")
    return 0.0


async def raises_later(completion):
    return raises(completion)


@pytest.mark.parametrize("function", [raises, raises_later])
def test_a_raising_function_is_named_with_the_sample(function):
    with pytest.raises(
        RewardError, match=r"reward raises(_later)? raised ValueError for sample 's1': cannot judge"
    ):
        score(function)


def test_a_raising_batch_names_its_samples():
    def reward(completions):
        raise KeyError("gone")

    with pytest.raises(RewardError, match="raised KeyError for samples 's0', 's1', 's2'"):
        score(reward)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "good", {"value": 1.0}, [1.0]], ids=str)
def test_what_is_not_a_finite_number_is_refused(bad):
    with pytest.raises(RewardError, match="'s1'"):
        score(lambda completion: bad if completion == "1" else 0.0)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_of_scores_is_refused(count):
    with pytest.raises(RewardError, match=f"{count} scores for 3 samples"):
        score(lambda completions: [0.0] * count)


def test_a_batch_that_returns_one_number_is_refused():
    with pytest.raises(RewardError, match="raised TypeError"):
        score(lambda completions: 1.0)


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="needs the column 'difficulty', which sample 's0'"):
        score(lambda completion, difficulty: 0.0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_function_is_left_at_its_deadline(kind):
    released = threading.Event()

    def hangs(completions):
        released.wait(600)
        return [0.0] * len(completions)

    async def hangs_async(completions):
        while not released.is_set():
            await asyncio.sleep(0.01)
        return [0.0] * len(completions)

    started = time.monotonic()
    with pytest.raises(RewardError, match=r"did not return within 0\.1 s for samples 's0'"):
        score(hangs if kind == "sync" else hangs_async, timeout_s=0.1)
    assert time.monotonic() - started < 300, "the event loop waited for the hanging thread"
    released.set()


def test_an_error_names_the_users_own_line():
    def helper(row):
        return json.loads(row)

    def reward(completion):
        return helper(completion)

    with pytest.raises(RewardError) as raised:
        score(reward, texts=("{",))
    line = helper.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} in helper: return json.loads(row)" in str(raised.value)


def test_a_call_that_does_not_fit_has_no_line_of_the_users():
    def reward(completion):
        return completion

    made = PythonReward(reward)
    made._function = lambda: 0.0
    with pytest.raises(RewardError, match="raised TypeError") as raised:
        asyncio.run(made.score([trajectory(0)], ["0"]))
    assert "python.py" not in str(raised.value)
