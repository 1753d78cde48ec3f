"""Stand-ins without a model, for testing loops, reward functions and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from rlhf_core.data.generation import FinishReason, GenerationRequest, GenerationResult, Sample
from rlhf_core.data.packed import PackedFloats
from rlhf_core.errors import EngineDiedError, StaleWeightsError, WeightSyncError
from rlhf_core.interfaces.rollout import BackendCapabilities, PauseMode, RolloutConfig
from rlhf_core.weight_sync.manifest import WeightManifest
from rlhf_core.weight_sync.receive import receive_weights
from rlhf_core.weight_sync.transports.transport import Link, Receiver, join_link

Script = Callable[[GenerationRequest, int], Sequence[int]]
"""(request, index of the sample) -> its tokens, the last of which counts as end-of-text."""


def echo_prompt(request: GenerationRequest, index: int) -> Sequence[int]:
    """The prompt's tokens again."""
    return request.prompt_token_ids


class ScriptedBackend:
    """RolloutBackend whose samples follow a script, one token every `token_delay_s`.

    It pauses, aborts, takes weights (kept in `weights`) and marks tokens with versions like a real one, and it
    dies on demand. Every log-prob is -1.
    """

    def __init__(
        self,
        config: RolloutConfig | None = None,
        *,
        script: Script = echo_prompt,
        token_delay_s: float = 0.0,
        log_prob: float = -1.0,
    ) -> None:
        self.config = config or RolloutConfig(model="scripted")
        self.requests: list[GenerationRequest] = []
        """Every request that came in, in order."""
        self.weights: dict[str, torch.Tensor] = {}
        self._script = script
        self._delay = token_delay_s
        self._log_prob = log_prob
        self._version = 0
        self._receiver: Receiver | None = None
        self._paused = False
        self._aborts = 0
        self._failure: Exception | None = None

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return BackendCapabilities(transports=frozenset({"local", "gloo", "shm", "disk"}))

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._version

    def die(self, reason: str = "killed by the test") -> None:
        """End all requests, now and later, with EngineDiedError."""
        self._failure = EngineDiedError(reason)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        self.requests.append(request)
        samples = await asyncio.gather(*(self._sample(request, index) for index in range(request.n)))
        return GenerationResult(
            request_id=request.request_id, samples=tuple(samples), meaning=request.sampling.meaning
        )

    async def _sample(self, request: GenerationRequest, index: int) -> Sample:
        script = list(self._script(request, index))
        tokens, aborts = script[: request.sampling.max_tokens], self._aborts
        versions: list[int] = []
        while len(versions) < len(tokens) and self._aborts == aborts:
            await asyncio.sleep(self._delay)
            if self._failure is not None:
                raise self._failure
            if not self._paused:
                versions.append(self._version)
        reason: FinishReason = "stop" if len(tokens) == len(script) else "length"
        return Sample(
            token_ids=tokens[: len(versions)],
            log_probs=PackedFloats.full(len(versions), self._log_prob),
            weight_versions=versions,
            finish_reason=reason if len(versions) == len(tokens) else "abort",
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        self._paused = True
        self._aborts += mode == "abort"

    async def resume(self) -> None:
        """See RolloutBackend."""
        self._paused = False

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        self._receiver = await asyncio.to_thread(join_link, link, rank)

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend."""
        received: dict[str, torch.Tensor] = {}
        try:
            if self._receiver is None:
                raise WeightSyncError("receive_weights before connect")
            await asyncio.to_thread(
                receive_weights,
                manifest,
                self._receiver,
                lambda pairs: received.update({name: tensor.clone() for name, tensor in pairs}),
            )
        except Exception as error:
            self._failure = StaleWeightsError(f"the last weight sync failed: {error}")
            raise WeightSyncError(str(error)) from error
        self.weights, self._version = received, manifest.version
        if isinstance(self._failure, StaleWeightsError):
            self._failure = None

    async def sleep(self) -> None:
        """Nothing to give back."""

    async def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """See RolloutBackend."""
        self.die("the scripted backend is closed")
