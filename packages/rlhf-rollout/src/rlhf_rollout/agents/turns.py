"""The turns of an episode: one shared request where there is but one, seeds."""

from __future__ import annotations

import asyncio
import hashlib

from rlhf_core import GenerationRequest, GenerationResult, SamplingConfig

from rlhf_rollout.agents.config import AgentTask
from rlhf_rollout.generator import Generator


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


def turn_seed(seed: int | None, episode: int, turn: int, attempt: int = 0) -> int | None:
    """Seed of a turn: `seed + episode` for the first, as in a request for several samples, else a hash.

    >>> turn_seed(40, 2, 0), turn_seed(None, 2, 1), turn_seed(40, 2, 1) == turn_seed(40, 2, 1)
    (42, None, True)
    """
    if seed is None or turn == attempt == 0:
        return None if seed is None else seed + episode
    again = f"/{attempt}" if attempt else ""
    digest = hashlib.blake2b(f"{seed + episode}/{turn}{again}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
