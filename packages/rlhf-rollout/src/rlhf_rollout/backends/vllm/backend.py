"""Rollout backend on vLLM: continuous batching, prefix cache, tensor parallelism, native weight transfer.

One vLLM engine runs in this process, on a thread of its own (`loop`). With several workers these
are processes, on this host or (`RolloutConfig.hosts`) on others too, where a `VLLMPart` has them; otherwise the
whole engine is in this one. Every `generate` call is one vLLM request
for all `n` samples: vLLM batches across calls, and the samples share the prompt's computation (whole cache blocks).

A weight update takes place between two steps, once those in flight are finished. Requests that run on across it are
computed again from their tokens under the new weights, so that the log-prob of every token is exactly that of the
weights whose version it carries; with `keep_kv_cache` they go on with keys and values of older weights.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    PauseMode,
    RolloutConfig,
    WeightManifest,
    check_rows_to_score,
)

from rlhf_rollout.backends.vllm.engine import build_engine, chosen_settings, shut_down_engine, steps_in_flight
from rlhf_rollout.backends.vllm.loop import VLLMLoop
from rlhf_rollout.backends.vllm.options import (
    VLLMOptions,
    engine_arguments,
    env_vars,
    prepare_process,
    worker_count,
)
from rlhf_rollout.backends.vllm.part import VLLMPart
from rlhf_rollout.backends.vllm.requests import engine_prompt, generation_result, placeholder_of, sampling_params
from rlhf_rollout.backends.vllm.scoring import score_precision, score_rows
from rlhf_rollout.backends.vllm.weights import EngineWeights
from rlhf_rollout.backends.vllm.workers import WorkerWatch, on_workers, share_memory

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_START_S = 120.0


class VLLMBackend:
    """RolloutBackend on vLLM. `config.options` are those of `VLLMOptions` and the fields of vLLM's EngineArgs.

    Raises:
        ConfigError: an unknown option, a device that the installed vLLM was not built for, or a model or setting
            that vLLM refuses.
        EngineDiedError: the engine did not start; and, by every call, after it has failed. Names the first cause.
    """

    options_type = VLLMOptions
    """What its `options` hold, for those who show or check them."""

    env_vars = staticmethod(env_vars)
    part = staticmethod(VLLMPart)

    def __init__(self, config: RolloutConfig) -> None:
        prepare_process(config)
        arguments = engine_arguments(config)
        self._config = config
        self._capabilities = _capabilities(config, arguments)
        self._weights = EngineWeights(adapters=self._capabilities.adapters, keep_kv_cache=config.keep_kv_cache)
        self._lora_request = _policy_adapter() if self._capabilities.adapters else None
        watch = WorkerWatch()
        on_cpu = config.device == "cpu"
        from vllm.exceptions import VLLMClientError

        self._loop = VLLMLoop(
            # Bound to nothing of this object, which is to be collected while the thread still runs.
            lambda: _start(arguments, watch, on_cpu=on_cpu),
            shut_down_engine,
            refusals=(VLLMClientError, ValueError, TypeError),
            drain=steps_in_flight,
            admit=_salted(self._weights) if config.keep_kv_cache else lambda prompt: prompt,
            cause=watch.cause,
        )
        model, settings = self._loop.call(lambda engine: (engine.model_config, chosen_settings(engine))).result()
        self._image_token_id = placeholder_of(model.hf_config)
        self._capabilities = replace(self._capabilities, images=model.is_multimodal_model, settings=settings)
        if not self._loop.call(lambda engine: share_memory(engine, timeout_s=_START_S)).result():
            transports = self._capabilities.transports - {"shm", "ipc"}
            self._capabilities = replace(self._capabilities, transports=transports, shares_memory=False)
        if getattr(model.hf_config, "quantization_config", None):
            # The names and shapes of its weights are those of codes and scales, which no trainer has.
            self._capabilities = replace(self._capabilities, transports=frozenset(), partial_sync="none")
        self._close = weakref.finalize(self, self._loop.stop)

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return self._capabilities

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._weights.version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend. Cancelling the coroutine aborts the request in the engine.

        A sample also ends, with `finish_reason="length"`, where prompt and response fill `max_model_len`.
        """
        params = sampling_params(request, self._config, self._capabilities)
        prompt = engine_prompt(request, self._image_token_id)
        output = await asyncio.wrap_future(self._loop.generate(prompt, params, self._lora_request))
        return generation_result(request, output)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        await self._call(lambda engine: self._loop.pause(engine, abort=mode == "abort"))

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
            usable = ", ".join(sorted(self._capabilities.transports)) or "none: its checkpoint is quantised"
            raise CapabilityError(
                f"the vllm backend on {self._config.device} with {self._capabilities.receivers} worker(s) cannot "
                f"join a {link.kind!r} link; use one of {usable}"
            )
        await self._call(lambda engine: self._weights.connect(engine, link, rank))

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend. Requests that are running continue under the new weights."""
        await self._call(lambda engine: self._weights.receive(engine, self._loop, manifest))

    async def score_tokens(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """See ScoresTokens. Requests that are running stand still meanwhile."""
        return await self._call(lambda engine: self._score(engine, rows))

    async def sleep(self) -> None:
        """See RolloutBackend. On a GPU it needs the option `enable_sleep_mode`; on a CPU weights stay.

        Requests that are running go on after `wake` from the tokens that they have.
        """
        if self._capabilities.sleep:
            await self._call(self._sleep)

    async def wake(self) -> None:
        """See RolloutBackend."""
        if self._capabilities.sleep:
            await self._call(self._wake)

    def close(self) -> None:
        """See RolloutBackend; unfinished requests raise EngineDiedError."""
        self._close()

    # ------------------------------------------------------------ on the engine's thread

    async def _call(self, run: Any) -> Any:
        return await asyncio.wrap_future(self._loop.call(run))

    def _resume(self, engine: LLMEngine) -> None:
        self._weights.check_present(engine, self._loop)
        self._loop.resume(engine)

    def _score(self, engine: LLMEngine, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        limit, vocab_size = self._config.max_model_len, engine.model_config.get_vocab_size()
        check_rows_to_score(rows, max_model_len=limit, vocab_size=vocab_size)
        self._weights.check_usable()
        self._loop.settle(engine)
        scores = score_rows(engine, rows, self._lora_request, keep=self._config.keep_kv_cache)
        self._loop.settle(engine)
        return scores

    def _sleep(self, engine: LLMEngine) -> None:
        self._loop.settle(engine)
        # Running requests lose their keys and values, too, and compute them again.
        engine.reset_prefix_cache(reset_running_requests=True)
        if self._config.device == "cpu":
            self._on_workers(engine, "rlhf_release_cache")
            return
        level = VLLMOptions.of(self._config).sleep_level
        engine.sleep(level=level, mode="keep")
        if level == 2:
            self._weights.drop()

    def _wake(self, engine: LLMEngine) -> None:
        if self._config.device == "cpu":
            self._on_workers(engine, "rlhf_restore_cache")
        else:
            engine.wake_up()

    def _on_workers(self, engine: LLMEngine, method: str) -> None:
        if (failure := on_workers(engine, method, timeout_s=_START_S)) is not None:
            raise EngineDiedError(f"{failure[0]}: {failure[1]}")


def _start(arguments: dict[str, Any], watch: WorkerWatch, *, on_cpu: bool) -> LLMEngine:
    def prepare(engine: LLMEngine) -> None:
        watch.begin(engine)
        methods = {
            "rlhf_prepare_cpu_layers": on_cpu,
            "rlhf_prepare_stage": arguments.get("pipeline_parallel_size", 1) > 1,
            "rlhf_empty_adapter": arguments.get("enable_lora"),
        }
        for method in (method for method, needed in methods.items() if needed):
            if (failure := on_workers(engine, method, timeout_s=_START_S)) is not None:
                raise EngineDiedError(f"{failure[0]}: {failure[1]}")

    return build_engine(arguments, prepare)


def _salted(weights: EngineWeights) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda prompt: {**prompt, "cache_salt": weights.salt()}


def _capabilities(config: RolloutConfig, arguments: dict[str, Any]) -> BackendCapabilities:
    return BackendCapabilities(
        transports=frozenset(
            {"gloo", "shm", "disk"}
            | ({"local"} if worker_count(config) == 1 else set())
            | ({"nccl", "ipc"} if config.device == "cuda" else set())
        ),
        partial_sync="values",
        penalties=True,
        receivers=worker_count(config),
        stop_strings=not arguments["skip_tokenizer_init"],
        json_schema=not arguments["skip_tokenizer_init"],
        adapters=bool(arguments.get("enable_lora")),
        sleep=config.device == "cpu" or bool(arguments.get("enable_sleep_mode")),
        token_scores=score_precision(config),
        keeps_kv_cache=config.keep_kv_cache,
    )


def _policy_adapter() -> Any:
    from rlhf_rollout.backends.vllm.worker.adapters import POLICY

    return POLICY
