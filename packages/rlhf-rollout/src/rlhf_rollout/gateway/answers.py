"""Samples as the JSON objects that OpenAI-compatible clients read, whole or as a stream of chunks.

Beyond the API's own fields a choice carries `token_ids` and `weight_versions`, and the answer `prompt_token_ids`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rlhf_core import PackedInts, Sample, ToolCall

from rlhf_rollout.chat.tool_calls import ToolCallParser, split_calls
from rlhf_rollout.gateway.requests import RequestSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Makes the JSON of one request's answer."""

    kind: str
    """`chat.completion` or `text_completion`."""
    model: str
    created: int
    answer_id: str
    prompt_token_ids: PackedInts
    tokenizer: Any
    asked: RequestSettings

    def text(self, sample: Sample) -> str:
        """What the sample says, without special tokens and without the stop that ended it."""
        tokens = list(sample.token_ids)
        sampling = self.asked.sampling
        if sample.finish_reason == "stop" and tokens and tokens[-1] in sampling.stop_token_ids:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if sample.finish_reason == "stop":
            places = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
            text = text[: min(places, default=len(text))]
        return text

    def message(self, sample: Sample, parse: ToolCallParser | None) -> dict[str, Any]:
        """The sample as an assistant's message; its tool calls apart if there is a parser for them."""
        text = self.text(sample)
        if parse is not None:
            # Some formats are told by special tokens.
            rest, calls = split_calls(self.tokenizer.decode(list(sample.token_ids)), parse)
            if calls:
                for special in self.tokenizer.all_special_tokens:
                    rest = rest.replace(special, "")
                return {"role": "assistant", "content": rest.strip() or None, "tool_calls": list(map(_told, calls))}
        return {"role": "assistant", "content": text}

    def chat(self, samples: Sequence[Sample], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The whole answer of a chat request."""
        choices = []
        for index, (sample, message) in enumerate(zip(samples, messages, strict=True)):
            log_probs = {"content": self._chat_log_probs(sample)} if self.asked.log_probs else None
            choice = {"index": index, "message": message, "logprobs": log_probs}
            choices.append(choice | {"finish_reason": _finish(sample, message)} | _extras(sample))
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

    def calls(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk with the message's tool calls."""
        made = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        choice = {"index": index, "delta": {"tool_calls": made}, "finish_reason": None, "logprobs": None}
        return self._frame([choice], chunk=True)

    def end(self, index: int, sample: Sample, message: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk of a choice."""
        rest = {"delta": {}} if self.kind == "chat.completion" else {"text": ""}
        choice = {"index": index, "finish_reason": _finish(sample, message), "logprobs": None} | rest
        return self._frame([choice], chunk=True)

    def usage(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The chunk that follows the last choice if the client asked for it."""
        return self._frame([], chunk=True) | {"usage": self._usage(samples)}

    # ------------------------------------------------------------ parts

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
