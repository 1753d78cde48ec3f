"""Requests that are interrupted amid their samples, also on a machine that is busy with something else."""

from __future__ import annotations

import asyncio

import pytest
from rlhf_core import GenerationRequest, GenerationResult, RolloutBackend


async def paused_amid(
    backend: RolloutBackend, request: GenerationRequest, *, after_s: float = 0.1
) -> asyncio.Task[GenerationResult]:
    """A task of the request, with the backend paused while it runs. A pause that comes too late is tried again."""
    for _ in range(8):
        task = asyncio.create_task(backend.generate(request))
        await asyncio.sleep(after_s)
        await backend.pause("keep")
        if not task.done():
            return task
        await backend.resume()
        after_s *= 0.7
    pytest.fail(f"{request.request_id!r} had ended before each of 8 pauses; ask for more tokens")
