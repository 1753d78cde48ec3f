"""Samples as the JSON objects that OpenAI-compatible clients read, whole or as a stream of chunks.

Beyond the API's own fields a choice carries `token_ids` and `weight_versions`, and the answer `prompt_token_ids`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rlhf_core import PackedInts, Sample, ToolCall

from rlhf_rollout.chat.thoughts import split_thought
from rlhf_rollout.chat.tool_calls import ToolCallParser, split_calls
from rlhf_rollout.gateway.apis.chat_form import ChatForm
from rlhf_rollout.gateway.apis.requests import Kind, RequestSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Makes the JSON of one request's answer."""

    kind: Kind
    model: str
    created: int
    answer_id: str
    prompt_token_ids: PackedInts
    tokenizer: Any
    asked: RequestSettings
    thinking: bool | None = None
    """Whether the prompt ends inside of a thought. None: the template knows no thoughts."""

    def text(self, sample: Sample) -> str:
        """What the sample says, without special tokens and without the stop that ended it."""
        tokens = list(sample.token_ids)
        sampling = self.asked.sampling
        if sample.finish_reason == "stop" and tokens and tokens[-1] in sampling.stop_token_ids:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        stop = self._stop(sample, text)
        return text if stop is None else text[: text.find(stop)]

    def _stop(self, sample: Sample, text: str) -> str | None:
        """The stop string that ended the sample, if one did."""
        if sample.finish_reason != "stop":
            return None
        found = [(text.find(stop), stop) for stop in self.asked.sampling.stop if stop in text]
        return min(found)[1] if found else None

    def message(self, sample: Sample, parse: ToolCallParser, form: ChatForm) -> dict[str, Any]:
        """The sample as an assistant's message; its thought and its calls of the tools on offer apart."""
        thought, text = self._split(self.text(sample))
        message = {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})
        if not form.tools:
            return message
        # Some formats are told by special tokens.
        _, said = self._split(self.tokenizer.decode(list(sample.token_ids)))
        try:
            rest, calls = split_calls(said, parse)
        except Exception as error:  # a parser of the user's, or text that no parser was made for
            _log.warning("tool calls could not be read, and stay text: %s: %s", type(error).__name__, error)
            return message
        if not calls or not all(map(form.takes, calls)):
            return message
        for special in self.tokenizer.all_special_tokens:
            rest = rest.replace(special, "")
        return message | {"content": rest.strip() or None, "tool_calls": list(map(_told, calls))}

    def _split(self, text: str) -> tuple[str, str]:
        """The thought and what follows it."""
        return ("", text) if self.thinking is None else split_thought(text, inside=self.thinking)

    def chat(self, samples: Sequence[Sample], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The whole answer of a chat request."""
        choices = []
        for index, (sample, message) in enumerate(zip(samples, messages, strict=True)):
            log_probs = {"content": self._chat_log_probs(sample)} if self.asked.log_probs else None
            choice = {"index": index, "message": message, "logprobs": log_probs}
            choices.append(choice | self._ending(sample, message) | _extras(sample))
        return self._frame(choices) | {
            "usage": self._usage(samples),
            "prompt_token_ids": self.prompt_token_ids.tolist(),
        }

    def completion(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The whole answer of a completion request."""
        choices = [
            {
                "index": index,
                "text": self.text(sample),
                "finish_reason": sample.finish_reason,
                "logprobs": self._completion_log_probs(sample) if self.asked.log_probs else None,
                "prompt_token_ids": self.prompt_token_ids.tolist(),
            }
            | _extras(sample)
            for index, sample in enumerate(samples)
        ]
        return self._frame(choices) | {"usage": self._usage(samples)}

    # ------------------------------------------------------------ streams

    def delta(self, index: int, text: str, part: Sample | None, *, first: bool = False) -> dict[str, Any]:
        """A chunk with a piece of text, and the tokens that it came from."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
        if self.kind == "chat.completion":
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
            if part is not None and self.asked.log_probs:
                choice["logprobs"] = {"content": self._chat_log_probs(part)}
        else:
            choice["text"] = text
            if part is not None and self.asked.log_probs:
                choice["logprobs"] = self._completion_log_probs(part)
        return self._frame([choice | (_extras(part) if part is not None else {})], chunk=True)

    def thought(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk with the message's reasoning."""
        delta = {"reasoning_content": message["reasoning_content"]}
        return self._frame([{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}], chunk=True)

    def calls(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk with the message's tool calls."""
        made = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        choice = {"index": index, "delta": {"tool_calls": made}, "finish_reason": None, "logprobs": None}
        return self._frame([choice], chunk=True)

    def end(self, index: int, sample: Sample, message: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk of a choice."""
        rest = {"delta": {}} if self.kind == "chat.completion" else {"text": ""}
        return self._frame([{"index": index, "logprobs": None} | rest | self._ending(sample, message)], chunk=True)

    def usage(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The chunk that follows the last choice if the client asked for it."""
        return self._frame([], chunk=True) | {"usage": self._usage(samples)}

    # ------------------------------------------------------------ parts

    def _ending(self, sample: Sample, message: Mapping[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)
        return {"finish_reason": _finish(sample, message), "stop_reason": self._stop(sample, text)}

    def _frame(self, choices: list[Any], *, chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self, samples: Sequence[Sample]) -> dict[str, int]:
        prompt, sampled = len(self.prompt_token_ids), sum(sample.length for sample in samples)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _token_texts(self, sample: Sample) -> list[str]:
        if self.asked.token_names:
            return [f"token_id:{token}" for token in sample.token_ids]
        return self.tokenizer.batch_decode([[token] for token in sample.token_ids])

    def _chat_log_probs(self, sample: Sample) -> list[dict[str, Any]]:
        return [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in zip(self._token_texts(sample), sample.log_probs, strict=True)
        ]

    def _completion_log_probs(self, sample: Sample) -> dict[str, Any]:
        texts = self._token_texts(sample)
        offsets = list(accumulate(map(len, texts), initial=0))[:-1]
        return {
            "tokens": texts,
            "token_logprobs": sample.log_probs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets,
        }


class TextPieces:
    """Text of a growing list of tokens, in pieces that end at whole characters.

    A piece may wait for a following token: one character can be made of several.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._said = ""

    def add(self, tokens: Sequence[int]) -> str:
        """What the tokens add to the text."""
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd") or not text.startswith(self._said):
            return ""
        return self._advance(text)

    def finish(self, text: str) -> str:
        """What is still missing of the final text."""
        return self._advance(text) if text.startswith(self._said) else ""

    def _advance(self, text: str) -> str:
        piece, self._said = text[len(self._said) :], text
        return piece


def _told(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finish(sample: Sample, message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else sample.finish_reason


def _extras(sample: Sample) -> dict[str, Any]:
    return {"token_ids": sample.token_ids.tolist(), "weight_versions": sample.weight_versions.tolist()}
