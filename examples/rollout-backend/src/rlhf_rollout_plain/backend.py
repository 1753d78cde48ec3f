"""The backend: one thread owns weights and jobs, and everything that is asked of it is a command in its queue.

Between two commands the thread gives every job one token. So nothing needs a lock, a pause never cuts through a
step, and no token comes from a mixture of weights.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch
from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
    ConfigError,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    PauseMode,
    Receiver,
    RolloutConfig,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
    check_rows_to_score,
    join_link,
    receive_weights,
)

from rlhf_rollout_plain.decoder import token_log_probs
from rlhf_rollout_plain.job import Job
from rlhf_rollout_plain.loading import load_checkpoint


class PlainBackend:
    """RolloutBackend in plain torch. Options: none. Samples of one request are a batch; requests take turns."""

    def __init__(self, config: RolloutConfig) -> None:
        if config.options or config.tensor_parallel_size != 1:
            raise ConfigError("rollout: the plain backend has no options and no tensor parallelism")
        self._config = config
        self._shape, self._weights = load_checkpoint(config)
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._jobs: list[Job] = []
        self._version = 0
        self._stale: str | None = None
        self._paused = False
        self._closed = False
        self._receiver: Receiver | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="plain-rollout", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return BackendCapabilities(
            transports=frozenset({"local", "gloo"}), truncated_sampling=False, token_scores=self._config.dtype
        )

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        self._check(request)
        job = await self._ask(lambda: self._admit(request))
        return await asyncio.wrap_future(job.future)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        await self._ask(lambda: self._pause(mode))

    async def resume(self) -> None:
        """See RolloutBackend."""

        def go_on() -> None:
            self._paused = False

        await self._ask(go_on)

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        self._receiver = await asyncio.to_thread(join_link, link, rank)

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend."""
        await self._ask(lambda: self._take(manifest))

    async def score_tokens(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """See ScoresTokens: training loops verify by it that this backend has loaded its weights rightly."""
        limit, vocabulary = self._config.max_model_len, self._weights["model.embed_tokens.weight"].shape[0]
        check_rows_to_score(rows, max_model_len=limit, vocab_size=vocabulary)
        return await self._ask(lambda: self._score(rows))

    async def sleep(self) -> None:
        """Nothing to give back: the capabilities say so."""

    async def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """See RolloutBackend."""
        self._closed = True
        self._commands.put(None)
        self._thread.join()

    def _check(self, request: GenerationRequest) -> None:
        name, sampling = f"request {request.request_id!r}", request.sampling
        vocabulary = self._weights["model.embed_tokens.weight"].shape[0]
        refusals = [
            (sampling.stop, "the plain backend has no stop strings; use stop_token_ids"),
            (sampling.meaning.truncated, "the plain backend has no top_p, top_k and min_p; leave them off"),
            (sampling.meaning.penalised, "the plain backend has no penalties; leave them off"),
            (sampling.json_schema, "the plain backend keeps samples to no JSON Schema; leave it out"),
            (request.images, "the plain backend reads no images; send text alone"),
            (
                len(request.prompt_token_ids) >= self._config.max_model_len,
                f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room within "
                f"max_model_len={self._config.max_model_len}",
            ),
            (
                not all(0 <= token < vocabulary for token in request.prompt_token_ids + sampling.stop_token_ids),
                f"a token id lies outside the vocabulary of {vocabulary}",
            ),
        ]
        for refused, why in refusals:
            if refused:
                raise CapabilityError(f"{name}: {why}")

    async def _ask(self, command: Callable[[], Any]) -> Any:
        """Have the thread carry out a command between two steps, and wait for its result."""
        if self._closed:
            raise EngineDiedError("the plain backend is closed")
        future: Future[Any] = Future()
        self._commands.put((command, future))
        return await asyncio.wrap_future(future)

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        error = EngineDiedError("the plain backend was closed")
        try:
            while self._turn():
                pass
        except Exception as cause:
            error = EngineDiedError(f"the plain backend died: {type(cause).__name__}: {cause}")
            self._closed = True
        self._end_all(error)
        with suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command[1].set_exception(error)

    @torch.inference_mode()
    def _turn(self) -> bool:
        """One command, or one token for every job. False when closed."""
        idle = self._paused or not self._jobs
        try:
            item = self._commands.get(block=idle)
        except queue.Empty:
            for job in self._jobs:
                if not job.over:
                    job.step(self._weights, self._shape, self._version)
            self._deliver()
            return True
        if item is None:
            return False
        command, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)
        return True

    def _admit(self, request: GenerationRequest) -> Job:
        if self._stale is not None:
            raise StaleWeightsError(self._stale)
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        self._jobs.append(Job(request, seed=seed, max_model_len=self._config.max_model_len))
        return self._jobs[-1]

    def _score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        if self._stale is not None:
            raise StaleWeightsError(self._stale)
        device = self._weights["model.embed_tokens.weight"].device
        tokens = [torch.tensor(list(row), device=device) for row in rows]
        return [token_log_probs(self._weights, self._shape, row).tolist() for row in tokens]

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            for job in self._jobs:
                _settle(job)
            self._jobs.clear()

    def _take(self, manifest: WeightManifest) -> None:
        names = {spec.name for spec in manifest.tensors}
        try:
            if self._receiver is None:
                raise WeightSyncError("receive_weights before connect: there is no weight link to receive from")
            if names != set(self._weights):
                raise WeightSyncError(f"weights on one side only: {sorted(names ^ set(self._weights))[:5]}")
            receive_weights(manifest, self._receiver, self._copy)
        except Exception as error:
            self._stale = f"the last weight sync failed; sync again before sampling: {error}"
            self._end_all(StaleWeightsError(self._stale))
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"the plain backend did not get version {manifest.version}: {error}") from error
        self._version, self._stale = manifest.version, None
        for job in self._jobs:
            job.forget_states()

    def _copy(self, weights: Any) -> None:
        for name, tensor in weights:
            if self._weights[name].shape != tensor.shape:
                raise WeightSyncError(f"weight {name!r} has another shape here: {tuple(self._weights[name].shape)}")
            self._weights[name].copy_(tensor)

    def _deliver(self) -> None:
        for job in self._jobs:
            if job.over:
                _settle(job)
        self._jobs = [job for job in self._jobs if not job.over]

    def _end_all(self, error: Exception) -> None:
        for job in self._jobs:
            with suppress(InvalidStateError):
                job.future.set_exception(error)
        self._jobs.clear()


def _settle(job: Job) -> None:
    """Hand over what the job has, unless its caller has gone away."""
    with suppress(InvalidStateError):
        job.future.set_result(job.result())
