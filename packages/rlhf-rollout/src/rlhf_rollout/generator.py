"""What the agent loop and the gateway need of a rollout backend."""

from __future__ import annotations

from typing import Protocol

from rlhf_core import GenerationRequest, GenerationResult


class Generator(Protocol):
    """Whatever samples: a rollout backend, or a pool of them."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        ...
