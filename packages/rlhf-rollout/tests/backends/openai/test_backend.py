"""The remote backend: the kit's sampling checks over HTTP through the gateway, and servers that misbehave."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rlhf_core import (
    CapabilityError,
    ConfigError,
    DeadlineExceeded,
    EngineDiedError,
    GenerationRequest,
    LogProbMeaning,
    RolloutConfig,
    SamplingConfig,
)
from rlhf_core.testing.rollout_sampling import SamplingChecks
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig, OpenAIBackend, TransformersBackend

pytestmark = pytest.mark.stack

REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingConfig(max_tokens=4), n=2, seed=3
)


class TestThroughTheGateway(SamplingChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        started = []

        def start(config):
            served = TransformersBackend(config)
            limits = {"max_model_len": cls.max_model_len, "vocab_size": cls.vocab_size}
            settings = GatewayConfig(model="policy", api_key="secret", **limits)
            gateway = Gateway(served, byte_tokenizer(), settings)
            started.extend([gateway, served])
            options = {
                "base_url": gateway.start(),
                "served_model": "policy",
                "log_probs": "processed",
                "api_key_env": "GATEWAY_KEY",
            }
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GATEWAY_KEY", "secret")
                return OpenAIBackend(RolloutConfig(model="any", max_model_len=cls.max_model_len, options=options))

        yield start
        for part in started:
            part.close()

    def test_capabilities_are_sane(self, backend):
        """It takes no weights, and says so."""
        assert backend.capabilities.transports == frozenset()
        assert backend.capabilities.pause_modes == frozenset()
        for refused in (backend.pause(), backend.connect(None, 0), backend.receive_weights(None)):
            with pytest.raises(CapabilityError, match="evaluation and rejection"):
                self.run(refused)


# ---------------------------------------------------------------- other servers


@pytest.fixture
def serve():
    """A server that answers completions with what a function says: (status, body), or None to stall."""
    servers = []

    def serve(answer, **options):
        stalled = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def _reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self._reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self):
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outcome = answer(len(asked))
                if outcome is None:
                    stalled.wait(30)
                else:
                    self._reply(*outcome)

        asked = []
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        config = RolloutConfig(
            model="m",
            options={"base_url": f"http://127.0.0.1:{server.server_port}/v1", "retries": 0, **options},
        )
        backend = OpenAIBackend(config)
        servers.append((server, backend, stalled))
        return backend, asked

    yield serve
    for server, backend, stalled in servers:
        stalled.set()
        backend.close()
        backend.close()
        server.shutdown()
        server.server_close()


def choice(index=0, **fields):
    log_probs = {"tokens": ["token_id:8", "token_id:9"], "token_logprobs": [-1.0, -2.0]}
    return {"index": index, "text": "x", "finish_reason": "length", "logprobs": log_probs} | fields


def body(*choices):
    return {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": list(choices)}


def ask(backend, request=REQUEST):
    return asyncio.run(backend.generate(request))


def test_token_ids_come_from_the_names_of_tokens_if_need_be(serve):
    backend, asked = serve(lambda _: (200, body(choice(1, finish_reason="stop"), choice(0))))
    result = ask(backend)
    assert [sample.finish_reason for sample in result.samples] == ["length", "stop"]
    assert result.samples[0].token_ids == (8, 9)
    assert result.samples[0].weight_versions == (0, 0)
    assert asked[0]["prompt"] == [5, 6, 7]
    assert (asked[0]["n"], asked[0]["seed"], asked[0]["return_token_ids"]) == (2, 3, True)
    assert not {"min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"} & set(asked[0])


def test_sampling_settings_travel_by_the_names_of_vllm(serve):
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
    }
    backend, asked = serve(lambda _: (200, body(choice(0), choice(1))), log_probs="processed")
    sampling = SamplingConfig(max_tokens=4, **settings)
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), sampling=sampling, n=2)
    assert ask(backend, request).meaning == sampling.meaning
    assert {name: asked[0][name] for name in settings} == settings


def test_raw_log_probs_are_those_of_temperature_one(serve):
    backend, _ = serve(lambda _: (200, body(choice(0), choice(1))))
    sampling = SamplingConfig(max_tokens=4, temperature=0.5, top_p=0.9)
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), sampling=sampling, n=2)
    assert ask(backend, request).meaning == LogProbMeaning()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"logprobs": None}, "0 log-probs"),
        ({"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}}, "no token ids"),
        ({"token_ids": [1, 2, 3]}, "3 token ids and 2 log-probs"),
    ],
    ids=["no log-probs", "text only", "lengths differ"],
)
def test_an_answer_without_ids_or_log_probs_is_refused(serve, fields, part):
    fields = {"token_ids": [8, 9], **fields} if part == "0 log-probs" else fields
    backend, _ = serve(lambda _: (200, body(choice(0, **fields), choice(1, **fields))))
    with pytest.raises(CapabilityError, match=part):
        ask(backend)


def test_fewer_samples_than_asked_for_are_refused(serve):
    backend, _ = serve(lambda _: (200, body(choice(0))))
    with pytest.raises(CapabilityError, match="1 of 2 samples"):
        ask(backend)


def test_a_refusal_carries_the_servers_words(serve):
    backend, _ = serve(lambda _: (400, {"error": {"message": "too long by 7 tokens"}}))
    with pytest.raises(CapabilityError, match="too long by 7 tokens"):
        ask(backend)


def test_a_failing_server_is_tried_again_and_then_given_up(serve):
    backend, asked = serve(lambda n: (500, {}) if n == 1 else (200, body(choice(0), choice(1))), retries=1)
    assert len(ask(backend).samples) == 2
    assert len(asked) == 2
    backend, asked = serve(lambda _: (500, {"error": {"message": "engine dead"}}))
    with pytest.raises(EngineDiedError, match="engine dead"):
        ask(backend)


def test_a_stalling_server_meets_the_deadline(serve):
    backend, _ = serve(lambda _: None, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded, match="timeout_s"):
        ask(backend)


def test_no_server_a_wrong_model_and_wrong_options_are_configuration_errors(serve):
    def start(**options):
        OpenAIBackend(RolloutConfig(model="m", options=options))

    with pytest.raises(ConfigError, match="does not list its models"):
        start(base_url="http://127.0.0.1:9/v1", retries=0)
    backend, _ = serve(lambda _: (200, {}))
    with pytest.raises(ConfigError, match="serves m, not 'other'"):
        start(base_url=backend._options.base_url, served_model="other")
    with pytest.raises(ConfigError, match="'base_url' is missing"):
        start()
    with pytest.raises(ConfigError, match="unknown key 'url'; known are api_key_env, base_url"):
        start(url="x")
    with pytest.raises(ConfigError, match="'raw' or 'processed'"):
        start(base_url="http://x/v1", log_probs="other")
    with pytest.raises(ConfigError, match="must be a URL"):
        start(base_url="localhost:8000")


def test_closing_ends_running_requests(serve):
    backend, asked = serve(lambda _: None)

    async def close_amid():
        task = asyncio.create_task(backend.generate(REQUEST))
        while not asked:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(backend.close)
        await task

    with pytest.raises(EngineDiedError, match="closed during"):
        asyncio.run(asyncio.wait_for(close_amid(), 30))


def test_a_closed_backend_says_so(serve):
    backend, _ = serve(lambda _: (200, {}))
    backend.close()
    with pytest.raises(EngineDiedError, match="closed"):
        ask(backend)
