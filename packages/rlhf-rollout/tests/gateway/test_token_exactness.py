"""Clients that edit, branch and rename at random: what is sampled is trained exactly once, bit for bit."""

import json
import random
import zlib
from collections import Counter

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_core import GenerationResult, Sample
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig

TEMPLATE = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}</tool_call>' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TEXTS = (
    "Yes.<|im_end|>",
    "cut off",
    "<think>\nHm.\n</think>\n\nNo.<|im_end|>",
    "<think>\n\n</think>\n\nNo.<|im_end|>",
    "<think>never ended",
    '<think>\nHm.\n</think>\n\n<tool_call>{"name": "look", "arguments": {"b": 1.0,"a":"ü"}}</tool_call><|im_end|>',
    '<tool_call>{"name":"look","arguments":{}}</tool_call> <tool_call>{"name":"look"}</tool_call><|im_end|>',
    '<tool_call>{"name": "other", "arguments": {}}</tool_call><|im_end|>',
    " \n <|im_end|>",
    "<|im_end|>",
)


class Hashing:
    """A backend whose log-prob of a token follows from all tokens up to it, so that it can be computed again."""

    def __init__(self, tokenizer) -> None:
        self.texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        self.random = random.Random(0)
        self.sampled: Counter[int] = Counter()

    async def generate(self, request):
        return GenerationResult(
            request_id=request.request_id,
            samples=tuple(self.sample(request) for _ in range(request.n)),
            meaning=request.sampling.meaning,
        )

    def sample(self, request):
        # Half of the samples are no text at all.
        tokens = self.random.choice([*self.texts, [self.random.randrange(5, 261) for _ in range(8)]])
        tokens = tokens[: request.sampling.max_tokens]
        states = running(request.prompt_token_ids + tuple(tokens))[len(request.prompt_token_ids) :]
        self.sampled.update(states)
        return Sample(
            token_ids=tokens,
            log_probs=[log_prob(state) for state in states],
            weight_versions=[3] * len(tokens),
            finish_reason="stop" if tokens[-1:] == [3] else "length",
        )


def running(token_ids):
    """For each token a number that depends on it and on all before it."""
    state, states = 0, []
    for token in token_ids:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        states.append(state)
    return states


def log_prob(state):
    return float(np.float32(-5 * state / 2**32))


@pytest.fixture(scope="module")
def served():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    backend = Hashing(tokenizer)
    with Gateway(backend, tokenizer, GatewayConfig(model="m", max_model_len=8192, stream_tokens=3)) as gateway:
        yield gateway, backend


def follow(history, message):
    """The history with an answer and what comes next."""
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]
    return [*history, message, *(results or [{"role": "user", "content": "and?"}])]


def renamed(history, number):
    """The same history from a client that names calls and writes JSON in its own way, and drops thoughts."""
    text = json.dumps([{k: v for k, v in message.items() if k != "reasoning_content"} for message in history])
    made = json.loads(text.replace('"call_', f'"mine_{number}_'))
    for message in made:
        message["content"] = message["content"] or None
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    return made


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "stream", "two", "rename", "edit", "complete"]), st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_what_is_sampled_is_trained_exactly_once(served, steps):
    gateway, backend = served
    backend.sampled.clear()
    access = gateway.open_session("any")
    histories = [[{"role": "user", "content": "What?"}]]
    with httpx.Client(base_url=access.url, headers={"x-api-key": access.api_key}) as client:

        def post(path, **body):
            answer = client.post(path, json={"model": "m", "max_tokens": 60} | body)
            assert answer.status_code == 200, answer.text
            return answer

        for kind, number in steps:
            history = histories[number % len(histories)]
            if kind in ("ask", "two"):
                n = 2 if kind == "two" else 1
                answer = post("/chat/completions", messages=history, tools=TOOLS, n=n).json()
                histories += [follow(history, choice["message"]) for choice in answer["choices"]]
            elif kind == "stream":
                post("/chat/completions", messages=history, stream=True)
            elif kind == "complete":
                prompt = list(range(5, 9))
                said = post("/completions", prompt=prompt).json()["choices"][0]["token_ids"]
                post("/completions", prompt=[*prompt, *said, 7])
            elif kind == "rename":
                histories.append(renamed(history, number))
            else:
                edited = dict(history[number % len(history)], content="edited")
                histories.append([edited if i == number % len(history) else m for i, m in enumerate(history)])
    trained: Counter[int] = Counter()
    for trajectory in gateway.close_session("any"):
        states = running(trajectory.token_ids)
        for state, mask, found in zip(states, trajectory.response_mask, trajectory.rollout_log_probs, strict=True):
            if mask:
                assert found == log_prob(state)
                trained[state] += 1
    assert trained == backend.sampled
