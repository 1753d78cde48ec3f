"""The worker that is one rollout engine: a plain class that knows nothing of Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from rlhf_core import (
    ROLLOUT_BACKENDS,
    BackendCapabilities,
    GenerationRequest,
    GenerationResult,
    Link,
    RolloutBackend,
    RolloutConfig,
    WeightManifest,
    load_plugin,
    shared_memory_id,
)

from rlhf_launch.workers.process import loading


class RolloutWorker:
    """One rollout engine. All methods are coroutines; many `generate` calls run at once."""

    def __init__(self, backend: str, config: RolloutConfig, env_vars: Mapping[str, str]) -> None:
        os.environ.update(env_vars)
        self._backend_name = backend
        self._config = config
        self._built: RolloutBackend | None = None

    @property
    def _backend(self) -> RolloutBackend:
        """The backend, built when it is first needed."""
        backend = self._built
        if backend is None:
            with loading:
                backend = self._built = load_plugin(ROLLOUT_BACKENDS, self._backend_name)(self._config)
        return backend

    async def start(self) -> float:
        """Build the backend. Returns the seconds it took."""
        begin = time.perf_counter()
        _ = self._backend
        return time.perf_counter() - begin

    async def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return self._backend.capabilities

    async def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._backend.weight_version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        return await self._backend.generate(request)

    async def shared_memory(self) -> str | None:
        """See shared_memory_id."""
        return shared_memory_id()

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        await self._backend.connect(link, rank)

    async def receive_weights(self, manifest: WeightManifest) -> float:
        """See RolloutBackend. Returns the seconds it took."""
        begin = time.perf_counter()
        await self._backend.receive_weights(manifest)
        return time.perf_counter() - begin

    async def pause(self, mode: str) -> None:
        """See RolloutBackend."""
        await self._backend.pause(mode)  # type: ignore[arg-type]

    async def resume(self) -> None:
        """See RolloutBackend."""
        await self._backend.resume()

    async def sleep(self) -> None:
        """See RolloutBackend."""
        await self._backend.sleep()

    async def wake(self) -> None:
        """See RolloutBackend."""
        await self._backend.wake()

    async def close(self) -> None:
        """See RolloutBackend."""
        if self._built is not None:
            self._built.close()
