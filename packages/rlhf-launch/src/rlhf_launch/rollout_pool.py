"""All rollout engines of a run: requests go to the engine with the least work, weights to every one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlhf_core import BackendCapabilities, ConfigError, GenerationRequest, GenerationResult, Link, WeightManifest

from rlhf_launch.handles import Handle, call_all
from rlhf_launch.least_loaded import LeastLoaded


class RolloutPool:
    """One or more rollout engines behind one `generate`."""

    def __init__(self, handles: Sequence[Handle], *, timeout_s: float) -> None:
        self._handles = list(handles)
        self._loads = LeastLoaded(len(self._handles))
        self._timeout_s = timeout_s
        self._capabilities: list[BackendCapabilities] = []

    def start(self) -> float:
        """Wait until all engines are up; returns the seconds of the slowest."""
        seconds = max(self._all("start", what="start"))
        self._capabilities = self._all("capabilities", what="state their capabilities")
        return seconds

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(self._handles)

    @property
    def receivers(self) -> int:
        """Transport ranks of all engines together."""
        return sum(capabilities.receivers for capabilities in self._capabilities)

    def choose_transport(self, preferred: Sequence[str]) -> str:
        """The first of `preferred` that every engine can join."""
        for kind in preferred:
            if all(kind in capabilities.transports for capabilities in self._capabilities):
                return kind
        offered = sorted(set().union(*(capabilities.transports for capabilities in self._capabilities)))
        raise ConfigError(
            f"the rollout backend can join {', '.join(offered) or 'no weight transport'}, but with this placement "
            f"the weights travel by {' or '.join(preferred)}; choose another backend or `placement.executor`"
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one request on the engine with the fewest samples under way."""
        engine = self._loads.take(request.n)
        try:
            return await asyncio.wrap_future(self._handles[engine].call("generate", request))
        finally:
            self._loads.give_back(engine, request.n)

    def connect(self, link: Link) -> list[Any]:
        """Let every engine join a weight link; returns futures."""
        futures, rank = [], 0
        for handle, capabilities in zip(self._handles, self._capabilities, strict=True):
            futures.append(handle.call("connect", link, rank))
            rank += capabilities.receivers
        return futures

    def receive(self, manifest: WeightManifest) -> list[Any]:
        """Start receiving on every engine; returns futures of seconds."""
        return [handle.call("receive_weights", manifest) for handle in self._handles]

    def weight_versions(self) -> list[int]:
        """The version of each engine."""
        return self._all("weight_version", what="tell their weight version")

    def pause(self, mode: str = "keep") -> None:
        """Stop sampling on all engines."""
        self._all("pause", mode, what="pause")

    def resume(self) -> None:
        """Go on sampling."""
        self._all("resume", what="resume")

    def close(self) -> None:
        """Close all engines."""
        for handle in self._handles:
            handle.close()

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        what = f"{self.engines} rollout engine(s) to {what}"
        return call_all(self._handles, method, *args, what=what, timeout_s=self._timeout_s)
