"""The worker that is one rollout engine: a plain class that knows nothing of Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from ipaddress import ip_address

from rlhf_core import (
    ROLLOUT_BACKENDS,
    BackendCapabilities,
    CapabilityError,
    GenerationRequest,
    GenerationResult,
    Link,
    ResourceError,
    RolloutBackend,
    RolloutConfig,
    ScoresTokens,
    StaleWeightsError,
    WeightManifest,
    load_plugin,
    model_loading,
    note_progress,
    shared_memory_id,
)

from rlhf_launch.workers.probe import LoadReport, ProbeCheck, ProbeReport, Scores
from rlhf_launch.workers.process import device_names, host_address, trim_memory


class RolloutWorker:
    """One rollout engine. All methods are coroutines; many `generate` calls run at once.

    Weights that come with a probe are verified before a token is sampled with them: the backend stands still from
    before they are loaded until it has answered the probe rightly.
    """

    def __init__(self, backend: str, config: RolloutConfig, env_vars: Mapping[str, str]) -> None:
        os.environ.update(env_vars)
        self._backend_name = backend
        self._config = config
        self._built: RolloutBackend | None = None
        self._paused = False
        self._loading = False
        self._fault: str | None = None
        """Why the weights that the backend holds are not to be used."""
        self._last: tuple[int, Scores] | None = None
        """The last version that the backend passed a probe of, with its answer."""

    @property
    def _backend(self) -> RolloutBackend:
        """The backend, built when it is first needed."""
        backend = self._built
        if backend is None:
            with model_loading:
                backend = self._built = load_plugin(ROLLOUT_BACKENDS, self._backend_name)(self._config)
        return backend

    async def meeting(self) -> str:
        """An `address:port` of this host at which the parts of an engine over several hosts can meet.

        Raises:
            ResourceError: this host is known only by an address that means another host elsewhere.
        """
        if ip_address(address := host_address()).is_loopback:
            raise ResourceError(
                f"other hosts cannot reach {socket.gethostname()} at {address}, where the parts of an engine over "
                "several hosts would meet; name the network between them by placement.interface"
            )
        with contextlib.closing(socket.socket()) as door:
            door.bind((address, 0))
            return f"{address}:{door.getsockname()[1]}"

    async def start(self, meeting: str = "") -> float:
        """Build the backend. Returns the seconds it took.

        Args:
            meeting: see `meeting`; the parts on other hosts (`RolloutPart`) start at the same time.
        """
        self._config = replace(self._config, meeting=meeting)
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
        """See RolloutBackend. Refused while the backend holds weights that failed their probe."""
        if self._fault is not None:
            raise StaleWeightsError(self._fault)
        result = await self._backend.generate(request)
        note_progress("samples", request.n)
        return result

    async def max_model_len(self) -> int:
        """Prompt plus response tokens of one sequence."""
        return self._config.max_model_len

    async def device_names(self) -> list[str]:
        """See `process.device_names`."""
        return device_names(self._config.device)

    async def shared_memory(self) -> str | None:
        """See shared_memory_id; None, too, for an engine of which some workers are on other hosts."""
        return shared_memory_id() if self._backend.capabilities.shares_memory else None

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        await self._backend.connect(link, rank)

    async def receive_weights(self, manifest: WeightManifest, check: ProbeCheck | None = None) -> LoadReport:
        """See RolloutBackend. Weights that fail the check stay loaded, and nothing is sampled with them."""
        begin = time.perf_counter()
        if check is None:
            await self._backend.receive_weights(manifest)
            return LoadReport(seconds=time.perf_counter() - begin)
        async with self._standing_still():
            await self._backend.receive_weights(manifest)
            seconds = time.perf_counter() - begin
            return LoadReport(seconds=seconds, probe=await self._probe(check))

    async def probe(self, check: ProbeCheck) -> ProbeReport:
        """Check the weights that the backend holds, as after a load."""
        async with self._standing_still():
            return await self._probe(check)

    async def _probe(self, check: ProbeCheck) -> ProbeReport:
        if not isinstance(self._backend, ScoresTokens):
            raise CapabilityError(
                f"the rollout backend {self._backend_name} states token_scores in its capabilities, but has no "
                "method score_tokens; it must be a ScoresTokens"
            )
        begin = time.perf_counter()
        self._fault = "the weights that were loaded last are being verified"
        found = tuple(map(tuple, await self._backend.score_tokens(check.rows)))
        report = check.judge(found, self._last, time.perf_counter() - begin)
        self._fault = report.fault
        if report.fault is None:
            self._last = (check.version, found)
        return report

    @contextlib.asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Sample nothing inside the block, nor after it with weights that failed their probe."""
        modes = self._backend.capabilities.pause_modes
        self._loading = True
        if modes and not self._paused:
            await self._backend.pause("keep" if "keep" in modes else "abort")
        try:
            yield
        finally:
            self._loading = False
            await self._go_on()

    async def _go_on(self) -> None:
        if not self._paused and not self._loading and self._fault is None:
            await self._backend.resume()

    async def pause(self, mode: str) -> None:
        """See RolloutBackend."""
        self._paused = True
        await self._backend.pause(mode)  # type: ignore[arg-type]

    async def resume(self) -> None:
        """See RolloutBackend. With weights that failed their probe the backend stands still all the same."""
        self._paused = False
        await self._go_on()

    async def sleep(self) -> None:
        """See RolloutBackend; what is freed on the host goes back to the system."""
        await self._backend.sleep()
        trim_memory()

    async def wake(self) -> None:
        """See RolloutBackend."""
        await self._backend.wake()

    async def close(self) -> None:
        """See RolloutBackend."""
        if self._built is not None:
            self._built.close()
