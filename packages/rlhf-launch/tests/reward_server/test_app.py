"""A reward model served over HTTP to our own client."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn
from rlhf_core import ConfigError, EngineConfig, RewardError, Trajectory
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_launch.cli.main import app
from rlhf_launch.reward_server.app import RewardServer, ServerLimits
from rlhf_launch.reward_server.batching import BatchedRows, BatchLimits
from rlhf_launch.reward_server.requests import RowEncoder
from rlhf_launch.reward_server.serve import open_server
from rlhf_rollout import EndpointsConfig, HTTPReward, HTTPRewardConfig, ModelReward
from typer.testing import CliRunner

MESSAGES = [[{"role": "user", "content": text}] for text in ("Say yes.", "And 2+2?", "One more, please")]
PLAIN = ["1 + 1 =", "a much longer prompt than the other ones: ", "x"]
ANSWERS = ["yes", "four, or so", "no"]
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "rm", head="scalar", seed=3)


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Opens servers in threads; gives the address."""
    opened = []

    def start(model, **options):
        served = model
        if isinstance(model, str):
            served = open_server(model, scratch=tmp_path_factory.mktemp("scratch"), device="cpu", **options)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(served, log_level="error", timeout_graceful_shutdown=10))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        opened.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, thread in opened:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(serve, model):
    return serve(model, token=KEY, limits=ServerLimits(max_body_bytes=200_000))


def post(address, body, key=KEY, path="/score"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        address + path, content=content, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
    )


def trajectories(prompts, answers):
    """As a rollout engine samples them: the answer's tokens, and the end of text."""
    tokenizer, found = byte_tokenizer(), []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt)["input_ids"]
        sampled = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        found.append(
            Trajectory(
                sample_id=str(number),
                group_id=str(number),
                token_ids=[*before, *sampled],
                response_mask=[False] * len(before) + [True] * len(sampled),
                rollout_log_probs=[0.0] * (len(before) + len(sampled)),
                weight_versions=[0] * (len(before) + len(sampled)),
                metadata={"prompt": prompt},
            )
        )
    return found


def scores_here(model, samples):
    from rlhf_algos import TorchEngine

    reward = ModelReward(TorchEngine(EngineConfig(model=model, role="reward")))
    try:
        return [score.value for score in asyncio.run(reward.score(samples, ANSWERS))]
    finally:
        reward.close()


def client(address, **options):
    return HTTPReward(HTTPRewardConfig(endpoints=EndpointsConfig(urls=(address + "/score",), **options)))


@pytest.mark.parametrize("prompts", [MESSAGES, PLAIN], ids=["chat", "plain"])
def test_our_client_gets_the_scores_of_a_runs_own_reward_model(address, model, prompts, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", KEY)
    samples = trajectories(prompts, ANSWERS)
    found = asyncio.run(client(address, api_key_env="SERVICE_KEY").score(samples, ANSWERS))
    expected = scores_here(model, samples)
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)
    # The same as messages, and in OpenRLHF's form.
    body = {"prompts": prompts, "completions": ANSWERS, "columns": {"gold": [1, 2, 3]}}
    assert post(address, body).json()["scores"] == pytest.approx(expected, abs=1e-5)
    texts = [sample.metadata["prompt"] + answer for sample, answer in zip(samples, ANSWERS, strict=True)]
    answer = post(address, {"query": texts, "prompts": texts, "labels": ANSWERS}, path="/get_reward").json()
    assert list(answer) == ["rewards"]
    assert answer["rewards"] == pytest.approx(expected, abs=1e-5)


def test_many_clients_at_once_each_get_their_own(serve, model):
    address = serve(model, batching=BatchLimits(max_batch_tokens=64, wait_s=0.05))
    samples = trajectories(PLAIN, ANSWERS)
    expected = scores_here(model, samples)

    async def all_at_once():
        reward = client(address)
        return await asyncio.gather(*(reward.score([samples[n % 3]], [ANSWERS[n % 3]]) for n in range(30)))

    for number, (score,) in enumerate(asyncio.run(all_at_once())):
        assert score.value == pytest.approx(expected[number % 3], abs=1e-5)


def test_a_request_without_the_token_is_refused(address):
    for key in ("-", "wrong", KEY + "x"):
        answer = post(address, {"query": ["a"]}, key=key)
        assert answer.status_code == 401
        assert "token" in answer.json()["error"]
    with pytest.raises(RewardError, match="401"):
        asyncio.run(client(address).score(trajectories(PLAIN, ANSWERS), ANSWERS))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"query": [1]}', b'{"query": ["' + b"a" * 5000 + b'"]}'])
def test_bad_input_is_a_400_with_a_sentence_and_the_server_lives(address, body):
    answer = post(address, body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]) > 10
    assert post(address, {"query": ["fine"]}).status_code == 200


def test_nothing_to_score_is_no_fault(address):
    assert post(address, {"prompts": [], "completions": []}).json() == {"scores": []}


def test_a_body_that_is_too_large_is_not_read(address):
    assert post(address, {"query": ["a" * 300_000]}).status_code == 413


def test_health_needs_no_token_and_tells_little(address):
    answer = httpx.get(address + "/health", trust_env=False).json()
    assert answer == {"status": "ok", "model": "rm", "waiting": 0}


def test_a_full_queue_is_a_429_that_says_when_to_come_back(serve, model):
    address = serve(model, batching=BatchLimits(wait_s=600.0, max_batch_tokens=1000, max_waiting_tokens=1000))
    waiting = threading.Thread(target=post, args=(address, {"query": ["a" * 600]}))
    waiting.start()
    while not httpx.get(address + "/health", trust_env=False).json()["waiting"]:
        time.sleep(0.01)
    answer = post(address, {"query": ["b" * 600]})
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert post(address, {"query": ["c" * 398]}).status_code == 200  # fills the batch, which ends the wait
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_client_that_goes_away_gives_its_place_back(serve, model):
    address = serve(model, batching=BatchLimits(wait_s=600.0, max_batch_tokens=100))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(address, json={"query": ["a" * 50]}, timeout=httpx.Timeout(60, read=0.5), trust_env=False)
    until = time.monotonic() + 60
    while httpx.get(address + "/health", trust_env=False).json()["waiting"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert post(address, {"query": ["b" * 99]}).status_code == 200


def test_a_model_that_fails_is_the_servers_fault(serve):
    def failing(rows):
        raise RewardError("the model's score of 1 row(s) is not finite, the first is row 0")

    encoder = RowEncoder(byte_tokenizer(), max_length=64)
    answer = post(serve(RewardServer(BatchedRows(failing, BatchLimits()), encoder, name="rm")), {"query": ["a"]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "not finite" in answer.json()["error"]


def test_what_is_no_reward_model_is_refused(tmp_path):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    causal = save_tiny_model(tmp_path / "lm")
    with pytest.raises(ConfigError, match="gives no scores"):
        open_server(causal, scratch=tmp_path / "s")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=2, num_labels=3, **shape)
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="3 labels"):
        open_server(str(tmp_path / "three"), scratch=tmp_path / "s")
    with pytest.raises(ConfigError, match="max-length"):
        open_server(save_tiny_model(tmp_path / "rm", head="scalar"), scratch=tmp_path / "s", max_length=10**6)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve-rm", "nothing/at/all", "--port", port])
    assert done.exit_code == 2
    assert f"port {port}" in done.output


@pytest.mark.stack
def test_the_command_serves_and_ends_well_when_it_is_asked_to(model):
    program = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()", "serve-rm", model]
    environment = {**os.environ, "RLHF_REWARD_TOKEN": KEY}
    with subprocess.Popen([*program, "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = next(line for line in server.stderr if line.startswith("serving"))
            assert model in said
            address, until = said.split()[-1].removesuffix("/score"), time.monotonic() + 240
            while True:
                try:
                    httpx.get(address + "/health", trust_env=False)
                    break
                except httpx.TransportError:
                    assert server.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.2)
            assert post(address, {"query": ["a"]}).status_code == 200
            server.send_signal(signal.SIGTERM)
            rest = server.communicate(timeout=120)[1]
        finally:
            server.kill()
    assert "Traceback" not in rest
    refused = subprocess.run(
        [*program, "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "RLHF_REWARD_TOKEN": ""},
    )
    assert (refused.returncode, "RLHF_REWARD_TOKEN" in refused.stderr) == (2, True)
