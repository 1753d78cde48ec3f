"""The loop with everything in this process: torch engine, Transformers backend."""

import io
import json
import math
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
import yaml
from rich.console import Console
from rlhf_algos import CheckpointStore, from_mapping
from rlhf_core import ConfigError, RewardError, RunStopped, StopRequest
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.run import train
from rlhf_launch.online.setup import open_producer
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.stack


def read_rows(run):
    path = run.folder / "metrics.jsonl"
    return [row for row in map(json.loads, path.read_text().splitlines()) if "reward" in row]


def evaluated_steps(run):
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "eval/held-out/reward" in row]


def without_times(rows):
    """Without what differs from run to run: seconds, and the last bits of the generator's log-probs, which depend
    on the requests that happened to share a batch."""
    varying = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "sync/probe_seconds")
    return [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows]


def grpo_settings(folder, output_dir):
    return {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl"), "hold_out": 4},
        "lengths": {"max_prompt_tokens": 16},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "grpo", "kl_coef": 0.01},
        "rollout": {"backend": "transformers", "samples_per_prompt": 8, "sampling": {"max_tokens": 8}},
        "train": {
            "engine": "torch",
            "max_tokens_per_micro_batch": 512,
            "prompts_per_step": 8,
            "steps": 12,
            "optimizer": {"learning_rate": 3e-3},
        },
        "placement": {"executor": "local", "device": "cpu"},
        "output": str(output_dir),
        "checkpoint": {"every": 4},
    }


@pytest.fixture(scope="module")
def grpo(folder, tmp_path_factory):
    """One finished GRPO run with a KL penalty; the tests look at what it left."""
    settings = grpo_settings(folder, tmp_path_factory.mktemp("grpo") / "run")
    return train(from_mapping(OnlineConfig, settings, source="test"))


def rise(run):
    rewards = [row["reward"] for row in read_rows(run)]
    return (sum(rewards[-3:]) - sum(rewards[:3])) / 3


def test_the_reward_rises(grpo):
    assert rise(grpo) > 0.05


@pytest.mark.parametrize("paused", [True, False])
def test_the_reward_rises_with_stale_samples_too(folder, make_config, tmp_path, paused):
    overlap = {"max_staleness": 2, "pause_while_training": paused}
    run = train(make_config(grpo_settings(folder, tmp_path / "run"), rollout__overlap=overlap))
    assert sum(row["staleness/mean"] for row in read_rows(run)) > 6
    assert rise(run) > 0.05


def test_every_step_reports_what_a_user_looks_at(grpo):
    rows = read_rows(grpo)
    assert [row["weight_version"] for row in rows] == list(range(1, 13))
    for name in (
        *("reward", "reference_kl", "entropy", "clip_fraction", "grad_norm", "response_length", "truncated"),
        *(f"seconds/{phase}" for phase in ("rollout", "reward", "score", "train", "sync", "step")),
        *("tokens_per_second/rollout", "tokens_per_second/train", "learning_rate"),
    ):
        assert all(math.isfinite(row[name]) for row in rows), name


def test_the_generator_follows_the_trainer(grpo):
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in read_rows(grpo))


def test_the_kl_grows_from_zero(grpo):
    kl = [row["reference_kl"] for row in read_rows(grpo)]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_the_model_is_a_normal_transformers_directory(grpo, folder):
    saved = grpo.folder / "model"
    model, start = (AutoModelForCausalLM.from_pretrained(path) for path in (saved, folder / "policy"))
    assert len(AutoTokenizer.from_pretrained(saved)) == len(AutoTokenizer.from_pretrained(folder / "policy"))
    weights, before = model.state_dict(), start.state_dict()
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in weights)


def test_plot_config_events_and_checkpoints_are_there(grpo):
    directory = grpo.folder
    assert (directory / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (directory / "config.yaml").exists()
    assert list(directory.glob("events.out.tfevents*"))
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-000008", "step-000012"]


def test_ppo_with_critic_reference_and_reward_model(settings, make_config, folder):
    config = make_config(
        settings,
        reward={"model": str(folder / "reward")},
        algorithm={"name": "ppo", "kl_coef": 0.05},
        train__minibatches=2,
        train__critic_warmup_steps=1,
    )
    run = train(config)
    rows = read_rows(run)
    assert "grad_norm" not in rows[0]  # only the critic is trained in exactly the first step
    assert all("grad_norm" in row for row in rows[1:])
    assert all(math.isfinite(row["critic/loss"]) and row["critic/grad_norm"] > 0 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[2]["kl"]) > 0


def test_a_resumed_run_equals_an_uninterrupted_one(settings, make_config, tmp_path):
    whole = train(make_config(settings, train__steps=4, checkpoint__every=2, output=str(tmp_path / "whole")))
    part = make_config(settings, train__steps=4, checkpoint__every=2, output=str(tmp_path / "part"))
    train(make_config(settings, train__steps=2, checkpoint__every=2, output=str(tmp_path / "part")))
    resumed = train(part, resume=True)
    assert without_times(read_rows(resumed)) == without_times(read_rows(whole))
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model").state_dict().items():
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "model").state_dict()[name]
        assert torch.equal(tensor, other), name


def test_a_run_finds_the_size_of_its_micro_batches_once_and_keeps_it(
    settings, make_config, tmp_path, folder, monkeypatch
):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("rlhf_core.training.memory_meter._MEMINFO", meminfo)
    settings |= {"reward": {"model": str(folder / "reward")}, "algorithm": {"name": "ppo", "kl_coef": 0.05}}
    settings["train"] = {**settings["train"], "max_tokens_per_micro_batch": "auto"}
    settings |= {"checkpoint": {"every": 2}, "tensorboard": False}

    def run(name, mib, *, steps, resume=False):
        meminfo.write_text(f"MemTotal: 1048576 kB\nMemAvailable: {mib * 1024} kB\n")
        console = Console(file=io.StringIO(), width=200)
        config = make_config(settings, train__steps=steps, output=str(tmp_path / name))
        done = train(config, resume=resume, console=console)
        lines = console.file.getvalue().splitlines()
        return done, sorted(line.strip() for line in lines if "micro-batches of" in line)

    whole, said = run("whole", 60, steps=4)
    assert [line.partition(":")[0] for line in said] == [
        *("critic, to score", "critic, to step", "policy, to score", "policy, to step"),
        *("reference, to score", "reward model, to score"),
    ]
    assert not any("16,384" in line for line in said)
    _, first = run("part", 60, steps=2)
    resumed, again = run("part", 500, steps=4, resume=True)
    assert said == first == again
    assert without_times(read_rows(resumed)) == without_times(read_rows(whole))


def test_a_killed_run_equals_an_uninterrupted_one(settings, make_config, tmp_path):
    settings |= {"checkpoint": {"every": 1}, "evaluation": {"every": 3}, "tensorboard": False}
    settings["train"] = {**settings["train"], "steps": 6}
    whole = train(make_config(settings, output=str(tmp_path / "whole")))
    settings["output"] = str(tmp_path / "killed")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    program = "from rlhf_launch.cli.main import main; main()"
    run = subprocess.Popen(
        [sys.executable, "-c", program, "train", str(tmp_path / "run.yaml")], stdout=subprocess.DEVNULL
    )
    checkpoints = tmp_path / "killed" / "checkpoints"
    while run.poll() is None and not (checkpoints / "step-000002").exists():
        time.sleep(0.002)
    run.kill()
    run.wait()
    resumed = train(make_config(settings), resume=True)
    assert without_times(read_rows(resumed)) == without_times(read_rows(whole))
    assert evaluated_steps(resumed) == evaluated_steps(whole) == [0, 3, 6]
    final = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "killed")]
    weights, other = (model.state_dict() for model in final)
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_a_stopped_run_saves_says_how_to_go_on_and_equals_an_uninterrupted_one(settings, make_config, tmp_path):
    settings |= {"tensorboard": False}
    settings["train"] = {**settings["train"], "steps": 30}
    whole = train(make_config(settings, output=str(tmp_path / "whole")))
    settings["output"] = str(tmp_path / "stopped")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    program = "from rlhf_launch.cli.main import main; main()"
    run = subprocess.Popen(
        [sys.executable, "-c", program, "train", str(tmp_path / "run.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.002)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 143, said
    (step,) = (int(path.name[-6:]) for path in (tmp_path / "stopped" / "checkpoints").glob("step-*"))
    assert 0 < step < 30
    assert f"stopped: SIGTERM was received\nthe newest checkpoint is that of step {step} of 30;" in said
    assert f"continue with: rlhf train {tmp_path / 'run.yaml'} --resume\n" in said
    resumed = train(make_config(settings), resume=True)
    assert without_times(read_rows(resumed)) == without_times(read_rows(whole))
    final = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "stopped")]
    weights, other = (model.state_dict() for model in final)
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_a_program_may_ask_for_the_end(settings, make_config):
    stop = StopRequest()

    def on_step(step, metrics):
        if step == 2:
            stop.ask("the budget is spent")

    config = make_config(settings)
    with pytest.raises(RunStopped, match="the budget is spent") as caught:
        train(config, on_step=on_step, stop=stop)
    assert caught.value.__notes__ == ["the newest checkpoint is that of step 2 of 3; --resume continues from it"]
    assert train(config, resume=True).steps == 3


def test_a_failing_reward_costs_no_trained_step(settings, make_config):
    """The reward fails in the third step; the first two are saved, though no checkpoint was due."""
    config = make_config(settings, reward__function="launch_rewards:fails_later", data__hold_out=0)
    with pytest.raises(RewardError, match="the service is down") as caught:
        train(config)
    assert "the newest checkpoint is that of step 2 of 3; --resume continues from it" in caught.value.__notes__


@pytest.mark.parametrize(
    ("function", "message"),
    [("raises", "no network today"), ("nan", "nan"), ("too_few", "1 scores for 4 samples")],
)
def test_a_bad_reward_stops_the_run_with_its_reason(settings, make_config, function, message):
    config = make_config(settings, reward__function=f"launch_rewards:{function}", data__hold_out=0)
    with pytest.raises(RewardError, match=message):
        train(config)


def test_episodes_in_an_environment(settings, make_config):
    settings["reward"] = {}
    config = make_config(
        settings,
        rollout__agent={"environment": "launch_rewards:CountToThree"},
        lengths__max_length=120,
        data__hold_out=2,
    )
    rows = read_rows(train(config))
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)  # turns were not tokenised again
    assert all(0 < row["response_length"] <= 24 for row in rows)
    assert all(row["reward"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_episodes_overlap_training(settings, make_config, folder):
    config = make_config(
        settings,
        reward={"model": str(folder / "reward")},
        rollout__agent={"environment": "launch_rewards:CountToThree"},
        lengths__max_length=120,
        rollout__overlap={"max_staleness": 1},
        data__hold_out=2,
        evaluation__every=1,
    )
    rows = read_rows(train(config))
    assert [row["prompts/used"] for row in rows] == [4, 4, 4]
    assert all(row["staleness/max"] <= 1 and row["grad_norm"] > 0 for row in rows)


def test_several_held_out_sets_and_dynamic_sampling(settings, make_config, folder):
    data = {"path": str(folder / "prompts.jsonl"), "limit": 3}
    held_out = {"data": data, "samples": 4, "temperature": 1.0}
    config = make_config(
        settings, evaluation={"sets": {"sums": held_out}, "every": 1}, rollout__dynamic_sampling={"max_rounds": 2}
    )
    run = train(config)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/sums/pass@4" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/held-out/reward" in row] == [0, 1, 2, 3]
    steps = [row for row in rows if "reward" in row]
    assert all(row["prompts/started"] == row["prompts/used"] + row["prompts/filtered"] for row in steps)


def test_a_used_directory_is_refused_and_a_resumed_run_keeps_its_meaning(settings, make_config, tmp_path):
    first = make_config(settings, train__steps=2, checkpoint__every=1)
    train(first)
    rows = (first.output / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"--resume .* --overwrite"):
        train(first)
    other = make_config(settings, train__steps=3, train__optimizer={"learning_rate": 1e-4})
    with pytest.raises(ConfigError, match=r"train\.optimizer\.learning_rate was 0\.001, is 0\.0001"):
        train(other, resume=True)
    assert (first.output / "metrics.jsonl").read_text() == rows
    # A damaged newest checkpoint costs its step and nothing else; another cadence is no other run.
    weights = first.output / "checkpoints" / "step-000002" / "policy" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    console = Console(file=io.StringIO(), width=200)
    resumed = train(make_config(settings, train__steps=3, evaluation__every=1), resume=True, console=console)
    said = console.file.getvalue()
    assert "step-000002' is damaged: policy/weights.safetensors has" in said
    assert "after step 1" in said
    assert "changed: evaluation.every was 0, is 1" in said
    assert [row["weight_version"] for row in read_rows(resumed)] == [1, 2, 3]
    train(first, overwrite=True)
    assert [row["step"] for row in read_rows(resumed)] == [1, 2]
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("run.")]) == 1


def store(run):
    return CheckpointStore(run.folder / "checkpoints")


def final_state(run):
    return store(run).latest().state


@pytest.mark.parametrize("paused", [True, False])
def test_generation_that_overlaps_training_keeps_its_accounts_over_a_resume(
    settings, make_config, tmp_path, paused
):
    changes = {
        "rollout__overlap": {"max_staleness": 2, "pause_while_training": paused},
        "rollout__sampling": {"max_tokens": 12},
        "train__prompts_per_step": 3,
        "checkpoint__every": 2,
        "evaluation__every": 2,
        "output": str(tmp_path / "run"),
    }
    half = train(make_config(settings, train__steps=4, **changes))
    assert final_state(half)["ledger"]["counts"]["consumed"] == 12
    # The trainer stops amid the run: what is in flight belongs to the checkpoint.
    (half.folder / "checkpoints" / "step-000004").rename(tmp_path / "lost")
    state = final_state(half)
    ledger = state["ledger"]
    assert state["step"] == 2
    assert ledger["counts"]["dispatched"] == 6 + len(ledger["in_flight"]) + len(ledger["finished"])
    run = train(make_config(settings, train__steps=6, **changes), resume=True)
    state = final_state(run)
    assert state["ledger"] == {
        "in_flight": [],
        "finished": [],
        "dropped": [],
        "counts": {"dispatched": 18, "consumed": 18, "filtered": 0, "dropped": 0, "dropped_samples": 0},
    }
    assert state["prompt_position"] == 18
    rows = read_rows(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert any(row["staleness/mean"] > 0 for row in rows)
    assert all(0 < row["off_policy_weight"] <= 2 for row in rows)  # corrected although nothing said so
    assert all(row["idle_seconds/rollout"] >= 0 and row["idle_seconds/policy"] >= 0 for row in rows)


def test_overlap_refuses_what_it_cannot_correct(settings, make_config):
    overlap = {"rollout__overlap": {}}
    with pytest.raises(
        ConfigError, match="no top_p, top_k, min_p, min_tokens, penalties or json_schema; leave them out"
    ):
        make_config(settings, rollout__sampling={"max_tokens": 8, "top_p": 0.9}, **overlap)
    with pytest.raises(ConfigError, match="max_staleness must be at least 1"):
        make_config(settings, rollout__overlap={"max_staleness": 0})
    own = make_config(settings, algorithm={"name": "grpo", "off_policy": [{"mode": "mask"}]}, **overlap)
    assert [correction.mode for correction in own.recipe.off_policy] == ["mask"]
    assert make_config(settings, rollout__overlap={"off_policy_correction": False}).recipe.off_policy == ()
    assert make_config(settings).recipe.off_policy == ()
    assert make_config(settings, algorithm="dppo", **overlap).recipe.off_policy == ()  # the ratios start there
    with pytest.raises(ConfigError, match="old_log_probs: trainer"):
        make_config(settings, algorithm="dppo", rollout__sampling={"max_tokens": 8, "top_p": 0.9})
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        sampling = {"max_tokens": 8, penalty: 1.5}
        with pytest.raises(ConfigError, match="json_schema; leave them out"):
            make_config(settings, rollout__sampling=sampling, **overlap)
        with pytest.raises(ConfigError, match="old_log_probs: trainer"):
            make_config(settings, algorithm="dppo", rollout__sampling=sampling)
        own = make_config(settings, rollout__sampling=sampling)  # grpo's ratios start from the trainer's log-probs
        assert not own.rollout.sampling.meaning.plain
    with pytest.raises(ConfigError, match=r"without rollout\.overlap there are none"):
        make_config(settings, weight_sync={"keep_kv_cache": True})
    paused = make_config(settings, rollout__overlap={"pause_while_training": True})
    unpausable = types.SimpleNamespace(pause_mode=None)
    with pytest.raises(ConfigError, match="a rollout backend that can pause"):
        open_producer(paused, None, None, unpausable)


def test_the_best_checkpoint_outlives_newer_ones(settings, make_config):
    with pytest.raises(ConfigError, match=r"names the set 'sums'; there is held-out"):
        make_config(settings, evaluation__best_metric="eval/sums/reward")
    config = make_config(settings, evaluation__best_metric="learning_rat")
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        train(config)
    best = make_config(
        settings,
        evaluation__best_metric="learning_rate",
        checkpoint__every=1,
        checkpoint__keep=1,
        train__optimizer={"learning_rate": 1e-3, "schedule": "linear"},
        output=f"{config.output}-2",
    )
    assert store(train(best)).steps() == [1, 3]
