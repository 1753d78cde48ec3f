"""HTTPReward against real servers on loopback, and every way they can fail."""

import asyncio
import itertools
import os
import threading
import time

import pytest
from reward_ground import refusing_url, score, servers, trajectory, values
from rlhf_core import ConfigError, RewardError, Score
from rlhf_rollout import EndpointsConfig, HTTPReward, HTTPRewardConfig


def lengths(body):
    return 200, {"scores": [float(len(text)) for text in body["completions"]]}


def reward(*urls, batch_size=0, **changes) -> HTTPReward:
    endpoints = EndpointsConfig(**{"urls": urls, "backoff_s": 0.01, "timeout_s": 5.0, **changes})
    return HTTPReward(HTTPRewardConfig(endpoints=endpoints, batch_size=batch_size))


TEXTS = ["", "a", "bb", "ccc", "dddd", "eeeee"]


def test_a_batch_is_one_request_with_its_columns():
    with servers(lengths) as (server,):
        assert values(reward(server.url), TEXTS[:2], answer="7", hidden=object()) == [0.0, 1.0]
    (body,) = server.bodies
    assert body == {
        "sample_ids": ["s0", "s1"],
        "completions": ["", "a"],
        "prompts": ["p0", "p1"],
        "columns": {"answer": ["7", "7"]},
    }


def test_all_servers_work_and_all_answers_are_used():
    with servers(lengths, lengths, lengths) as started:
        assert values(reward(*[s.url for s in started]), TEXTS) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [len(server.bodies) for server in started] == [1, 1, 1]
    assert sorted(t for server in started for t in server.bodies[0]["completions"]) == sorted(TEXTS)


def test_small_requests_are_balanced():
    with servers(lengths, lengths) as started:
        assert values(reward(*[s.url for s in started], batch_size=1), TEXTS) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [len(server.bodies) for server in started] == [3, 3]


def test_other_forms_of_answer():
    forms = [{"rewards": [1, 2]}, [1, 2], {"scores": [{"score": 1}, {"score": 2, "tidy": True}]}]
    for form in forms:
        with servers(lambda body, form=form: (200, form)) as (server,):
            assert values(reward(server.url), ["a", "b"]) == [1.0, 2.0]
    with servers(lambda body: (200, forms[2])) as (server,):
        assert score(reward(server.url), ["a", "b"])[1] == Score(value=2.0, components={"tidy": 1.0})


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setitem(os.environ, "REWARD_KEY", "secret")
    with servers(lengths) as (server,):
        asked = reward(server.url, api_key_env="REWARD_KEY", headers={"X-Run": "7"})
        values(asked, ["a"])
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.headers[0]["x-run"] == "7"
    monkeypatch.delitem(os.environ, "REWARD_KEY")
    with pytest.raises(ConfigError, match="'REWARD_KEY', which is not set"):
        reward(server.url, api_key_env="REWARD_KEY")


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_passing_faults_are_tried_again(status):
    answers = iter([(status, "later"), (status, "later")])
    with servers(lambda body: next(answers, lengths(body))) as (server,):
        assert values(reward(server.url), ["a"]) == [1.0]
    assert len(server.bodies) == 3


def test_a_dead_server_leaves_its_share_to_the_others():
    with servers(lengths) as (server,):
        assert values(reward(refusing_url(), server.url, batch_size=1), TEXTS) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.stack
def test_a_dead_server_does_not_draw_the_retries():
    """It has the fewest requests in flight, since it refuses at once."""
    answers = itertools.chain([(500, "later")] * 2, itertools.repeat(None))

    def sometimes(body):
        time.sleep(0.02)
        return next(answers) or lengths(body)

    with servers(sometimes) as (server,):
        asked = reward(refusing_url(), server.url, batch_size=1, attempts=4, backoff_s=0.02)
        for _ in range(4):
            assert values(asked, TEXTS * 4) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 4


def test_requests_of_all_batches_together_are_bounded():
    lock, now, most = threading.Lock(), 0, 0

    def counts(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return lengths(body)

    with servers(counts) as (server,):
        asked = reward(server.url, batch_size=1, max_in_flight=3)

        async def batches():
            await asyncio.gather(*(asked.score([trajectory(i)] * 2, ["a"] * 2) for i in range(8)))

        asyncio.run(batches())
    assert len(server.bodies) == 16
    assert most <= 3


def test_a_stalling_server_is_left_at_the_deadline():
    release = threading.Event()

    def stalls(body):
        release.wait(30)
        return lengths(body)

    with servers(stalls, lengths) as started:
        found = values(reward(*[s.url for s in started], timeout_s=0.5), TEXTS)
        release.set()
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(started[1].bodies) == 2


def test_what_never_works_names_servers_samples_and_the_last_error():
    with servers(lambda body: (500, "on fire")) as (server,):
        with pytest.raises(RewardError, match=f"after 3 attempts at {server.url}.*500.*on fire") as raised:
            values(reward(server.url, attempts=3), ["a", "b"])
        assert raised.value.sample_ids == ("s0", "s1")
    with pytest.raises(RewardError, match=r"after 2 attempts at .*ConnectError"):
        values(reward(refusing_url(), attempts=2), ["a"])


def test_refusals_are_not_repeated():
    with (
        servers(lambda body: (401, "who are you")) as (server,),
        pytest.raises(RewardError, match=r"answered 401.*who are you"),
    ):
        values(reward(server.url), ["a"])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "not JSON"),
        ({"result": [1.0]}, "answer {'scores'"),
        ({"scores": [1.0]}, "1 scores for 2"),
        ({"scores": [1.0, 2.0, 3.0]}, "3 scores for 2"),
        ({"scores": [1.0, None]}, "answered None for one sample"),
        ({"scores": [1.0, {"value": 2}]}, "the key 'score'"),
        ('{"scores": [1.0, NaN]}', "returned nan for sample 's1'"),
    ],
)
def test_unusable_answers_are_refused(answer, message):
    with servers(lambda body: (200, answer)) as (server,), pytest.raises(RewardError, match=message):
        values(reward(server.url), ["a", "b"])


def test_of_an_answer_without_end_no_more_is_read_than_allowed():
    long = {"scores": [0.0], "why": "w" * 2_000_000}
    with servers(lambda body: (200, long)) as (server,):
        assert values(reward(server.url, max_answer_bytes=3_000_000), ["a"]) == [0.0]
        with pytest.raises(RewardError, match="answered 200 with more than max_answer_bytes=1000000"):
            values(reward(server.url, max_answer_bytes=1_000_000), ["a"])
    assert len(server.bodies) == 2  # what is too long once is not asked for again


def test_no_samples_no_request():
    with servers(lengths) as (server,):
        assert values(reward(server.url), []) == []
    assert server.bodies == []


@pytest.mark.parametrize(
    "changes",
    [
        *({"urls": ()}, {"urls": ("localhost:1",)}, {"attempts": 0}, {"timeout_s": 0}, {"max_in_flight": 0}),
        {"max_answer_bytes": 0},
    ],
)
def test_settings_are_checked(changes):
    with pytest.raises(ConfigError, match="endpoints"):
        EndpointsConfig(**{"urls": ("http://127.0.0.1",), **changes})
