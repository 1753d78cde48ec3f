"""A trainer's side of weight sync for tests: a Transformers model whose weights a backend is kept equal to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlhf_core.data.generation import GenerationRequest, Sample
from rlhf_core.interfaces.rollout import RolloutBackend
from rlhf_core.model.log_probs import log_probs_from_logits
from rlhf_core.weight_sync.delta import DeltaMode, DeltaSource
from rlhf_core.weight_sync.manifest import TensorSpec, WeightManifest
from rlhf_core.weight_sync.send import send_weights
from rlhf_core.weight_sync.source import ModuleWeights, WeightSource
from rlhf_core.weight_sync.transports.transport import Sender, open_sender

BUCKET_BYTES = 32 << 10
"""Small, so that the tiny models travel in many buckets."""


class Trainer:
    """Holds the model that the backend under test should agree with, and sends it."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(11)

    def perturb(self, scale: float = 0.03) -> None:
        """Add noise to every weight, so that log-probs change clearly."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator), alpha=scale)

    def perturb_one_layer(self) -> None:
        """Change the attention of layer 1, few values of its MLP, and the first norm; nothing else."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=self._generator)
                if "layers.1.self_attn.v_proj" in name or name.endswith("layers.0.input_layernorm.weight"):
                    parameter.add_(noise, alpha=0.1)
                elif "layers.1.mlp.up_proj" in name:
                    parameter.view(-1)[::97] += noise.view(-1)[::97]

    def manifest(self, version: int) -> WeightManifest:
        """Manifest of the model's weights."""
        return ModuleWeights(self.model).manifest(version, bucket_bytes=BUCKET_BYTES)

    @torch.no_grad()
    def logits(self, token_ids: Iterable[int]) -> Tensor:
        """Logits of a plain forward pass, [length, vocab]."""
        return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    def log_probs(self, request: GenerationRequest, sample: Sample, *, banned: Sequence[int] = ()) -> Tensor:
        """Untruncated log-probs of the sampled tokens at the request's temperature, [tokens].

        `banned` tokens have no share of the probability.
        """
        logits = self.logits(request.prompt_token_ids + sample.token_ids)
        logits[:, list(banned)] = -torch.inf
        before = logits[len(request.prompt_token_ids) - 1 : -1] / request.sampling.meaning.temperature
        return log_probs_from_logits(before, torch.tensor(sample.token_ids, dtype=torch.long))

    def row_log_probs(self, row: Sequence[int]) -> Tensor:
        """Log-probs of a row's tokens at temperature 1, from the second on, [tokens - 1]."""
        return log_probs_from_logits(self.logits(row)[:-1], torch.tensor(list(row[1:]), dtype=torch.long))

    @torch.no_grad()
    def prompt_continued_by(self, token_id: int, *, vocab_size: int) -> tuple[int, ...]:
        """A prompt after which greedy decoding gives `token_id`, found by trying random ones."""
        for _ in range(64):
            prompts = torch.randint(5, vocab_size, (512, 4), generator=self._generator)
            best = self.model(prompts, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
            if (hits := (best == token_id).nonzero()).numel():
                return tuple(prompts[int(hits[0])].tolist())
        raise AssertionError(f"no prompt was found that the model continues with token {token_id}")


async def sync(
    backend: RolloutBackend,
    trainer: Trainer,
    *,
    kind: str | None = None,
    version: int | None = None,
    timeout_s: float = 30.0,
    other_way: bool = False,
) -> int:
    """Bring the backend to the trainer's weights over a new link; returns the version (default: the next)."""
    version = backend.weight_version + 1 if version is None else version
    manifest = replace(trainer.manifest(version), other_way=other_way)
    sender = await connect(backend, kind or cpu_transport(backend), timeout_s=timeout_s)
    try:
        await send_and_receive(backend, trainer, sender, manifest)
    finally:
        sender.close()
    return version


async def delta_syncs(
    backend: RolloutBackend, trainer: Trainer, mode: DeltaMode, *, checksums: bool
) -> tuple[int, int]:
    """A full sync, a change of few weights, a partial sync; the bytes of the partial and of the full one."""
    source = DeltaSource(ModuleWeights(trainer.model), mode=mode)
    sender = await connect(backend, cpu_transport(backend), timeout_s=30)
    sizes = []
    try:
        for version in (backend.weight_version + 1, backend.weight_version + 2):
            manifest = source.changes(version, bucket_bytes=BUCKET_BYTES)
            sizes.append(manifest.total_bytes)
            manifest = replace(manifest, checksums=checksums)
            await send_and_receive(backend, source, sender, manifest)
            source.confirm(version)
            if len(sizes) == 1:
                trainer.perturb_one_layer()
    finally:
        sender.close()
    return sizes[1], sizes[0]


async def send_and_receive(
    backend: RolloutBackend, trainer: Trainer | WeightSource, sender: Sender, manifest: WeightManifest
) -> None:
    """One transfer over an open link."""
    source = ModuleWeights(trainer.model) if isinstance(trainer, Trainer) else trainer
    receiving = asyncio.create_task(backend.receive_weights(manifest))
    sending = asyncio.to_thread(send_weights, source, manifest, sender)
    # The receiver's error is the cause, the sender's only its consequence: it is raised first.
    for outcome in await asyncio.gather(receiving, sending, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def connect(backend: RolloutBackend, kind: str, *, timeout_s: float) -> Sender:
    """Open a sender and join the backend to it."""
    sender = open_sender(kind, receivers=backend.capabilities.receivers, timeout_s=timeout_s)
    joining = asyncio.create_task(backend.connect(sender.link, 0))
    await asyncio.to_thread(sender.accept)
    await joining
    return sender


def cpu_transport(backend: RolloutBackend) -> str:
    """The cheapest transport that works without a GPU."""
    return next(kind for kind in ("local", "gloo") if kind in backend.capabilities.transports)


async def broken_sync(backend: RolloutBackend, trainer: Trainer, fault: str, *, timeout_s: float = 2.0) -> None:
    """A sync that cannot succeed; raises what `receive_weights` raises.

    `fault` is `sender closes` (after the first bucket), `unknown name`, `missing name`, or `other base`: changes to
    a version that the backend does not have.
    """
    manifest = trainer.manifest(backend.weight_version + 1)
    source = ModuleWeights(trainer.model)
    if fault == "unknown name":
        extra = TensorSpec(name="model.no_such.weight", shape=(4,), dtype="float32")
        manifest = replace(manifest, tensors=(*manifest.tensors, extra))
        source = _WithExtra(trainer.model, extra)
    elif fault == "missing name":
        manifest = replace(manifest, tensors=manifest.tensors[:-1])
    elif fault == "other base":
        manifest = replace(manifest, base_version=backend.weight_version - 1)
    sender = await connect(backend, cpu_transport(backend), timeout_s=timeout_s)
    sent = replace(manifest, tensors=manifest.buckets()[0].tensors) if fault == "sender closes" else manifest

    def send() -> None:
        try:
            send_weights(source, sent, sender)
        finally:
            sender.close()

    receiving = asyncio.create_task(backend.receive_weights(manifest))
    outcome, _ = await asyncio.gather(receiving, asyncio.to_thread(send), return_exceptions=True)
    if isinstance(outcome, BaseException):
        raise outcome


class _WithExtra(ModuleWeights):
    """Sends one tensor that the model does not have."""

    def __init__(self, module: nn.Module, extra: TensorSpec) -> None:
        super().__init__(module)
        self._tensors[extra.name] = nn.Parameter(torch.zeros(extra.shape))
