"""How the turns of an episode are asked for: one shared request where turns are single, and a seed for each."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Protocol

from rlhf_core import GenerationRequest, GenerationResult, SamplingConfig

from rlhf_rollout.agents.config import AgentTask


class Generator(Protocol):
    """What the loop needs of a rollout backend, or of a pool of them."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        ...


class SharedFirstTurn:
    """One request for the only turn of all episodes of a task: the prompt is computed once."""

    def __init__(self, generator: Generator, task: AgentTask) -> None:
        self._generator = generator
        self._task = task
        self._call: asyncio.Task[GenerationResult] | None = None

    async def result(self, sampling: SamplingConfig) -> GenerationResult:
        """The samples of all episodes; an episode that stops waiting leaves the others theirs."""
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
        """Nobody waits any more."""
        if self._call is not None:
            self._call.cancel()


def turn_seed(seed: int | None, episode: int, turn: int) -> int | None:
    """Seed of a turn: that of a plain request for the first one, far from all others for the next.

    >>> turn_seed(40, 2, 0), turn_seed(None, 2, 1), turn_seed(40, 2, 1) == turn_seed(40, 2, 1)
    (42, None, True)
    """
    if seed is None or turn == 0:
        return None if seed is None else seed + episode
    digest = hashlib.blake2b(f"{seed + episode}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
