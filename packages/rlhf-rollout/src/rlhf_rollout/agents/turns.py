"""The turns of an episode: what an environment says as tokens, one shared request where turns are single, seeds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlhf_core import (
    ConfigError,
    DataError,
    GenerationRequest,
    GenerationResult,
    Observation,
    SamplingConfig,
)

from rlhf_rollout.agents.config import AgentTask
from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.generator import Generator


class TurnTokens:
    """What an environment says as tokens, by a tokenizer and, for messages, its chat template.

    Every observation is tokenised once; what the policy has sampled never is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt_token_ids: Sequence[int], observation: Observation) -> list[int]:
        """The tokens before the first turn: the row's prompt and what `reset` said.

        Raises:
            DataError: there is neither a prompt nor an observation, or the chat template refuses the messages.
        """
        if observation.messages:
            tokens = list(self._chat.prompt(observation.messages, observation.tools))
        else:
            tokens = [*prompt_token_ids, *self._said(observation)]
        if not tokens:
            raise DataError("an episode starts with nothing: give the row a prompt, or say something in `reset`")
        return tokens

    def reply(self, observation: Observation, last_token_id: int) -> list[int]:
        """The tokens between a sampled turn that ended with `last_token_id` and the next one."""
        if observation.messages:
            return list(self._chat.reply(observation.messages, last_token_id=last_token_id))
        return self._said(observation)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a turn, with or without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def _said(self, observation: Observation) -> list[int]:
        """The observation's own tokens, or those of its plain text."""
        if not observation.text:
            return list(observation.token_ids)
        return list(self.tokenizer(observation.text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _chat(self) -> ChatTokens:
        """The chat template's tokens; needed only where an environment says messages."""
        try:
            return ChatTokens(self.tokenizer)
        except ConfigError as error:
            raise ConfigError(
                f"an environment says chat messages, but {error}; or let the environment say `text` or `token_ids`"
            ) from None


class SharedFirstTurn:
    """One request for the only turn of all episodes of a task, so that the prompt is computed once."""

    def __init__(self, generator: Generator, task: AgentTask) -> None:
        self._generator = generator
        self._task = task
        self._call: asyncio.Task[GenerationResult] | None = None

    async def result(self, sampling: SamplingConfig) -> GenerationResult:
        """The samples of all episodes; the request goes on for the others if an episode stops waiting for it."""
        if self._call is None:
            request = GenerationRequest(
                request_id=self._task.group_id,
                prompt_token_ids=self._task.prompt_token_ids,
                sampling=sampling,
                n=self._task.episodes,
                seed=self._task.seed,
                images=self._task.images,
            )
            self._call = asyncio.ensure_future(self._generator.generate(request))
        return await asyncio.shield(self._call)

    def close(self) -> None:
        """Give the request up: no episode waits for it any more."""
        if self._call is not None:
            self._call.cancel()


def turn_seed(seed: int | None, episode: int, turn: int) -> int | None:
    """Seed of a turn: `seed + episode` for the first, as in a request for several samples, else a hash.

    >>> turn_seed(40, 2, 0), turn_seed(None, 2, 1), turn_seed(40, 2, 1) == turn_seed(40, 2, 1)
    (42, None, True)
    """
    if seed is None or turn == 0:
        return None if seed is None else seed + episode
    digest = hashlib.blake2b(f"{seed + episode}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
