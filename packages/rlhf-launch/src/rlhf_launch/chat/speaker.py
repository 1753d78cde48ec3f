"""A model that replies piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf_algos import choose_device, choose_dtype
from rlhf_core import ConfigError, DataError, EngineConfig, SamplingConfig, load_role

from rlhf_launch.named_models import find_model, find_tokenizer, is_reward_model, longest_row


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeakerConfig:
    """Which model, and where it runs."""

    model: str
    """See `find_model`."""
    base: str | None = None
    """Model below adapters; None for the one that they name."""
    device: str = "auto"
    dtype: Any = "auto"
    trust_remote_code: bool = False


class Speaker:
    """A causal language model in this process."""

    def __init__(self, config: SpeakerConfig) -> None:
        """Load model and tokenizer.

        Raises:
            ConfigError: there is no such model, it is a reward model, or has no tokenizer.
            CheckpointError: a file of it is damaged.
        """
        device = choose_device(config.device)
        dtype, trusted = choose_dtype(config.dtype, device), config.trust_remote_code
        found = find_model(config.model)
        if found.is_adapter:
            from rlhf_train import load_adapted

            adapted = load_adapted(Path(found.path), base=config.base, trust_remote_code=trusted)
            places = [found.path, str(Path(found.path).parent), adapted.base]
            model, _ = adapted.merged(dtype)
            scalar = type(model).__name__.endswith("ForSequenceClassification")
        else:
            places = [found.path]
            if not (scalar := is_reward_model(found.path, trust_remote_code=trusted)):
                given = EngineConfig(model=found.path, dtype=dtype, trust_remote_code=trusted)
                model, _ = load_role(given, extra="rlhf-train[qlora]")
        if scalar:
            raise ConfigError(
                f"{config.model!r} is a reward model, which says nothing; `rlhf serve-rm` asks it for scores"
            )
        tokenizer = find_tokenizer(places, trust_remote_code=trusted)
        if tokenizer is None:
            raise ConfigError(f"{config.model!r} has no tokenizer; put its base model's beside it")
        self.tokenizer: Any = tokenizer
        self._model: Any = model.to(device).eval()
        self.most_tokens = longest_row(model.config)
        """Prompt and reply together."""

    def sampling(self, *, max_tokens: int, **wanted: float | int | None) -> SamplingConfig:
        """What is asked for; what is None is as the model's own generation_config says.

        Raises:
            ConfigError: a value is out of its range.
        """
        own = self._model.generation_config
        defaults = {name: getattr(own, name, None) for name in wanted} if getattr(own, "do_sample", False) else {}
        merged = {name: defaults.get(name) if value is None else value for name, value in wanted.items()}
        return SamplingConfig(
            max_tokens=max_tokens,
            **{name: value for name, value in merged.items() if value is not None},  # type: ignore[arg-type]
        )

    def reply(self, token_ids: Sequence[int], sampling: SamplingConfig) -> Reply:
        """Begin a reply to what the model reads.

        Raises:
            DataError: there is no room for a reply.
        """
        room = self.most_tokens - len(token_ids)
        if room < 1:
            raise DataError(
                f"the conversation has {len(token_ids)} tokens, the model takes {self.most_tokens}; /undo or /reset"
            )
        return Reply(self._model, self.tokenizer, token_ids, sampling, room=room)


class Reply:
    """A reply while it is made: iterate over its pieces, or `stop` it."""

    def __init__(
        self, model: Any, tokenizer: Any, token_ids: Sequence[int], sampling: SamplingConfig, *, room: int
    ) -> None:
        """`room` is how many tokens fit behind those that were read."""
        from transformers import TextIteratorStreamer

        self.cut = False
        """It ended for want of tokens."""
        self.text = ""
        """All of it, once it has ended."""
        self._model, self._tokenizer, self._token_ids, self._sampling = model, tokenizer, list(token_ids), sampling
        self._most = min(sampling.max_tokens, room)
        self._streamer: Any = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="reply", daemon=True)

    def __iter__(self) -> Iterator[str]:
        """The pieces of text, as they come.

        Raises:
            RuntimeError: whatever the model raised.
        """
        self._thread.start()
        yield from self._streamer
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the reply after its next token."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._generate()
        except BaseException as error:
            self._error = error
        finally:
            self._streamer.end()

    def _generate(self) -> None:
        from transformers import GenerationConfig, StoppingCriteriaList

        ends = self._ends()
        given, device = self._sampling, self._model.device
        drawn: dict[str, Any] = {"do_sample": False}
        if given.temperature > 0:
            drawn = {
                "do_sample": True,
                "temperature": given.temperature,
                "top_p": given.top_p,
                "top_k": given.top_k,
            }
            drawn |= {"min_p": given.min_p} if given.min_p else {}
        rows = torch.tensor([self._token_ids], device=device)
        written = self._model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            generation_config=GenerationConfig(
                max_new_tokens=self._most,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                repetition_penalty=given.repetition_penalty,
                **drawn,
            ),
            streamer=self._streamer,
            stopping_criteria=StoppingCriteriaList([self._stopped]),
        )
        self.text = self._tokenizer.decode(written[0, rows.shape[1] :], skip_special_tokens=True)
        self.cut = (
            not self._stop.is_set()
            and written.shape[1] - rows.shape[1] >= self._most
            and int(written[0, -1]) not in ends
        )

    def _ends(self) -> list[int]:
        """Tokens that end a reply: the model's own, and the tokenizer's."""
        own = self._model.generation_config.eos_token_id
        ends = [*(own if isinstance(own, list) else [own]), self._tokenizer.eos_token_id]
        return list(dict.fromkeys(end for end in ends if end is not None))

    def _stopped(self, token_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((token_ids.shape[0],), self._stop.is_set(), device=token_ids.device)
