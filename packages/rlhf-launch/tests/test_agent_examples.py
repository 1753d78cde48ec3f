"""The agent examples on the real parts: Transformers backend, agent loop, torch engine, weight sync."""

import asyncio
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rlhf_algos import from_mapping
from rlhf_core import SamplingConfig
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_launch import OnlineConfig, train
from rlhf_rollout import AgentConfig, AgentTask, EnvironmentReward, Gateway, GatewayConfig, ProgramLoop, score_group

FOLDER = Path(__file__).parents[3] / "examples" / "agents"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the examples are not beside the packages here")


@pytest.fixture(scope="module")
def examples():
    sys.path.insert(0, str(FOLDER))
    import calculator
    import guessing_game
    import second_chance

    yield {"calculator": calculator, "guessing": guessing_game, "second_chance": second_chance}
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


def test_a_program_is_recorded_turn_by_turn_and_paid_answer_by_answer(examples):
    tokenizer = byte_tokenizer()
    solve = examples["second_chance"].solve

    def script(request, index):
        again = "Try again" in tokenizer.decode(request.prompt_token_ids)
        return tokenizer(("6 * 7 = 42" if again else "It is 41") + "<|im_end|>")["input_ids"]

    backend = ScriptedBackend(script=script)
    with Gateway(backend, tokenizer, GatewayConfig(model="policy", max_model_len=1000)) as gateway:
        config = AgentConfig(program=solve, max_turns=2)
        loop = ProgramLoop(gateway, config, sampling=SamplingConfig(max_tokens=64), model="policy")
        metadata = {"prompt": "6 * 7?", "answer": "six times seven #### 42"}
        task = AgentTask(group_id="0", metadata=metadata, episodes=2)
        samples = asyncio.run(loop.run_group(task))
    assert [sample.sample_id for sample in samples] == ["0/0", "0/1"]
    for sample in samples:
        said = [tokenizer.decode(part) for part in sampled(sample)]
        assert said == ["It is 41<|im_end|>", "6 * 7 = 42<|im_end|>"]
        assert [position for position, reward in enumerate(sample.rewards) if reward] == [len(sample.token_ids) - 1]
    group = asyncio.run(score_group(samples, EnvironmentReward(), lambda found: ["" for _ in found]))
    assert [score.value for score in group.scores] == [0.5, 0.5]
    assert group.scores[0].components == {"turns": 2.0, "answers": 0.5}


def sampled(trajectory):
    """The sampled tokens of a trajectory, turn by turn."""
    turns, before = [], False
    for token, own in zip(trajectory.token_ids, trajectory.response_mask, strict=True):
        if own:
            turns[len(turns) :] = [] if before else [[]]
            turns[-1].append(token)
        before = own
    return turns


@pytest.mark.stack
def test_a_program_is_trained_through_the_gateway(tmp_path):
    """A program that starts a conversation of its own within its episode: two branches, one score."""
    (tmp_path / "counting_program.py").write_text(
        """
from second_chance import ask

def count(task):
    answer = ask(task, [dict(message) for message in task.messages])
    other = ask(task, [{"role": "user", "content": "And now?"}])
    return {"first": [answer.count("a") / 8], "other": other.count("a") / 8}
"""
    )
    sys.path[:0] = [str(tmp_path), str(FOLDER)]
    save_tiny_model(tmp_path / "policy")
    rows = [{"prompt": f"Count {n}"} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": str(tmp_path / "policy")},
        "data": {"train": str(tmp_path / "prompts.jsonl"), "chat": True},
        "lengths": {"max_length": 128},
        "algorithm": {"name": "grpo"},
        "rollout": {
            "backend": "transformers",
            "samples_per_prompt": 4,
            "sampling": {"max_tokens": 8},
            "agent": {"program": "counting_program:count", "max_turns": 2},
        },
        "train": {
            "engine": "torch",
            "max_tokens_per_micro_batch": 512,
            "prompts_per_step": 2,
            "steps": 2,
            "optimizer": {"learning_rate": 1e-3},
        },
        "placement": {"executor": "local", "device": "cpu", "timeout_s": 120},
        "tensorboard": False,
        "output": str(tmp_path / "run"),
    }
    try:
        run = train(from_mapping(OnlineConfig, settings, source="test"))
    finally:
        sys.path[:2] = []
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "reward" in row]
    assert [row["weight_version"] for row in steps] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in steps)
    assert all(row["reward/turns"] == 2 for row in steps)
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    used = [entry for step in samples for entry in step.get("prompts", [step]) if entry.get("outcome") == "used"]
    assert [len(entry["lengths"]) for entry in used] == [8] * 4  # four episodes of two trajectories each


def learning_curve(tmp_path, name, *overrides):
    """What `learning_curves.py` prints of one seed, with settings that make it small."""
    command = [sys.executable, str(FOLDER / "learning_curves.py"), name, "--seeds", "0", "--folder", str(tmp_path)]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=600)
    log = tmp_path / f"{name}-0" / "log.txt"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    rows = map(json.loads, (tmp_path / f"{name}-0" / "run" / "metrics.jsonl").read_text().splitlines())
    return done.stdout, [row for row in rows if "reward" in row]


SMALL = ("placement.executor=local", "tensorboard=false")


@pytest.mark.stack
def test_a_gymnasium_environment_is_trained_from_nothing(tmp_path):
    settings = ("train.steps=3", "train.prompts_per_step=2", "rollout.samples_per_prompt=8")
    printed, steps = learning_curve(tmp_path, "blackjack", *SMALL, *settings)
    assert "blackjack seed 0 steps 1 to 3: " in printed
    assert "3 steps in" in printed
    for step in steps:
        assert step["mismatch/log_prob_max"] < 1e-4
        assert step["reward/steps"] + step["reward/unreadable_turns"] == step["reward/turns"]
    assert steps[0]["reward/unreadable_turns"] > 0  # a random model says little that is an action


@pytest.mark.stack
@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_a_langchain_agent_is_trained(tmp_path):
    settings = ("train.steps=2", "train.prompts_per_step=2", "rollout.samples_per_prompt=4")
    printed, steps = learning_curve(tmp_path, "langgraph_agent", *SMALL, *settings)
    assert "2 steps in" in printed
    assert all(step["mismatch/log_prob_max"] < 1e-4 for step in steps)
