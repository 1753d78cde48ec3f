"""Rollout by Transformers inside this process: the readable reference, for tests, debugging and small models.

One worker thread owns the model. It samples a token for every running sample, and between two such steps it
carries out what it was asked for: admit requests, pause, take new weights. So a pause never cuts through a step
and no token comes from a mixture of weights. Sampling and caching are in `decoding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
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
    check_base,
    check_coverage,
    copy_into,
    join,
    receive_weights,
)

from rlhf_rollout.decoding import Decoder, Draw


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request with its samples and the future that its caller waits on."""

    request: GenerationRequest
    draws: tuple[Draw, ...]
    future: Future[GenerationResult]

    @property
    def finished(self) -> bool:
        return all(draw.finish_reason for draw in self.draws)


class TransformersBackend:
    """RolloutBackend over `AutoModelForCausalLM`, with batched, cached decoding. Options: none.

    Any decoder-only model with ordinary attention works. Unseeded requests draw from `config.seed`'s stream.
    """

    def __init__(self, config: RolloutConfig) -> None:
        from transformers import AutoModelForCausalLM

        if config.options:
            raise ConfigError(
                f"rollout: the transformers backend has no options, got {', '.join(sorted(config.options))}"
            )
        if config.tensor_parallel_size != 1:
            raise CapabilityError(
                "rollout: the transformers backend runs on one device, got "
                f"tensor_parallel_size={config.tensor_parallel_size}; use the vllm backend or set it to 1"
            )
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
        self._config = config
        self._model = model.to(config.device).eval().requires_grad_(False)
        self._end_of_text = _end_of_text(model)
        self._decoder = Decoder(self._model, max_model_len=config.max_model_len)
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._version = 0
        self._receiver: Receiver | None = None
        # Shared with the worker, guarded by `_changed`:
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._tickets: list[_Ticket] = []
        self._waiting: deque[Draw] = deque()
        self._paused = False
        self._refusal: Exception | None = None
        """Why requests are refused: stale weights, a dead worker, or closed."""
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="transformers-rollout", daemon=True)
        self._worker.start()

    # ------------------------------------------------------------ RolloutBackend

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        cuda = torch.device(self._config.device).type == "cuda"
        kinds = {"local", "gloo", "shm", "disk"} | ({"nccl", "ipc"} if cuda else set())
        return BackendCapabilities(transports=frozenset(kinds), partial_sync="values")

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        self._check(request)
        stops = self._end_of_text | set(request.sampling.stop_token_ids)
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            draws = tuple(
                Draw(request=request, generator=generator, stop_token_ids=stops)
                for generator in self._generators(request)
            )
            ticket = _Ticket(request, draws, Future())
            self._tickets.append(ticket)
            self._waiting.extend(draws)
            self._changed.notify_all()
        return await asyncio.wrap_future(ticket.future)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        await self._between_steps(self._abort if mode == "abort" else self._halt)

    async def resume(self) -> None:
        """See RolloutBackend."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        # These two fill buffers on the accelerator; from the others, weights are copied there one by one.
        device = self._config.device if link.kind in ("nccl", "ipc") else "cpu"
        receiver = await asyncio.to_thread(join, link, rank, device=device)
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend."""
        await self._between_steps(lambda: self._take_weights(manifest))

    async def sleep(self) -> None:
        """Nothing to give back: the capabilities say so."""

    async def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """See RolloutBackend. Requests still running end with EngineDiedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()
        if self._receiver is not None:
            self._receiver.close()

    # ------------------------------------------------------------ callers' threads

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be done before it reaches the worker, where it would hurt other requests."""
        name, limit = f"request {request.request_id!r}", self._config.max_model_len
        if len(request.prompt_token_ids) >= limit:
            raise CapabilityError(
                f"{name}: a prompt of {len(request.prompt_token_ids)} tokens leaves no room for a response "
                f"within max_model_len={limit}; shorten it or raise max_model_len"
            )
        if request.images:
            raise CapabilityError(f"{name}: the transformers backend reads no images; send text alone")
        if request.sampling.stop:
            raise CapabilityError(
                f"{name}: the transformers backend has no stop strings, got {request.sampling.stop}; "
                "use stop_token_ids or the vllm backend"
            )
        vocab = self._model.get_input_embeddings().num_embeddings
        if bad := [t for t in (*request.prompt_token_ids, *request.sampling.stop_token_ids) if not 0 <= t < vocab]:
            raise CapabilityError(
                f"{name}: token id {bad[0]} is outside the model's vocabulary of {vocab}; "
                "tokenise with this model's tokenizer"
            )

    def _generators(self, request: GenerationRequest) -> list[torch.Generator]:
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        return [torch.Generator().manual_seed(seed + index) for index in range(request.n)]

    async def _between_steps(self, call: Callable[[], None]) -> None:
        future: Future[None] = Future()
        with self._changed:
            if self._closed or not self._worker.is_alive():
                raise self._refusal or EngineDiedError("the transformers backend is closed")
            self._calls.append((call, future))
            self._changed.notify_all()
        await asyncio.wrap_future(future)

    # ------------------------------------------------------------ the worker's thread

    def _work(self) -> None:
        error: Exception = EngineDiedError("the transformers backend was closed")
        try:
            while self._turn():
                pass
        except BaseException as cause:
            error = EngineDiedError(f"the transformers backend died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._changed:
            self._refuse(error)
            for _, future in self._calls:
                _settle(future, error)

    def _turn(self) -> bool:
        """Wait for work, then carry out the calls and one sampling step. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._calls or self._can_sample())
            if self._closed:
                return False
            calls = list(self._calls)
            self._calls.clear()
        for call, future in calls:
            try:
                call()
                _settle(future, None)
            except Exception as error:
                _settle(future, error)
        if self._can_sample():
            self._drop_cancelled()
            joining = self._admit()
            if joining or self._decoder.draws:
                self._decoder.step(joining, version=self._version)
            self._deliver()
        return True

    def _can_sample(self) -> bool:
        return not self._paused and bool(self._waiting or self._decoder.draws)

    def _admit(self) -> list[Draw]:
        with self._changed:
            room = self._config.max_num_seqs - len(self._decoder.draws)
            return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = {id(d) for ticket in self._tickets if ticket.future.cancelled() for d in ticket.draws}
            if gone:
                self._tickets = [ticket for ticket in self._tickets if not ticket.future.cancelled()]
                self._waiting = deque(draw for draw in self._waiting if id(draw) not in gone)
                self._decoder.keep(draw for draw in self._decoder.draws if id(draw) not in gone)

    def _deliver(self) -> None:
        with self._changed:
            finished = [ticket for ticket in self._tickets if ticket.finished]
            self._tickets = [ticket for ticket in self._tickets if not ticket.finished]
        for ticket in finished:
            result = GenerationResult(
                request_id=ticket.request.request_id,
                samples=tuple(draw.sample() for draw in ticket.draws),
                meaning=ticket.request.sampling.meaning,
            )
            _settle(ticket.future, result)

    def _halt(self) -> None:
        with self._changed:
            self._paused = True

    def _abort(self) -> None:
        with self._changed:
            self._paused = True
            for draw in (draw for ticket in self._tickets for draw in ticket.draws):
                draw.finish_reason = draw.finish_reason or "abort"
            self._waiting.clear()
        self._decoder.keep([])
        self._deliver()

    def _take_weights(self, manifest: WeightManifest) -> None:
        try:
            if self._receiver is None:
                raise WeightSyncError("receive_weights before connect: there is no weight link to receive from")
            check_base(manifest, None if self._refusal else self._version)
            check_coverage(manifest, self._model)
            receive_weights(
                manifest, self._receiver, copy_into(self._model), base=lambda name: _weight(self._model, name)
            )
        except Exception as error:
            with self._changed:
                self._refuse(StaleWeightsError(f"the last weight sync failed; sync again before sampling: {error}"))
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(
                f"the transformers backend did not get version {manifest.version}: {error}"
            ) from error
        self._decoder.forget_states()
        with self._changed:
            self._version = manifest.version
            self._refusal = None

    def _refuse(self, error: Exception) -> None:
        """End all requests with `error` and refuse new ones until it is cleared."""
        self._refusal = error
        for ticket in self._tickets:
            _settle(ticket.future, error)
        self._tickets.clear()
        self._waiting.clear()
        self._decoder.keep([])


def _settle(future: Future[Any], outcome: object) -> None:
    """Hand over a result or an error; a caller that has gone away (cancelled) no longer wants it."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _weight(model: Any, name: str) -> torch.Tensor:
    try:
        return model.get_parameter(name)
    except AttributeError:
        raise WeightSyncError(f"the generator's model has no weight {name!r}") from None


def _end_of_text(model: Any) -> frozenset[int]:
    """End-of-text ids of the generation config, or of the model's config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
