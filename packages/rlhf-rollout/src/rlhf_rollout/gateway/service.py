"""The gateway's endpoints: from a client's body to what is sampled, recorded and answered."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rlhf_core import CapabilityError, GenerationRequest, GenerationResult, PackedInts, Sample
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rlhf_rollout.chat.messages import plain_message
from rlhf_rollout.chat.thoughts import begins_inside_thought, knows_thoughts
from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.chat.tool_calls import ToolCallParser
from rlhf_rollout.gateway.apis import messages, responses
from rlhf_rollout.gateway.apis.answers import Answer
from rlhf_rollout.gateway.apis.chat_form import ChatForm, check_length, read_chat
from rlhf_rollout.gateway.apis.requests import Kind, read_prompt, read_settings, shortened
from rlhf_rollout.gateway.apis.schema import openapi
from rlhf_rollout.gateway.bodies import Lanes, parse_body
from rlhf_rollout.gateway.config import GatewayConfig
from rlhf_rollout.gateway.http import AccessDenied, json_response, named_errors, server_event, unless_gone
from rlhf_rollout.gateway.session_turns import TurnUnderWay
from rlhf_rollout.gateway.sessions import TurnPrompt
from rlhf_rollout.gateway.stream import ClientRequest, stream_chunks
from rlhf_rollout.generator import Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request as it came in, with the turn of its session if it has one."""

    request: Request
    text: bytes
    turn: TurnUnderWay | None


Endpoint = Callable[[Asked], Awaitable[Response]]


class Service:
    """Answers requests. What takes time for a large request is done in threads."""

    def __init__(
        self, backend: Generator, tokens: ChatTokens, config: GatewayConfig, parse_tool_calls: ToolCallParser
    ) -> None:
        self._backend, self._config, self._parse = backend, config, parse_tool_calls
        self._tokens, tokenizer = tokens, tokens.tokenizer
        self._lanes = Lanes()
        self._numbers = itertools.count()
        vocabulary = tokenizer.get_vocab()
        self._vocabulary = config.vocab_size or len(tokenizer)
        self._most_characters = config.max_model_len * max(map(len, vocabulary), default=1)
        self._thinks = knows_thoughts(tokenizer)

    # ------------------------------------------------------------ endpoints

    async def models(self, asked: Asked) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, asked: Asked) -> Response:
        """`GET /v1/models/{model}`."""
        if (name := asked.request.path_params["model"]) != self._config.model:
            raise AccessDenied(404, f"there is no model {name!r} here; this is {self._config.model!r}")
        return json_response(self._model())

    async def chat(self, asked: Asked) -> Response:
        """`POST /v1/chat/completions`."""
        work = await self._prepared(asked, self._chat_work)
        return await self._respond(asked, work, dict, self._chunk_events(work))

    async def messages(self, asked: Asked) -> Response:
        """`POST /v1/messages`, Anthropic's."""
        work = await self._prepared(asked, lambda body, turn: self._chat_work(messages.to_chat(body), turn))
        return await self._respond(asked, work, messages.from_chat, self._message_events(work))

    async def responses(self, asked: Asked) -> Response:
        """`POST /v1/responses`."""
        work = await self._prepared(asked, lambda body, turn: self._chat_work(responses.to_chat(body), turn))
        return await self._respond(asked, work, responses.from_chat, self._response_events(work))

    async def completions(self, asked: Asked) -> Response:
        """`POST /v1/completions`."""
        work = await self._prepared(asked, self._completion_work)
        return await self._respond(asked, work, dict, self._chunk_events(work))

    async def schema(self, asked: Asked) -> Response:
        """`GET /openapi.json`."""
        return json_response(openapi(self._config.model))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "rlhf",
            "max_model_len": self._config.max_model_len,
        }

    # ------------------------------------------------------------ from the body to the request

    async def _prepared(
        self, asked: Asked, make: Callable[[Mapping[str, Any], TurnUnderWay | None], ClientRequest]
    ) -> ClientRequest:
        def prepare() -> ClientRequest:
            return make(parse_body(asked.text, self._config.model), asked.turn)

        return await self._lanes.run(len(asked.text), prepare)

    def _chat_work(self, body: Mapping[str, Any], turn: TurnUnderWay | None) -> ClientRequest:
        # A message is a token at least.
        form = read_chat(
            body,
            most_characters=self._most_characters,
            most_messages=self._config.max_model_len,
            images=self._tokens.images is not None,
        )
        if turn is not None:
            prompt = turn.session.record.prompt(self._tokens, form.messages, form.tools, form.options)
        else:
            context = self._tokens.prompt_context(form.messages, form.tools, form.options)
            prompt = TurnPrompt(parent=None, context=context.token_ids, images=context.images)
        return self._work(body, prompt, turn, form)

    def _completion_work(self, body: Mapping[str, Any], turn: TurnUnderWay | None) -> ClientRequest:
        prompt = read_prompt(body, self._tokenised, vocabulary=self._vocabulary, most=self._config.max_model_len)
        token_ids = PackedInts(prompt)
        if self._tokens.images is not None:
            self._tokens.images.check_text(token_ids)
        if turn is not None:
            return self._work(body, turn.session.record.prompt_of_tokens(token_ids), turn, None)
        return self._work(body, TurnPrompt(parent=None, context=token_ids), turn, None)

    def _tokenised(self, text: str) -> list[int]:
        check_length(len(text), self._most_characters)
        return self._tokens.tokenizer(text, add_special_tokens=True)["input_ids"]

    def _work(
        self, body: Mapping[str, Any], prompt: TurnPrompt, turn: TurnUnderWay | None, form: ChatForm | None
    ) -> ClientRequest:
        config, token_ids = self._config, prompt.token_ids
        kind: Kind = "text_completion" if form is None else "chat.completion"
        settings = read_settings(
            body,
            kind=kind,
            room=config.max_model_len - len(token_ids),
            vocabulary=self._vocabulary,
            fixed=(turn.session.limits.sampling if turn is not None else None) or config.sampling,
        )
        thinking = self._thinking(token_ids) if form is not None and self._thinks else None
        if settings.sampling.json_schema and thinking:
            raise CapabilityError(
                "`response_format`: the chat template begins the answer inside a thought, which is no JSON; switch "
                'thoughts off where the template can (`chat_template_kwargs: {"enable_thinking": false}`)'
            )
        if turn is not None:
            sampling = shortened(settings.sampling, turn.reserve(settings.n))
            settings = replace(settings, sampling=sampling)
        answer = Answer(
            kind=kind,
            model=config.model,
            created=int(time.time()),
            answer_id=f"{'cmpl' if form is None else 'chatcmpl'}-{uuid.uuid4().hex}",
            prompt_token_ids=token_ids,
            tokenizer=self._tokens.tokenizer,
            asked=settings,
            thinking=thinking,
        )
        generation = GenerationRequest(
            request_id=f"gateway/{next(self._numbers)}",
            prompt_token_ids=prompt.request_token_ids,
            sampling=settings.sampling,
            images=[image.open() for image in prompt.shown],
            n=settings.n,
            seed=settings.seed,
        )
        return ClientRequest(answer=answer, generation=generation, prompt=prompt, turn=turn, form=form)

    def _thinking(self, prompt: PackedInts) -> bool:
        return begins_inside_thought(self._tokens.tokenizer, prompt[-8:].tolist())

    # ------------------------------------------------------------ from the request to the answer

    async def _respond(
        self,
        asked: Asked,
        work: ClientRequest,
        tell: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        events: AsyncIterator[str],
    ) -> Response:
        """The answer in the client's API: whole, by `tell`, or a stream of `events`."""
        if work.answer.asked.stream:
            # Starlette cancels the iterator when the client goes away, and with it the request in the backend.
            return StreamingResponse(named_errors(events), media_type="text/event-stream")
        result = await unless_gone(asked.request, work.through(self._backend).generate(work.generation))
        if result is None:
            return Response(status_code=499)
        return json_response(tell(await self._lanes.run(0, self._answer, work, result)))

    def _answer(self, work: ClientRequest, result: GenerationResult) -> dict[str, Any]:
        told = [self._record(work, sample, result) for sample in result.samples]
        if work.form is None:
            return work.answer.completion(result.samples)
        return work.answer.chat(result.samples, told)

    def _record(self, work: ClientRequest, sample: Sample, result: GenerationResult) -> Mapping[str, Any]:
        """The answer as a message, kept in the session if there is one."""
        form, said, message = work.form, None, {}
        if self._config.vocab_size is None and sample.token_ids:
            self._vocabulary = max(self._vocabulary, 1 + int(np.asarray(sample.token_ids).max()))
        if form is not None:
            message = work.answer.message(sample, self._parse, form)
            said = [*form.messages, plain_message(message)]
        if work.turn is not None:
            work.turn.recorded(
                lambda record: record.record(
                    work.prompt,
                    sample,
                    result.meaning,
                    messages=said,
                    tools=form.tools if form is not None else (),
                    options=form.options if form is not None else None,
                )
            )
        return message

    # ------------------------------------------------------------ streams

    def _chunks(self, work: ClientRequest) -> AsyncIterator[Mapping[str, Any]]:
        async def tell(sample: Sample, result: GenerationResult) -> Mapping[str, Any]:
            return await self._lanes.run(0, partial(self._record, work, sample, result))

        backend, pieces = work.through(self._backend), self._config.stream_tokens
        return stream_chunks(backend, work, tell, slice_tokens=pieces)

    async def _chunk_events(self, work: ClientRequest) -> AsyncIterator[str]:
        async for chunk in self._chunks(work):
            yield server_event(chunk)
        yield "data: [DONE]\n\n"

    async def _message_events(self, work: ClientRequest) -> AsyncIterator[str]:
        async for event in messages.events(self._chunks(work), len(work.generation.prompt_token_ids)):
            yield server_event(event, event["type"])

    async def _response_events(self, work: ClientRequest) -> AsyncIterator[str]:
        result = await work.through(self._backend).generate(work.generation)
        answer = await self._lanes.run(0, self._answer, work, result)
        for event in responses.events(responses.from_chat(answer)):
            yield server_event(event, event["type"])
