"""JudgeReward against a server that speaks chat completions."""

import pytest
from reward_ground import score, servers, values
from rlhf_core import ConfigError, DataError, RewardError, Score
from rlhf_rollout import EndpointsConfig, JudgeReward, JudgeRewardConfig


def saying(text):
    return lambda body: (200, {"choices": [{"message": {"role": "assistant", "content": text}}]})


def judge(url, **changes) -> JudgeReward:
    endpoints = EndpointsConfig(urls=(url + "/v1",), backoff_s=0.01, attempts=2)
    return JudgeReward(JudgeRewardConfig(**{"endpoints": endpoints, "model": "judge", **changes}))


def test_a_rating_becomes_a_score():
    with servers(saying("Fair. Rating: 2\nNo: better.\n**Rating:** 5.5")) as (server,):
        assert score(judge(server.url), ["x"]) == [Score(value=0.5, components={"rating": 5.5})]
    assert server.paths == ["/v1/chat/completions"]
    (body,) = server.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 512)


def test_the_template_gets_columns_and_braces_mean_nothing():
    template = "{prompt} | {answer} | {completion}"
    with servers(saying("Rating: 10")) as (server,):
        asked = judge(server.url, template=template, system="Be fair.", options={"seed": 1})
        assert values(asked, ["{answer} {0}"], answer="42") == [1.0]
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "p0 | 42 | {answer} {0}"},
    ]
    assert server.bodies[0]["seed"] == 1


def test_every_sample_is_judged_in_its_place():
    def by_text(body):
        return saying(f"Rating: {len(body['messages'][0]['content'])}")(body)

    with servers(by_text) as (server,):
        asked = judge(server.url, template="{completion}", scale=(0, 10))
        assert values(asked, ["x" * n for n in range(1, 8)]) == [n / 10 for n in range(1, 8)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (saying("I would rather not."), "no rating .*'s0'"),
        (saying("Rating: 11"), "rating 11 for sample 's0' is outside the scale 1 to 10"),
        (saying(None), "no rating"),
        (lambda body: (200, {"error": "no model"}), "no chat completion"),
    ],
)
def test_answers_without_a_rating_are_failures_of_their_sample(answer, message):
    with servers(answer) as (server,):
        with pytest.raises(RewardError, match=message) as raised:
            values(judge(server.url), ["x"])
        assert raised.value.sample_ids == ("s0",)


def test_a_missing_column_is_the_datas_fault():
    with servers(saying("Rating: 1")) as (server,), pytest.raises(DataError, match=r"names \{rubric\}"):
        values(judge(server.url, template="{completion} {rubric}"), ["x"])


@pytest.mark.parametrize(
    "changes", [{"template": "rate it"}, {"pattern": "("}, {"pattern": "\\d"}, {"scale": (1.0, 1.0)}]
)
def test_settings_are_checked(changes):
    with pytest.raises(ConfigError, match="judge"):
        judge("http://127.0.0.1", **changes)
