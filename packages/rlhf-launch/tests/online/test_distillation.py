"""On-policy distillation in this process: torch engines for student and teacher, the Transformers backend."""

import io
import json

import pytest
import torch
from rich.console import Console
from rlhf_core import ConfigError
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.overview import online_plan
from rlhf_launch.replay.rerun import replay_step
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [f"{n}+{n}={2 * n}" for n in range(0, 24, 2)]


@pytest.fixture(scope="module")
def teacher(folder):
    """A wider and deeper model than the policy, trained on a few sums; its embedding has rows to spare."""
    path = save_tiny_model(folder / "teacher", hidden_size=64, layers=3, vocab_size=528, seed=5)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        for text in TEXTS:
            ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.fixture
def distilling(settings, teacher):
    del settings["reward"]
    del settings["data"]["hold_out"]
    settings["model"] = {"path": settings["model"]["path"], "teacher": teacher}
    settings["algorithm"] = {"name": "on_policy_distillation"}
    settings["rollout"] |= {"samples_per_prompt": 2, "sampling": {"max_tokens": 8, "temperature": 0.7}}
    return settings


def rows_of(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def logits_of(path, ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits.float()


def reverse_kl(student, teacher, tokenizer):
    """KL(student || teacher) of the token after each prompt, over the whole vocabulary, in nats."""
    found = []
    for n in range(24):
        ids = torch.tensor([tokenizer(f"{n}+{n}=")["input_ids"]])
        its, own = (logits_of(path, ids)[0, -1, :512].log_softmax(-1) for path in (teacher, student))
        found.append(float((own.exp() * (own - its)).sum()))
    return sum(found) / len(found)


@pytest.mark.stack
def test_the_student_comes_nearer_to_the_teacher(distilling, make_config, folder, teacher):
    distilling["rollout"]["sampling"] = {"max_tokens": 6}
    learning = {"steps": 20, "prompts_per_step": 24, "optimizer": {"learning_rate": 2e-3}}
    run = train(make_config(distilling, train={**distilling["train"], **learning}))
    rows = rows_of(run)
    gaps = [row["teacher/reverse_kl"] for row in rows]
    assert sum(gaps[-3:]) < 0.75 * sum(gaps[:3])
    assert all("reward" not in row and "idle_seconds/teacher" in row for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    before, after = (reverse_kl(path, teacher, tokenizer) for path in (folder / "policy", run.model))
    assert after < 0.75 * before, (before, after)


@pytest.mark.stack
def test_columns_and_advantages_are_those_computed_by_hand(distilling, make_config, teacher, tmp_path):
    """Two roles, with one minibatch each; the task's reward is added. And the step replays with the same bits."""
    mixed = {"name": "on_policy_distillation", "reward_coef": 0.5, "advantage_options": {"scale": "none"}}
    config = make_config(
        distilling,
        algorithm=mixed,
        reward={"function": "launch_rewards:share_of_alphanumerics"},
        train={**distilling["train"], "steps": 1},
        bundles={"every": 1},
        checkpoint={"every": 1},
    )
    run = train(config)
    batch = read_bundle(run.folder / "bundles" / "step-000001").batch()
    mask = batch.response_mask
    by_hand = {}
    for name, path in (("old_log_probs", distilling["model"]["path"]), ("teacher_log_probs", teacher)):
        ids = batch.token_ids
        logits = logits_of(path, ids) / 0.7
        logp = torch.zeros(ids.shape)
        logp[:, 1:] = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        by_hand[name] = logp
        torch.testing.assert_close(batch[name][mask], logp[mask], rtol=0, atol=1e-4)
    scores = batch["scores"].view(-1, 2)
    task = 0.5 * (scores - scores.mean(dim=1, keepdim=True)).view(-1, 1)
    expected = by_hand["teacher_log_probs"] - by_hand["old_log_probs"] + task
    torch.testing.assert_close(batch["advantages"][mask], expected[mask], rtol=0, atol=2e-4)
    assert 0 < rows_of(run)[-1]["reward"] < 1
    again = replay_step(run.folder / "bundles" / "step-000001", console=Console(file=io.StringIO()))
    assert again.equal
    assert "teacher_log_probs" in {parting.name for parting in again.partings}


def test_a_teacher_has_ranks_where_it_is_placed(distilling, make_config):
    distilling["placement"] = {"executor": "ray", "device": "cuda", "teacher": {"ranks": 2}}
    distilling["train"] |= {"engine": "deepspeed"}
    distilling["rollout"]["backend"] = "vllm"
    hosts = [Host(name="a", gpus=4, cpus=8)]
    table = online_plan(make_config(distilling), hosts).splitlines()
    (row,) = [line for line in table if line.startswith("teacher")]
    assert "/teacher" in row
    assert "0-1" in row
    shared = {**distilling["placement"], "teacher": {"ranks": 1, "colocate_with": "policy"}}
    lines = online_plan(make_config(distilling, placement=shared), hosts).splitlines()
    assert "on shared devices, score: policy, then teacher" in lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__teacher": None}, "learns from a teacher; write model.teacher: path"),
        ({"algorithm": {"name": "grpo"}, "reward": {"function": "m:f"}}, "model.teacher is set, but .*'grpo'"),
        ({"algorithm__reward_coef": 1.0}, "no reward: give reward.function"),
        ({"data__hold_out": 4}, "data.hold_out needs scores, and there is no reward"),
        ({"rollout__dynamic_sampling": {}}, "rollout.dynamic_sampling needs scores"),
        ({"model__teacher": ["a", "b"]}, "model.teacher"),
    ],
)
def test_what_does_not_go_together_is_refused(distilling, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(distilling, **changes)


def test_only_distillation_does_without_a_reward(settings, make_config):
    del settings["reward"]
    with pytest.raises(ConfigError, match="no reward"):
        make_config(settings, algorithm={"name": "grpo"})
    settings["placement"]["teacher"] = {"ranks": 1, "cpus": 2}
    with pytest.raises(ConfigError, match=r"placement.teacher is set, but algorithm 'grpo' has no teacher"):
        make_config(settings, reward={"function": "m:f"})


def test_a_teacher_that_reads_other_tokens_is_refused_before_anything_is_loaded(distilling, make_config, tmp_path):
    small = save_tiny_model(tmp_path / "small", vocab_size=300)
    with pytest.raises(ConfigError, match="the teacher's vocabulary has 300 tokens, the student's 512"):
        check_inputs(make_config(distilling, model__teacher=small))
    other = save_tiny_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"id \d+ is '[ab]' for the student and '[ab]' for the teacher"):
        check_inputs(make_config(distilling, model__teacher=other))
    with pytest.raises(ConfigError, match=r"model\.teacher"):
        check_inputs(make_config(distilling, model__teacher=str(tmp_path / "nothing")))
