"""Judges that are language models: their answers' probabilities, one by one and in pairs."""

import asyncio

import pytest
import torch
from rlhf_core import ConfigError, DataError, ModelOutputs, RewardError, Trajectory
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_rollout import GenerativeRewardConfig, PairwiseRewardConfig
from transformers import AutoModelForCausalLM

TEXTS = ["seven", "a much longer answer, of several words", "7", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("judge"))).eval()


@pytest.fixture
def engine(model):
    """Log-probs of every token, by a padded forward pass."""

    class Engine:
        rows = 0

        def score(self, batch, outputs=("log_probs",)):
            assert outputs == ("log_probs",)
            self.rows += batch.rows
            with torch.no_grad():
                logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
            said = torch.zeros(batch.token_ids.shape)
            said[:, 1:] = logits[:, :-1].log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
            return ModelOutputs(log_probs=said)

    return Engine()


def sample(index, group="0", **metadata):
    return Trajectory(
        sample_id=f"{group}/{index}",
        group_id=group,
        token_ids=(1, 2),
        response_mask=(False, True),
        rollout_log_probs=(0.0, -1.0),
        weight_versions=(-1, 0),
        metadata={"prompt": "3 + 4?", **metadata},
    )


def scored(config, engine, trajectories, texts):
    reward = config.make(engine, name="judge", tokenizer=byte_tokenizer(), policy_tokenizer=None)
    try:
        return asyncio.run(reward.score(trajectories, texts))
    finally:
        reward.close()


def preferred(model, text, answers):
    """Probability of the first answer against the second, by a pass of its own."""
    tokenizer = byte_tokenizer()
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        logits = model(input_ids=ids).logits[0, -1].double()
    yes, no = (logits[tokenizer(answer)["input_ids"][0]] for answer in answers)
    return float(torch.sigmoid(yes - no))


def in_chat(text):
    messages = [{"role": "user", "content": text}]
    return byte_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("chat", [True, False])
def test_a_response_scores_the_probability_of_the_first_answer(model, engine, chat):
    template = "{prompt} {gold}: {completion} {}? {{"
    config = GenerativeRewardConfig(path="judge", template=template, answers=("y", "n"), chat=chat)
    found = scored(config, engine, [sample(i, gold="7") for i in range(4)], TEXTS)
    questions = [f"3 + 4? 7: {text} {{}}? {{{{" for text in TEXTS]
    expected = [preferred(model, in_chat(one) if chat else one, ("y", "n")) for one in questions]
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-6)
    assert [score.value > 0.5 for score in found] == [score.components["log_odds"] > 0 for score in found]
    assert config.columns == {"prompt", "gold"}


def test_a_sample_scores_how_often_it_is_preferred_in_both_orders(model, engine):
    config = PairwiseRewardConfig(path="judge", template="{prompt}|{completion_a}|{completion_b}|", chat=False)
    found = scored(config, engine, [sample(i) for i in range(4)], TEXTS)

    def wins(one, other):
        ahead = preferred(model, f"3 + 4?|{one}|{other}|", ("A", "B"))
        behind = preferred(model, f"3 + 4?|{other}|{one}|", ("A", "B"))
        return (ahead + 1 - behind) / 2

    expected = [sum(wins(one, other) for other in TEXTS if other != one) / 3 for one in TEXTS]
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-6)
    assert sum(score.value for score in found) == pytest.approx(2.0)
    assert engine.rows == 6 * 2 * 2  # pairs, orders, answers
    assert {score.components["compared"] for score in found} == {3.0}


def test_a_judge_that_looks_at_the_place_alone_prefers_nobody(engine):
    """Whatever stands first is better to it: half of the wins for all, and the component says so."""

    class First:
        def score(self, batch, outputs=("log_probs",)):
            said = torch.zeros(batch.token_ids.shape)
            said[0::2] = -0.1
            said[1::2] = -3.0
            return ModelOutputs(log_probs=said)

    config = PairwiseRewardConfig(path="judge", chat=False)
    found = scored(config, First(), [sample(i) for i in range(3)], TEXTS[:3])
    assert [score.value for score in found] == pytest.approx([0.5] * 3)
    assert all(score.components["first"] > 0.9 for score in found)


def test_only_samples_of_one_prompt_are_compared_and_a_lone_one_scores_a_half(engine):
    config = PairwiseRewardConfig(path="judge", chat=False, against=1)
    samples = [*(sample(i) for i in range(4)), sample(0, group="1")]
    found = scored(config, engine, samples, [*TEXTS, "alone"])
    assert [score.components["compared"] for score in found] == [2.0, 2.0, 2.0, 2.0, 0.0]
    assert found[-1].value == 0.5


def test_rows_for_training_ask_what_will_be_asked():
    pair = {"prompt": "3 + 4?", "chosen": "7", "rejected": "8"}
    judge = GenerativeRewardConfig(path="judge", template="{prompt} {completion}", chat=False)
    assert list(judge.rows(pair, "row 1")) == [
        {"prompt": "3 + 4? 7", "completion": "Yes"},
        {"prompt": "3 + 4? 8", "completion": "No"},
    ]
    labelled = {"prompt": "3 + 4?", "completion": "8", "label": False}
    assert [row["completion"] for row in judge.rows(labelled, "row 1")] == ["No"]
    both = PairwiseRewardConfig(path="judge", template="{completion_a} {completion_b}")
    first, second = both.rows(pair, "row 1")
    assert first["prompt"] == [{"role": "user", "content": "7 8"}]
    assert first["completion"] == [{"role": "assistant", "content": "A"}]
    assert (second["prompt"][0]["content"], second["completion"][0]["content"]) == ("8 7", "B")
    with pytest.raises(DataError, match="row 2 has no chosen and rejected"):
        list(both.rows(labelled, "row 2"))
    with pytest.raises(DataError, match="row 3 has neither"):
        list(judge.rows({"prompt": "3 + 4?"}, "row 3"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GenerativeRewardConfig(path="m", template="{prompt}"), r"write \{completion\} in it"),
        (lambda: PairwiseRewardConfig(path="m", template="{completion_a}"), r"write \{completion_b\} in it"),
        (lambda: GenerativeRewardConfig(path="m", answers=("Yes", "Yes")), "two different texts"),
        (lambda: PairwiseRewardConfig(path="m", against=0), "at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_tokenizer_is_looked_at_before_the_model_is_loaded():
    config = GenerativeRewardConfig(path="m", answers=("good", "b"))
    with pytest.raises(ConfigError, match="'good' is 4 tokens"):
        config.check(byte_tokenizer(), name="judge")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; write chat: false"):
        GenerativeRewardConfig(path="m", answers=("y", "n")).check(tokenizer, name="judge")


def test_a_question_that_is_too_long_is_the_sample_s_fault(engine):
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 40
    config = GenerativeRewardConfig(path="m", template="{completion}", answers=("y", "n"), chat=False)
    reward = config.make(engine, name="judge", tokenizer=tokenizer, policy_tokenizer=None)
    with pytest.raises(RewardError, match="has 50 tokens, and the model takes 40") as error:
        asyncio.run(reward.score([sample(0), sample(1)], ["short", "x" * 50]))
    assert error.value.sample_ids == ("0/1",)
    reward.close()
