"""Rollout by Transformers inside this process: the readable reference, for tests, debugging and small models.

One thread owns the model (`loop`); `decoder` grows a batch with cached states, `token_sampling` draws.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
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
    check_rows_to_score,
    checkpoint_views,
    config_from,
    copy_into,
    join_link,
    model_loading,
    receive_weights,
)

from rlhf_rollout.backends.transformers.decoder import Decoder, Draw, SeparateDecoder
from rlhf_rollout.backends.transformers.loop import DecodingLoop
from rlhf_rollout.backends.transformers.stop_strings import StopStrings, decoding_tokenizer
from rlhf_rollout.backends.transformers.token_sampling import score_rows
from rlhf_rollout.backends.transformers.trial import try_decoding


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersOptions:
    """What `rollout.options` may say to the transformers backend."""

    separate_requests: bool = False
    """Decode each request by itself, so that the last bits of its samples' log-probs depend on no other request: a
    run then has the same bits on a busy machine. A step takes a forward pass per request."""


class TransformersBackend:
    """RolloutBackend over `AutoModelForCausalLM`, with batched, cached decoding. See TransformersOptions.

    Any decoder-only model works whose cached decoding gives the log-probs of its own forward pass, which is tried
    when it is loaded. Unseeded requests draw from `config.seed`'s stream.

    Raises:
        ConfigError: an option, or a model whose log-probs would differ.
        CapabilityError: more than one device.
    """

    def __init__(self, config: RolloutConfig) -> None:
        from transformers import AutoModelForCausalLM

        options = config_from(TransformersOptions, config.options, what="rollout.options (transformers)")
        if config.tensor_parallel_size != 1:
            raise CapabilityError(
                "rollout: the transformers backend runs on one device, got "
                f"tensor_parallel_size={config.tensor_parallel_size}; use the vllm backend or set it to 1"
            )
        with model_loading:
            model: Any = AutoModelForCausalLM.from_pretrained(
                config.model, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
            )
        self._config = config
        self._model = model.to(config.device).eval().requires_grad_(False)
        try_decoding(self._model)
        self._end_of_text = _end_of_text(model)
        self._tokenizer = decoding_tokenizer(config)
        decoder = SeparateDecoder if options.separate_requests else Decoder
        self._decoder = decoder(self._model, max_model_len=config.max_model_len)
        self._loop = DecodingLoop(self._decoder, max_draws=config.max_num_seqs)
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._receiver: Receiver | None = None

    # ------------------------------------------------------------ RolloutBackend

    @property
    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        cuda = torch.device(self._config.device).type == "cuda"
        kinds = {"local", "gloo", "shm", "disk"} | ({"nccl", "ipc"} if cuda else set())
        return BackendCapabilities(
            transports=frozenset(kinds),
            partial_sync="values",
            sleep=True,
            stop_strings=self._tokenizer is not None,
            penalties=True,
            token_scores=self._config.dtype,
        )

    @property
    def weight_version(self) -> int:
        """See RolloutBackend."""
        return self._loop.version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        self._check(request)
        stops = self._end_of_text | set(request.sampling.stop_token_ids)
        draws = [
            Draw(
                request=request,
                generator=generator,
                stop_token_ids=stops,
                stop_strings=StopStrings(self._tokenizer, request) if request.sampling.stop else None,
            )
            for generator in self._generators(request)
        ]
        return await asyncio.wrap_future(self._loop.add(request, draws))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See RolloutBackend."""
        await self._between_steps(lambda: self._loop.pause(abort=mode == "abort"))

    async def resume(self) -> None:
        """See RolloutBackend."""
        self._loop.resume()

    async def connect(self, link: Link, rank: int) -> None:
        """See RolloutBackend."""
        # These two fill buffers on the accelerator; from the others, weights are copied there one by one.
        device = self._config.device if link.kind in ("nccl", "ipc") else "cpu"
        receiver = await asyncio.to_thread(join_link, link, rank, device=device)
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """See RolloutBackend."""
        await self._between_steps(lambda: self._take_weights(manifest))

    async def score_tokens(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """See ScoresTokens."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        check_rows_to_score(rows, max_model_len=self._config.max_model_len, vocab_size=vocabulary)
        scores: list[list[float]] = []
        await self._between_steps(lambda: scores.extend(self._score(rows)))
        return scores

    async def sleep(self) -> None:
        """See RolloutBackend: weights wait in host memory. What running requests had computed is computed again."""
        await self._between_steps(lambda: self._move(torch.device("cpu")))

    async def wake(self) -> None:
        """See RolloutBackend."""
        await self._between_steps(lambda: self._move(torch.device(self._config.device)))

    def close(self) -> None:
        """See RolloutBackend. Requests still running end with EngineDiedError."""
        self._loop.close()
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
        if request.sampling.json_schema:
            raise CapabilityError(
                f"{name}: the transformers backend keeps samples to no JSON Schema; use the vllm backend, or leave "
                "the schema out"
            )
        if request.sampling.stop and self._tokenizer is None:
            raise CapabilityError(
                f"{name}: the model in {self._config.model!r} has no tokenizer of the tokenizers library, by which "
                f"stop strings are found, got {request.sampling.stop}; use stop_token_ids"
            )
        self._check_ids(name, (*request.prompt_token_ids, *request.sampling.stop_token_ids))

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocab = self._model.get_input_embeddings().num_embeddings
        if bad := [token for token in ids if not 0 <= token < vocab]:
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
        await asyncio.wrap_future(self._loop.between_steps(call))

    # ------------------------------------------------------------ the loop's thread

    def _score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        if self._loop.refuses:
            raise StaleWeightsError("the last weight sync failed; sync again before scoring")
        return score_rows(self._model, rows)

    def _move(self, device: torch.device) -> None:
        self._decoder.forget_states()
        self._model.to(device)
        if torch.device(self._config.device).type == "cuda":
            torch.cuda.empty_cache()

    def _take_weights(self, manifest: WeightManifest) -> None:
        try:
            if self._receiver is None:
                raise WeightSyncError("receive_weights before connect: there is no weight link to receive from")
            check_base(manifest, None if self._loop.refuses else self._loop.version)
            check_coverage(manifest, self._model)
            if manifest.other_way:
                self._model = self._decoder.model = _loaded_anew(self._model, manifest, self._receiver)
            else:
                held = checkpoint_views(self._model)
                load = copy_into(self._model)
                receive_weights(
                    manifest, self._receiver, load, base=lambda name: _weight(held, name), place=held.get
                )
        except Exception as error:
            reason = f"the last weight sync failed; sync again before sampling: {error}"
            self._loop.refuse(StaleWeightsError(reason))
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(
                f"the transformers backend did not get version {manifest.version}: {error}"
            ) from error
        self._decoder.forget_states()
        self._loop.version = manifest.version
        self._loop.accept()


def _weight(held: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in held:
        raise WeightSyncError(f"the generator's model has no weight {name!r}")
    return held[name]


def _loaded_anew(model: Any, manifest: WeightManifest, receiver: Receiver) -> Any:
    """Another model of the same kind, which Transformers loads from all weights as it loads a checkpoint."""
    weights: dict[str, torch.Tensor] = {}
    receive_weights(manifest, receiver, lambda pairs: weights.update((name, t.clone()) for name, t in pairs))
    with model_loading:
        new = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=weights,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
        )
    return new.to(model.device).eval().requires_grad_(False)


def _end_of_text(model: Any) -> frozenset[int]:
    """End-of-text ids of the generation config, or of the model's config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
