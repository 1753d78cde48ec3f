"""The training seam: what the loop asks of a policy, critic, reference or reward engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from rlhf_core.data.batch import Batch
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces.loss import Loss, ModelOutputs
from rlhf_core.weight_sync.source import WeightSource

Role = Literal["policy", "critic", "reference", "reward"]
"""`policy` and `reference` are causal language models, `critic` and `reward` have a scalar head."""

DType = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices and AdamW for the rest, with a warm-up schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al. 2024) orthogonalises the momentum of hidden matrices; embeddings, heads, norms and
    biases keep AdamW. An engine without it refuses it."""
    learning_rate: float = 1e-6
    muon_learning_rate: float | None = None
    """Rate of the matrices under `muon`, on the same schedule; None for `learning_rate`. Muon's updates have a
    fixed size, so its rates are larger than Adam's."""
    muon_momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 switches clipping off."""
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    total_steps: int = 0
    """Optimizer steps until a linear, cosine or wsd schedule reaches `min_learning_rate_ratio`; 0 lets the training
    loop fill in the length of its run."""
    min_learning_rate_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ConfigError(f"optimizer: kind must be 'adamw' or 'muon', got {self.kind!r}")
        if self.schedule not in get_args(Schedule):
            raise ConfigError(
                f"optimizer: schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}"
            )
        if self.learning_rate < 0:
            raise ConfigError(f"optimizer: learning_rate must not be negative, got {self.learning_rate}")
        if self.total_steps and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer: schedule {self.schedule!r} needs total_steps > warmup_steps, got "
                f"total_steps={self.total_steps}, warmup_steps={self.warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What every training engine needs to know. `options` belong to the one engine that reads them."""

    model: str
    """Path of a Transformers directory, or a hub name."""
    role: Role = "policy"
    optimizer: OptimizerConfig | None = None
    """None for a frozen role (reference, reward): no optimizer state is made."""
    dtype: DType = "float32"
    device: str = "cpu"
    max_tokens_per_micro_batch: int = 16384
    """Tokens that go through the model together: those that it runs, so a prompt that packed rows share counts
    once, and padding counts where rows are padded. A longer row has a micro-batch of its own."""
    gradient_checkpointing: bool = False
    attention: str | None = None
    """Attention implementation of the model; None chooses."""
    seed: int = 0
    max_skipped_steps: int = 5
    """Consecutive steps with a non-finite loss or gradient after which the engine raises."""
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step did; the same on all ranks."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping; NaN if the step was skipped before it was known."""
    learning_rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    """True if a loss or gradient was not finite and the weights stayed as they were."""
    bad_sample_ids: tuple[str, ...] = ()
    tokens: int = 0
    """Tokens that went through the model, over all ranks."""


@runtime_checkable
class TrainEngine(Protocol):
    """One rank of a training engine.

    With several ranks, every rank makes the same calls in the same order, each with its own rows. A class may have
    a static method `process_environment(config) -> dict[str, str]`: variables that must be set before a rank's
    process starts (threads, devices).
    """

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """Forward only, dropout off. CPU tensors in the order of the rows."""
        ...

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """One optimizer step over the batch, in as many micro-batches as memory needs."""
        ...

    def weights(self) -> WeightSource:
        """The current weights under their checkpoint names, for a sync."""
        ...

    def offload(self) -> None:
        """Move the engine's state off the accelerator; a no-op on the CPU."""
        ...

    def reload(self) -> None:
        """Undo `offload`."""
        ...

    def save(self, path: Path) -> None:
        """Write everything needed to continue bit for bit into the existing directory `path`."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        ...

    def export(self, path: Path) -> None:
        """Write the model as a Transformers directory (no tokenizer)."""
        ...

    def close(self) -> None:
        """Release memory and process groups; may be called twice."""
        ...
