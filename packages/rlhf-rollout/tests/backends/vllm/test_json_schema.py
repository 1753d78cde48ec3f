"""Samples that vLLM keeps to a JSON Schema, straight from the engine and through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from rlhf_core import CapabilityError, GenerationRequest, RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_rollout import Gateway, GatewayConfig, TransformersBackend, VLLMBackend
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
SAMPLING = SamplingConfig(max_tokens=120, json_schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(model: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(RolloutConfig(model=model, max_model_len=512, max_num_seqs=16))
    yield backend
    backend.close()


def request(sampling: SamplingConfig = SAMPLING, name: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=(40, 41), sampling=sampling, n=8, seed=0)


def fits(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"colour", "sure"} and found["colour"] in ("red", "blue") and found["sure"] in (True, False)
    )


def test_a_random_model_writes_json_whose_log_probs_are_those_of_what_was_left(
    backend: VLLMBackend, model: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    result = asyncio.run(backend.generate(request()))
    assert result.meaning.constrained
    assert not result.meaning.plain
    whole = [sample for sample in result.samples if sample.finish_reason == "stop"]
    assert whole, [sample.finish_reason for sample in result.samples]
    texts = [tokenizer.decode(list(sample.token_ids), skip_special_tokens=True) for sample in whole]
    assert all(map(fits, texts)), texts
    net, sample = AutoModelForCausalLM.from_pretrained(model), whole[0]
    row = torch.tensor([[40, 41, *sample.token_ids]])
    with torch.no_grad():
        free = net(input_ids=row).logits[0, 1:-1].log_softmax(dim=-1)
    unbound = free.gather(1, row[0, 2:, None])[:, 0]
    drawn = torch.tensor(list(sample.log_probs))
    # A token is at least as likely among those that are allowed, and certain where it is the only one.
    assert bool((drawn >= unbound - 1e-4).all())
    assert float(drawn.max()) > -1e-4


def test_requests_with_and_without_a_schema_run_beside_each_other(backend: VLLMBackend) -> None:
    async def both() -> list[Any]:
        free = SamplingConfig(max_tokens=12)
        return await asyncio.gather(
            backend.generate(request()), backend.generate(request(free, "free")), backend.generate(request())
        )

    first, free, again = asyncio.run(both())
    assert [list(sample.token_ids) for sample in first.samples] == [list(one.token_ids) for one in again.samples]
    alone = asyncio.run(backend.generate(request(SamplingConfig(max_tokens=12), "alone")))
    assert [list(sample.token_ids) for sample in free.samples] == [list(one.token_ids) for one in alone.samples]


def test_a_client_gets_the_form_that_it_asked_for(backend: VLLMBackend, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = GatewayConfig(model="m", max_model_len=512)
    with Gateway(backend, tokenizer, config) as gateway:
        fixed = SamplingConfig(max_tokens=200, temperature=0.7)
        access = gateway.open_session("s", sampling=fixed)
        with openai.OpenAI(base_url=access.url, api_key=access.api_key, max_retries=0) as client:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
            asked: Any = {"model": "m", "messages": [{"role": "user", "content": "colour?"}]}
            told = client.chat.completions.create(**asked, response_format=form)
            assert told.choices[0].finish_reason == "stop"
            assert fits(told.choices[0].message.content or "")
            streamed = client.chat.completions.create(**asked, response_format=form, stream=True)
            assert fits("".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices))
            response = client.responses.create(
                model="m", input="colour?", text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
            )
            assert fits(response.output_text)
            broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": broken}}
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**asked, response_format=form)
            assert fits(
                client.responses.create(
                    model="m",
                    input="still?",
                    text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
                ).output_text
            )
        made = gateway.close_session("s")
    assert {one.meaning.constrained for one in made} == {True}
    assert {one.meaning.temperature for one in made} == {0.7}


def test_a_backend_that_cannot_says_so(model: str) -> None:
    other = TransformersBackend(RolloutConfig(model=model, max_model_len=128))
    assert not other.capabilities.json_schema
    with pytest.raises(CapabilityError, match="JSON Schema"):
        asyncio.run(other.generate(request()))
    other.close()
