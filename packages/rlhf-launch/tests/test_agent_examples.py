"""The agent examples on the real parts: Transformers backend, agent loop, torch engine, weight sync."""

import asyncio
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "agents"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the examples are not beside the packages here")


@pytest.fixture(scope="module")
def examples():
    sys.path.insert(0, str(FOLDER))
    import calculator
    import guessing_game

    yield {"calculator": calculator, "guessing": guessing_game}
    sys.path.remove(str(FOLDER))


def run(example, model, tasks_of, *, steps):
    from agent_training import train

    results = []
    asyncio.run(train(example.training(model, steps=steps), tasks_of, results.append))
    return results


@pytest.mark.stack
def test_the_guessing_game_runs_turn_by_turn_and_improves(examples, tmp_path):
    game = examples["guessing"]
    game.make_model(tmp_path, seed=0)
    results = run(game, tmp_path, lambda step: game.tasks_of(step, episodes=8), steps=12)
    for step, result in enumerate(results):
        # Trainer and generator agree on every token of every turn, after every sync.
        assert result.log_prob_gap < 1e-4
        for t in result.trajectories:
            assert {v for v, sampled in zip(t.weight_versions, t.response_mask, strict=True) if sampled} == {step}
            assert 1 <= t.metadata["turns"] == t.response_length <= game.GUESSES
            assert (t.metadata["ending"] == "done") == (t.metadata["environment"]["solved"] == 1) != t.truncated
            assert all(bool(reward) == sampled for reward, sampled in zip(t.rewards, t.response_mask, strict=True))
    rewards = [result.reward for result in results]
    assert sum(rewards[-3:]) > sum(rewards[:3])


@pytest.mark.stack
def test_the_calculator_is_called_through_the_chat_template(examples, tmp_path):
    calculator = examples["calculator"]
    fast = calculator.tokenizer()
    batch = calculator.demonstrations(random.Random(0), 8, fast, calling=1.0)
    text = fast.decode(batch.token_ids[0][batch.attention_mask[0]])
    assert text.count("<tool_call>") == 1
    assert "<|tool|>" in text
    calculator.make_model(tmp_path / "random", seed=0)
    # Enough to write calls, not enough to copy digits.
    calculator.warm_up(tmp_path / "random", tmp_path / "warm", steps=40, seed=0, calling=0.75)
    results = run(calculator, tmp_path / "warm", lambda step: calculator.tasks_of(step, prompts=4), steps=2)
    assert max(result.components["tool_calls"] for result in results) > 0
    assert all(result.log_prob_gap < 1e-4 for result in results)
    called = [t for result in results for t in result.trajectories if t.metadata["turns"] > 1]
    answers = [t for t in called if "<|tool|>" in fast.decode(t.token_ids, skip_special_tokens=False)]
    assert len(answers) == len(called) > 0
