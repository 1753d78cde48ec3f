"""Rollout from any OpenAI-compatible server that returns token ids and log-probs: evaluation, rejection sampling.

Prompts go out as token ids through the completions API. The answer must have `token_ids` (vLLM's extension
`return_token_ids`, and this package's gateway) or tokens named `token_id:<id>` in the log-probs: text alone would
have to be tokenised again, which gives other tokens. Such a server takes no weights.

Needs the extra `openai`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
    ConfigError,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    LogProbMeaning,
    PauseMode,
    RolloutConfig,
    WeightManifest,
    config_from,
)

from rlhf_rollout.backends.openai.completions import completion_arguments, completion_sample, reason, translated


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIOptions:
    """What `RolloutConfig.options` may hold for the openai backend."""

    base_url: str
    """For instance `http://127.0.0.1:8000/v1`."""
    served_model: str | None = None
    """The model's name on the server; `RolloutConfig.model` if not given."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; the key itself belongs in no configuration file."""
    log_probs: Literal["raw", "processed"] = "raw"
    """Whether the server's log-probs are those of the model (`raw`, vLLM's default) or of the distribution that was
    sampled from, after temperature and truncation (`processed`, vLLM's --logprobs-mode processed_logprobs, and this
    package's gateway)."""
    timeout_s: float = 600.0
    """Deadline of a request."""
    retries: int = 2
    """Further attempts after a refused connection, a timeout, or the status 408, 409, 429 or 5xx, with back-off."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.options.base_url must be a URL like http://127.0.0.1:8000/v1, got {self.base_url!r}"
            )
        if self.log_probs not in ("raw", "processed"):
            raise ConfigError(
                f"rollout.options.log_probs must be 'raw' or 'processed', as the server gives them, got "
                f"{self.log_probs!r}"
            )


class OpenAIBackend:
    """RolloutBackend over the completions API of somebody else's server.

    `config.options` are the fields of `OpenAIOptions`.

    Raises:
        ConfigError: no server at `base_url`, a wrong key, or a model that it does not serve.
    """

    options_type = OpenAIOptions
    """What its `options` hold, for those who show or check them."""

    def __init__(self, config: RolloutConfig) -> None:
        import openai

        self._config = config
        self._options = config_from(OpenAIOptions, config.options, what="rollout.options (openai)")
        self._model = self._options.served_model or config.model
        self._version = 0
        self._closed = False
        # HTTP connections belong to one event loop, and each call of `generate` may come from another.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-rollout", daemon=True)
        self._thread.start()
        self._client = openai.AsyncOpenAI(
            base_url=self._options.base_url,
            # A server without a key accepts any; the client insists on one.
            api_key=os.environ.get(self._options.api_key_env) or "none",
            timeout=self._options.timeout_s,
            max_retries=self._options.retries,
        )
        try:
            self._start(self._check_server()).result()
        except BaseException:
            self.close()
            raise

    @property
    def capabilities(self) -> BackendCapabilities:
        """Neither weight transports nor pausing: the server belongs to somebody else."""
        return BackendCapabilities(
            transports=frozenset(), pause_modes=frozenset(), stop_strings=True, penalties=True
        )

    @property
    def weight_version(self) -> int:
        """The newest weight version among the samples so far; 0 for a server that tells no versions."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend. Cancelling the coroutine closes the connection.

        Raises:
            CapabilityError: the server refuses the request, or answers without token ids or log-probs.
            DeadlineExceeded: no answer within `timeout_s`.
            EngineDiedError: the server is gone or fails, after all retries; or this backend was closed meanwhile.
        """
        try:
            return await asyncio.wrap_future(self._start(self._generate(request)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise EngineDiedError("the openai backend was closed during the request") from None
            raise

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Raises CapabilityError: the server belongs to somebody else."""
        raise self._cannot("be paused")

    async def resume(self) -> None:
        """Does nothing: the server is never paused."""

    async def connect(self, link: Link, rank: int) -> None:
        """Raises CapabilityError: the server belongs to somebody else."""
        raise self._cannot("join a weight link")

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """Raises CapabilityError: the server belongs to somebody else."""
        raise self._cannot("take weights")

    async def sleep(self) -> None:
        """Does nothing: the server's memory is not ours."""

    async def wake(self) -> None:
        """Does nothing; see `sleep`."""

    def close(self) -> None:
        """See RolloutBackend."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ on the backend's loop

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._closed:
            work.close()
            raise EngineDiedError("the openai backend is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _shut_down(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    async def _check_server(self) -> None:
        import openai

        try:
            served = [model.id async for model in self._client.models.list()]
        except openai.OpenAIError as error:
            raise ConfigError(
                f"rollout.options.base_url: {self._options.base_url} does not list its models: {reason(error)}; "
                f"check the URL, and the key in the environment variable {self._options.api_key_env}"
            ) from error
        if self._model not in served:
            raise ConfigError(
                f"rollout.options.served_model: {self._options.base_url} serves {', '.join(served) or 'nothing'}, "
                f"not {self._model!r}"
            )

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        import openai

        limit = self._config.max_model_len
        arguments = completion_arguments(request, model=self._model, max_model_len=limit)
        try:
            answer = await self._client.completions.create(**arguments)
        except openai.OpenAIError as error:
            raise translated(error, f"request {request.request_id!r} to {self._options.base_url}") from error
        body = answer.model_dump()
        samples = tuple(
            completion_sample(choice, request.request_id)
            for choice in sorted(body["choices"], key=lambda choice: choice["index"])
        )
        self._version = max((self._version, *(v for sample in samples for v in sample.weight_versions)))
        greedy = request.sampling.temperature == 0
        expected = 1 if greedy else request.n
        if len(samples) != expected:
            raise CapabilityError(
                f"request {request.request_id!r}: the server returned {len(samples)} of {expected} samples; it "
                "does not support `n`, so ask for one sample per request"
            )
        if greedy:
            samples = samples * request.n
        raw = self._options.log_probs == "raw"
        meaning = LogProbMeaning() if raw else request.sampling.meaning
        return GenerationResult(request_id=request.request_id, samples=samples, meaning=meaning)

    def _cannot(self, what: str) -> CapabilityError:
        return CapabilityError(
            f"the server at {self._options.base_url} cannot {what}: the openai backend is for evaluation and "
            "rejection sampling; train with the vllm or transformers backend"
        )
