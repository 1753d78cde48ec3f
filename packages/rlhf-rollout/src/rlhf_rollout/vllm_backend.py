"""Rollout backend on vLLM: continuous batching, prefix cache, tensor parallelism, native weight transfer.

One vLLM engine runs in this process, on a thread of its own (`vllm_loop`). With `tensor_parallel_size` above 1
its workers are processes, otherwise the whole engine is in this one. Every `generate` call is one vLLM request
for all `n` samples: vLLM batches across calls, and the samples share the prompt's computation (whole cache blocks).

A weight update takes place between two steps. Requests that run on across it are computed again from their tokens
under the new weights, so that the log-prob of every token is exactly that of the weights whose version it carries.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, cast

from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
    DeadlineExceeded,
    EngineDiedError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Link,
    LogProbMeaning,
    PauseMode,
    RolloutConfig,
    Sample,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
    check_base,
)

from rlhf_rollout.vllm_loop import EngineLoop
from rlhf_rollout.vllm_options import (
    build_engine,
    engine_arguments,
    prepare_process,
    process_environment,
    shut_down_engine,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

_LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower ones to it
_RPC_MARGIN_S = 30.0


class VLLMBackend:
    """RolloutBackend on vLLM. `config.options` are fields of vLLM's EngineArgs, and these:

    `cpu_threads`: threads of the engine on CPU (1); best set through `process_environment` before the process
    starts. `sleep_level`: with `enable_sleep_mode`, 1 keeps the weights in host memory while asleep (default),
    2 drops them, and they must be sent before sampling goes on.

    Raises:
        ConfigError: an unknown option, a device that the installed vLLM was not built for, or a model or setting
            that vLLM refuses.
        EngineDiedError: the engine did not start; and, by every call, after it has failed. Names the first cause.
    """

    process_environment = staticmethod(process_environment)

    def __init__(self, config: RolloutConfig) -> None:
        prepare_process(config)
        arguments = engine_arguments(config)
        self._config = config
        self._version = 0
        self._weights_dropped = False
        self._stale = False
        self._link: Link | None = None
        self._capabilities = BackendCapabilities(
            transports=frozenset(
                {"gloo", "shm", "disk"}
                | ({"local"} if config.tensor_parallel_size == 1 else set())
                | ({"nccl", "ipc"} if config.device == "cuda" else set())
            ),
            partial_sync="tensors",
            receivers=config.tensor_parallel_size,
            stop_strings=not arguments["skip_tokenizer_init"],
            sleep=bool(config.options.get("enable_sleep_mode", False)),
        )
        from vllm.exceptions import VLLMClientError

        self._loop = EngineLoop(
            lambda: build_engine(arguments),
            shut_down_engine,
            refusals=(VLLMClientError, ValueError, TypeError),
        )
        self._close = weakref.finalize(self, self._loop.stop)

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return self._capabilities

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend. Cancelling the coroutine aborts the request in the engine.

        A sample also ends, with `finish_reason="length"`, where prompt and response fill `max_model_len`.
        """
        params = self._sampling_params(request)
        output = await asyncio.wrap_future(self._loop.generate(request.prompt_token_ids, params))
        return _result(request, output)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        await self._call(lambda engine: self._loop.hold(engine, abort=mode == "abort"))

    async def resume(self) -> None:
        """See RolloutBackend."""
        await self._call(self._resume)

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend.

        Raises:
            CapabilityError: the link's kind is not among `capabilities.transports`.
            DeadlineExceeded: the sender did not accept in time.
        """
        if link.kind not in self._capabilities.transports:
            raise CapabilityError(
                f"the vllm backend on {self._config.device} with tensor_parallel_size="
                f"{self._config.tensor_parallel_size} cannot join a {link.kind!r} link; use one of "
                f"{', '.join(sorted(self._capabilities.transports))}"
            )
        await self._call(lambda engine: self._connect(engine, link, rank))

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend. Requests that are running continue under the new weights."""
        await self._call(lambda engine: self._receive(engine, manifest))

    async def sleep(self) -> None:
        """See RolloutBackend; does something with the option `enable_sleep_mode` on a GPU."""
        if self._capabilities.sleep:
            await self._call(self._sleep)

    async def wake(self) -> None:
        """See RolloutBackend."""
        if self._capabilities.sleep:
            await self._call(lambda engine: engine.wake_up())

    def close(self) -> None:
        """See RolloutBackend; unfinished requests raise EngineDiedError."""
        self._close()

    # ------------------------------------------------------------ on the engine's thread

    async def _call(self, run: Any) -> Any:
        return await asyncio.wrap_future(self._loop.call(run))

    def _resume(self, engine: LLMEngine) -> None:
        if self._weights_dropped:
            self._loop.refuse(
                engine, StaleWeightsError("weights were dropped by sleep and not sent since; sync first")
            )
        self._loop.release(engine)

    def _connect(self, engine: LLMEngine, link: Link, rank: int) -> None:
        info = {
            "kind": link.kind,
            "address": link.address,
            "receivers": link.receivers,
            "timeout_s": link.timeout_s,
            "first_rank": rank,
        }
        self._link = None
        # Meeting the store and forming the group are two waits.
        failure = _on_workers(engine, "rlhf_connect", info, timeout_s=2 * link.timeout_s + _RPC_MARGIN_S)
        if failure is not None:
            kind, message = failure
            raise (DeadlineExceeded if kind == "DeadlineExceeded" else WeightSyncError)(message)
        self._link = link

    def _receive(self, engine: LLMEngine, manifest: WeightManifest) -> None:
        try:
            check_base(manifest, None if self._stale or self._weights_dropped else self._version)
        except WeightSyncError as error:
            self._refuse_sampling(engine, str(error))
            raise
        buckets = len(manifest.buckets())
        timeout_s = (self._link.timeout_s if self._link else 0.0) * (buckets + 1) + _RPC_MARGIN_S
        failure = _on_workers(engine, "rlhf_receive_weights", manifest.to_dict(), timeout_s=timeout_s)
        try:
            engine.reset_encoder_cache()
            # Running requests too: keys and values of the old weights would mix with the new ones.
            engine.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            failure = failure or (type(error).__name__, str(error))
        if failure is not None:
            problem = f"weight version {manifest.version} did not arrive: {failure[0]}: {failure[1]}"
            self._refuse_sampling(engine, problem)
            raise WeightSyncError(problem)
        engine.set_weight_version(str(manifest.version))
        self._version = manifest.version
        self._weights_dropped = self._stale = False
        self._loop.accept()

    def _refuse_sampling(self, engine: LLMEngine, problem: str) -> None:
        self._stale = True
        self._loop.refuse(engine, StaleWeightsError(f"{problem}; sampling goes on after the next complete sync"))

    def _sleep(self, engine: LLMEngine) -> None:
        level = self._config.options.get("sleep_level", 1)
        engine.sleep(level=level, mode="keep")
        self._weights_dropped = level == 2

    # ------------------------------------------------------------ requests

    def _sampling_params(self, request: GenerationRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        room = self._room(request)
        greedy = sampling.temperature == 0
        return SamplingParams(
            n=1 if greedy else request.n,
            # vLLM reads a seed of -1 as none; the modulus leaves all usual seeds as they are.
            seed=None if request.seed is None else request.seed % 2**62,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids),
            max_tokens=min(sampling.max_tokens, room),
            min_tokens=min(sampling.min_tokens, room),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _room(self, request: GenerationRequest) -> int:
        """Tokens that fit behind the prompt; refuses what this backend cannot do."""
        sampling = request.sampling
        if request.images:
            raise CapabilityError(
                f"request {request.request_id!r}: this backend passes no images to vLLM; send text alone"
            )
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise CapabilityError(
                f"request {request.request_id!r}: vLLM samples at no temperature between 0 and "
                f"{_LOWEST_TEMPERATURE}, got {sampling.temperature}; use 0 for greedy decoding"
            )
        if sampling.stop and not self._capabilities.stop_strings:
            raise CapabilityError(
                f"request {request.request_id!r}: stop strings need a tokenizer, and {self._config.model} has "
                "none; use stop_token_ids"
            )
        room = self._config.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise CapabilityError(
                f"request {request.request_id!r}: a prompt of {len(request.prompt_token_ids)} tokens leaves no "
                f"room for a response within max_model_len={self._config.max_model_len}; raise that or shorten "
                "the prompt"
            )
        return room


def _on_workers(engine: LLMEngine, method: str, argument: Any, *, timeout_s: float) -> tuple[str, str] | None:
    """Call a method of the worker extension on all workers; the first failure, if any."""
    try:
        answers = engine.collective_rpc(method, timeout=timeout_s, args=(argument,))
    except Exception as error:
        # The workers report their failures as values, so it is the engine that is broken.
        raise EngineDiedError(f"the vLLM engine died: {type(error).__name__}: {error}") from error
    return next((answer for answer in answers if answer is not None), None)


def _result(request: GenerationRequest, output: RequestOutput) -> GenerationResult:
    samples = tuple(_sample(completion) for completion in output.outputs)
    meaning = request.sampling.meaning
    if request.sampling.temperature == 0:
        # Greedy decoding is the same n times, and vLLM truncates nothing for it.
        samples = samples * request.n
        meaning = LogProbMeaning()
    return GenerationResult(request_id=request.request_id, samples=samples, meaning=meaning)


def _sample(completion: CompletionOutput) -> Sample:
    flat = cast(Any, completion.logprobs)
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise EngineDiedError(f"vLLM ended a request with finish_reason={completion.finish_reason!r}")
    return Sample(
        token_ids=tuple(completion.token_ids),
        # The sampled token comes first at each position.
        log_probs=tuple(flat.logprobs[start] for start in flat.start_indices) if flat is not None else (),
        weight_versions=tuple(
            int(span.version) for span in completion.weight_versions or () for _ in range(span.end - span.start)
        ),
        finish_reason=cast(FinishReason, completion.finish_reason),
    )
