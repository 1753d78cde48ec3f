"""StepReward: where the model judges, how steps become a score, and where they fall in the tokens."""

import asyncio
import math

import pytest
import torch
from rlhf_core import ConfigError, EngineConfig, ModelOutputs, Trajectory
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_rollout import StepReward, StepRewardConfig
from rlhf_rollout.rewards.kinds.steps import split_steps

TOKENIZER = byte_tokenizer()
STEP = TOKENIZER.convert_tokens_to_ids("<|step|>")


class Logits:
    """Gives the n-th judged step of a row the n-th of these values."""

    def __init__(self, *values):
        self.values = values
        self.batch = None

    def score(self, batch, outputs=("log_probs",)):
        assert tuple(outputs) == ("values",)
        self.batch = batch
        values = torch.zeros(batch.token_ids.shape)
        for row in range(batch.rows):
            places = batch.response_mask[row].nonzero().flatten()
            for place, value in zip(places, self.values, strict=False):
                values[row, place] = value
        return ModelOutputs(values=values)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def trajectory(text: str, prompt: str = "Q") -> Trajectory:
    before = TOKENIZER(prompt)["input_ids"]
    after = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]
    n, m = len(before), len(after)
    return Trajectory(
        sample_id="s",
        group_id="g",
        token_ids=(*before, *after),
        response_mask=(False,) * n + (True,) * m,
        rollout_log_probs=(0.0,) * n + (-1.0,) * m,
        weight_versions=(-1,) * n + (0,) * m,
        metadata={"prompt": prompt},
    )


def run(engine, text, **config):
    reward = StepReward(
        engine, TOKENIZER, StepRewardConfig(path="m", placeholder="<|step|>", separator=";", **config)
    )
    (found,) = asyncio.run(reward.score([trajectory(text)], [text]))
    return found


def test_the_model_judges_at_the_placeholder_behind_each_step():
    engine = Logits(logit(0.9), logit(0.5))
    run(engine, "a;b")
    row = TOKENIZER.decode(engine.batch.token_ids[0], skip_special_tokens=False)
    assert row == "Qa;<|step|>b<|step|><|im_end|>"
    mask, ids = engine.batch.response_mask[0], engine.batch.token_ids[0]
    assert ids[:-1][mask[1:]].tolist() == [STEP, STEP]


@pytest.mark.parametrize(
    ("aggregate", "value"), [("min", 0.5), ("product", 0.36), ("mean", 0.6 + 0.2 / 3), ("last", 0.8)]
)
def test_aggregates(aggregate, value):
    found = run(Logits(logit(0.9), logit(0.5), logit(0.8)), "a;b;c", aggregate=aggregate)
    expected = {"mean": (0.9 + 0.5 + 0.8) / 3}.get(aggregate, value)
    assert found.value == pytest.approx(expected if aggregate != "product" else 0.9 * 0.5 * 0.8)
    assert found.components["steps"] == 3
    assert found.rewards == ()


def test_shares_fall_on_the_last_token_of_their_steps():
    found = run(Logits(logit(0.9), logit(0.5)), "aé;bb", aggregate="mean", per_step=True)
    at = {i: reward for i, reward in enumerate(found.rewards) if reward}
    # Q a é(2 bytes) ; | b b: the first step ends at token 4, the second at token 6.
    assert at == {4: pytest.approx(0.45), 6: pytest.approx(0.25)}
    assert sum(found.rewards) == pytest.approx(found.value)


def test_a_placeholder_that_the_policy_wrote_is_not_judged():
    engine = Logits(logit(0.5))
    found = run(engine, "a<|step|>b")
    assert found.components["steps"] == 1
    assert int(engine.batch.response_mask.sum()) == 1


def test_nothing_said_nothing_earned():
    assert run(Logits(), " ").value == 0.0


def test_steps():
    assert split_steps("a;b;", ";") == ["a;", "b;"]
    assert split_steps("a;; b", ";") == ["a;;", " b"]
    assert split_steps("", ";") == []
    assert "".join(split_steps(" x;y; ;z", ";")) == " x;y; ;z"


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="write one of min"):
        StepRewardConfig(path="m", placeholder="x", aggregate="max")
    with pytest.raises(ConfigError, match="aggregate: mean"):
        StepRewardConfig(path="m", placeholder="x", per_step=True)
    with pytest.raises(ConfigError, match="'<none>' is no token"):
        StepReward(Logits(), TOKENIZER, StepRewardConfig(path="m", placeholder="<none>"))


def test_a_real_model_gives_what_its_head_says_at_the_placeholders(tmp_path):
    from rlhf_core import model_outputs
    from transformers import AutoModelForSequenceClassification

    path = save_tiny_model(tmp_path, head="scalar")
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()

    class Engine:
        config = EngineConfig(model=path, role="reward")

        @torch.no_grad()
        def score(self, batch, outputs=("log_probs",)):
            return model_outputs(model, batch, outputs)

    found = run(Engine(), "a;b")
    ids = TOKENIZER("Qa;<|step|>b<|step|>")["input_ids"]
    with torch.no_grad():
        head = model.score(model.base_model(torch.tensor([ids])).last_hidden_state)[0, :, 0]
    expected = [float(head[i].sigmoid()) for i, token in enumerate(ids) if token == STEP]
    assert found.value == pytest.approx(min(expected), abs=1e-5)
    assert found.components["last"] == pytest.approx(expected[-1], abs=1e-5)
