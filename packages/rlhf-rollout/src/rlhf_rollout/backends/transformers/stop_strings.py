"""Strings that end a sample, looked for in its text as its tokens come."""

from __future__ import annotations

from typing import Any

from rlhf_core import GenerationRequest, RolloutConfig, model_loading


class StopStrings:
    """The text of one sample, and whether a string that ends it is there; the definition is vLLM's.

    The text is that of the sampled tokens behind the prompt, without special tokens: a string that begins in the
    prompt is none, one may begin and end within tokens. What the first `min_tokens` tokens complete is passed over.

    Args:
        tokenizer: of the `tokenizers` library.
        request: the sample's request, with at least one string.
    """

    def __init__(self, tokenizer: Any, request: GenerationRequest) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(request.prompt_token_ids), skip_special_tokens=True)
        self._stops = request.sampling.stop
        self._too_early = request.sampling.min_tokens
        self._tail = ""
        """The end of the text, in which a string may have begun."""

    def ended_by(self, token: int) -> bool:
        """Take the next token; True if it completes a string."""
        before, text = len(self._tail), self._tail + (self._stream.step(self._tokenizer, token) or "")
        self._too_early -= 1
        if self._too_early < 0 and any(text.find(s, max(0, before + 1 - len(s))) >= 0 for s in self._stops):
            return True
        kept = max(map(len, self._stops)) - 1
        self._tail = text[max(0, len(text) - kept) :]
        return False


def decoding_tokenizer(config: RolloutConfig) -> Any:
    """The tokenizer of a model, of the `tokenizers` library; None if it has none."""
    from transformers import AutoTokenizer

    try:
        with model_loading:
            tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError):
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
