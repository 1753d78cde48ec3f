"""Several teachers in this process: each judges the samples of the prompts that name it."""

import io
import json

import pytest
import torch
from rich.console import Console
from rlhf_core import ConfigError, DataError
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.overview import online_plan
from rlhf_launch.replay.rerun import replay_step
from transformers import AutoModelForCausalLM, AutoTokenizer

LETTERS = {"left": "a", "right": "b"}


def taught(folder, letter, seed):
    """A model that answers every prompt with one letter."""
    path = save_tiny_model(folder, hidden_size=64, seed=seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ids = torch.tensor([tokenizer(f"{n}={letter * 4}")["input_ids"] for n in range(10)])
    for _ in range(40):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def able(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    teachers = {name: taught(folder / name, letter, seed) for seed, (name, letter) in enumerate(LETTERS.items(), 7)}
    save_tiny_model(folder / "student", hidden_size=64)
    rows = [{"prompt": f"{n}=", "side": "left" if n < 5 else "right"} for n in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, teachers


@pytest.fixture
def distilling(settings, able):
    folder, teachers = able
    del settings["reward"]
    settings["model"] = {"path": str(folder / "student"), "teachers": teachers}
    settings["data"] = {"train": {"path": str(folder / "prompts.jsonl"), "columns": {"teacher": "side"}}}
    settings["algorithm"] = {"name": "on_policy_distillation"}
    settings["rollout"] |= {"samples_per_prompt": 16, "sampling": {"max_tokens": 3}}
    settings["train"] |= {"prompts_per_step": 10, "steps": 60, "optimizer": {"learning_rate": 5e-3}}
    return settings


def log_probs_of(path, ids):
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits.float()
    found = torch.zeros(ids.shape)
    found[:, 1:] = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found


@pytest.mark.stack
def test_each_prompt_learns_from_the_teacher_that_it_names(distilling, make_config, able):
    folder, _ = able
    run = train(make_config(distilling))
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all("idle_seconds/teacher/left" in row and "idle_seconds/teacher/right" in row for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    model = AutoModelForCausalLM.from_pretrained(run.model)
    for n in range(10):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokenizer(f"{n}=")["input_ids"]])).logits[0, -1]
        mine, other = "ab" if n < 5 else "ba"
        ids = [tokenizer(letter)["input_ids"][0] for letter in (mine, other)]
        assert logits[ids[0]] > logits[ids[1]] + 1, (n, logits[ids])


@pytest.mark.stack
def test_columns_are_those_of_each_teacher_and_a_step_replays(distilling, make_config, able):
    _, teachers = able
    distilling["train"] |= {"steps": 2, "prompts_per_step": 3, "minibatches": 2}
    distilling["train"]["optimizer"] = {"learning_rate": 1e-3}
    run = train(make_config(distilling, bundles={"every": 1}, checkpoint={"every": 1}))
    seen = set()
    for step in (1, 2):
        bundle = read_bundle(run.folder / "bundles" / f"step-00000{step}")
        batch, groups = bundle.batch(), bundle.groups()
        names = [one.metadata["teacher"] for group in groups for one in group.trajectories]
        seen.add(frozenset(names))
        for row, name in enumerate(names):
            length = int(batch.attention_mask[row].sum())
            by_hand = log_probs_of(teachers[name], batch.token_ids[row : row + 1, :length])[0]
            mask = batch.response_mask[row, :length]
            torch.testing.assert_close(
                batch["teacher_log_probs"][row, :length][mask], by_hand[mask], rtol=0, atol=1e-4
            )
    again = replay_step(run.folder / "bundles" / "step-000002", console=Console(file=io.StringIO()))
    assert again.equal
    assert "teacher_log_probs" in {parting.name for parting in again.partings}


def test_each_has_ranks_where_it_is_placed(distilling, make_config):
    distilling["placement"] = {
        "executor": "ray",
        "device": "cuda",
        "teachers": {"left": {"ranks": 2}, "right": {"ranks": 1, "colocate_with": "teachers.left"}},
    }
    distilling["train"] |= {"engine": "deepspeed"}
    distilling["rollout"]["backend"] = "vllm"
    distilling["placement"]["teachers"]["right"]["ranks"] = 2
    lines = online_plan(make_config(distilling), [Host(name="a", gpus=4, cpus=8)]).splitlines()
    assert len([line for line in lines if line.startswith("teacher left")]) == 1
    assert len([line for line in lines if line.startswith("teacher right")]) == 1
    assert any("score: " in line and "teacher left" in line and "then teacher right" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__teacher": "a"}, "model.teacher and model.teachers are both set"),
        ({"algorithm": {"name": "grpo"}, "reward": {"function": "m:f"}}, "model.teachers is set, but .*'grpo'"),
        ({"algorithm": {"name": "self_distillation"}}, "has one teacher, which is shown more"),
        ({"placement__teacher": {"ranks": 1}}, r"there are several; write placement.teachers.<name>"),
        ({"placement__teachers": {"middle": {"ranks": 1}}}, r"placement.teachers.middle: .*there are: left, right"),
        ({"model__teachers": {"a b": "x"}}, "'a b' is no name"),
    ],
)
def test_what_does_not_go_together_is_refused(distilling, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(distilling, **changes)


def test_a_prompt_that_names_no_teacher_is_refused(distilling, make_config):
    del distilling["data"]["train"]["columns"]
    with pytest.raises(DataError, match=r"prompt 0 has 'None' as 'teacher', and model.teachers has left, right"):
        check_inputs(make_config(distilling))


def test_a_teacher_of_another_vocabulary_is_named(distilling, make_config, tmp_path):
    small = save_tiny_model(tmp_path / "small", vocab_size=300)
    with pytest.raises(ConfigError, match="the teacher's vocabulary has 300 tokens"):
        check_inputs(make_config(distilling, model__teachers={"left": small}))
