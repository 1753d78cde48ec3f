"""Self-distillation in this process: the model before the run, shown the answer, judges what the policy samples."""

import io
import json
import random

import pytest
import torch
from rich.console import Console
from rlhf_core import ConfigError, DataError
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from rlhf_launch.replay.rerun import replay_step
from rlhf_launch.samples.prompts import policy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

LETTERS = "abcd"
QUESTIONS = {f"{n}=": LETTERS[n * 7 % 4] for n in range(20)}


@pytest.fixture(scope="module")
def able(tmp_path_factory):
    """A model that repeats a letter which stands before the question, and guesses without; with questions."""
    folder = tmp_path_factory.mktemp("self-distillation")
    path = save_tiny_model(folder / "model", hidden_size=64)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=2e-3), random.Random(0)
    tokenizer.padding_side = "right"
    for _ in range(250):
        texts = []
        for question in QUESTIONS:
            letter = draw.choice(LETTERS)
            texts += [f"{letter}|{question}{letter}", f"{question}{draw.choice(LETTERS)}"]
        batch = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    rows = [{"prompt": question, "answer": letter} for question, letter in QUESTIONS.items()]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def learning(settings, able):
    del settings["reward"]
    settings["model"] = {"path": str(able / "model")}
    settings["data"] = {"train": str(able / "questions.jsonl")}
    settings["algorithm"] = {"name": "self_distillation", "teacher_template": "{answer}|{prompt}"}
    settings["rollout"] |= {"samples_per_prompt": 8, "sampling": {"max_tokens": 2}}
    settings["train"] |= {"prompts_per_step": 20, "steps": 40, "optimizer": {"learning_rate": 2e-3}}
    return settings


def right(path):
    """Mean probability of the right letter after its question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    found = []
    with torch.no_grad():
        for question, letter in QUESTIONS.items():
            logits = model(input_ids=torch.tensor([tokenizer(question)["input_ids"]])).logits[0, -1].float()
            found.append(float(logits.softmax(-1)[tokenizer(letter)["input_ids"][0]]))
    return sum(found) / len(found)


def rows_of(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.stack
def test_what_the_model_can_do_when_shown_it_learns_to_do_alone(learning, make_config, able):
    run = train(make_config(learning))
    rows = rows_of(run)
    assert all(row["teacher/taught"] == 1 and "idle_seconds/teacher" in row for row in rows)
    before, after = right(able / "model"), right(run.model)
    assert before < 0.35, before
    assert after > before + 0.3, (before, after)


@pytest.mark.stack
def test_those_who_fail_learn_from_those_who_do_not(learning, make_config, able):
    """No reward is in the advantage: the signal is what another sample of the same prompt shows."""
    learning["algorithm"]["teacher_template"] = "{success}|{prompt}"
    run = train(make_config(learning, reward={"parts": {"right": {"kind": "exact", "answer": "answer"}}}))
    taught = [row["teacher/taught"] for row in rows_of(run)]
    # of eight guesses at one of four letters, one of the seven others is right in 1 - (3/4)^7 of cases
    assert 0.6 < taught[0] < 1
    before, after = right(able / "model"), right(run.model)
    assert after > before + 0.3, (before, after)


@pytest.mark.stack
def test_the_teacher_s_log_probs_are_those_after_its_own_prompt(learning, make_config, able):
    """Prompts of different lengths, of which some are shown nothing; and the step replays with the same bits."""
    learning["algorithm"]["teacher_template"] = "{success}|{success}|{prompt}"
    config = make_config(
        learning,
        reward={"parts": {"right": {"kind": "exact", "answer": "answer"}}},
        train={**learning["train"], "steps": 1, "minibatches": 2},
        bundles={"every": 1},
        checkpoint={"every": 1},
    )
    run = train(config)
    bundle = read_bundle(run.folder / "bundles" / "step-000001")
    batch, groups = bundle.batch(), bundle.groups()
    assert batch is not None
    model, tokenizer = AutoModelForCausalLM.from_pretrained(able / "model"), policy_tokenizer(config.model)
    trajectories = [(group, index) for group in groups for index in range(len(group.trajectories))]
    taught = 0
    for row, (group, index) in enumerate(trajectories):
        trajectory, mask = group.trajectories[index], batch.response_mask[row]
        successes = [
            tokenizer.decode(list(other.response_token_ids), skip_special_tokens=True)
            for place, other in enumerate(group.trajectories)
            if place != index and group.scores[place].value == 1
        ]
        assert bool(batch["taught"][row]) == bool(successes)
        if not successes:
            assert not batch["advantages"][row].any()
            continue
        taught += 1
        shown = tokenizer(f"{successes[0]}|{successes[0]}|{trajectory.metadata['prompt']}")["input_ids"]
        response = list(trajectory.response_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([shown + response])).logits[0].float().log_softmax(-1)
        expected = logits[len(shown) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(batch["teacher_log_probs"][row][mask], expected, rtol=0, atol=1e-4)
        gap = (expected - batch["old_log_probs"][row][mask]).clamp(-20, 20)
        torch.testing.assert_close(batch["advantages"][row][mask], gap, rtol=0, atol=2e-4)
    assert 0 < taught < len(trajectories)
    again = replay_step(run.folder / "bundles" / "step-000001", console=Console(file=io.StringIO()))
    assert again.equal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__teacher_template": "{prompt}"}, "shows the teacher nothing"),
        ({"algorithm__teacher_template": "{answer"}, "is no template"),
        ({"algorithm__teacher_template": "{0}{prompt}"}, r"the place \{0\}"),
        ({"algorithm__teacher_template": "{success}{prompt}"}, "without a reward no sample is a success"),
        ({"rollout__agent": {"environment": "rlhf_rollout:SingleTurn"}}, "leave rollout.agent out"),
        ({"algorithm__name": "on_policy_distillation"}, "teacher_template"),
    ],
)
def test_what_does_not_go_together_is_refused(learning, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(learning, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__teacher_template": "{gold}|{prompt}"}, "names the column 'gold', and prompt 0 has: answer"),
        ({"algorithm__teacher_template": "{answer}" * 5000 + "{prompt}"}, "the teacher takes 4096"),
        ({"algorithm": {"name": "self_distillation"}}, "give what the teacher is shown"),
    ],
)
def test_data_that_cannot_be_shown_is_refused_before_a_model_is_loaded(learning, make_config, changes, message):
    with pytest.raises(DataError, match=message):
        check_inputs(make_config(learning, **changes))


def test_messages_keep_all_but_the_last_text(learning, make_config, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7="}]
    own = [{"role": "user", "content": "b|7="}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": messages, "answer": "b", "teacher_prompt": own}) + "\n")
    learning["train"]["prompts_per_step"], learning["lengths"] = 1, {}
    given = check_inputs(make_config(learning, data={"train": str(rows)}, algorithm={"name": "self_distillation"}))
    assert given.prompts.prompts[0].metadata["teacher_prompt"] == own
    with pytest.raises(ConfigError, match="leave one of them out"):
        check_inputs(make_config(learning, data={"train": str(rows)}))
    rows.write_text(json.dumps({"prompt": messages, "answer": "b"}) + "\n")
    (made,) = check_inputs(make_config(learning, data={"train": str(rows)})).prompts.prompts
    assert made.metadata["teacher_prompt"] == [messages[0], {"role": "user", "content": "b|7="}]
