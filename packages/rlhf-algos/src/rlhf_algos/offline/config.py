"""Configuration of an offline training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError, DType, EngineConfig, LoraConfig, OptimizerConfig, Schedule

from rlhf_algos.config.loader import from_mapping
from rlhf_algos.data.encoding import LengthLimit
from rlhf_algos.data.sources import DataSource
from rlhf_algos.offline.methods import Method, find_method, with_own_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningConfig:
    """AdamW and the course of its learning rate."""

    learning_rate: float = 5e-7
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 switches clipping off."""
    schedule: Schedule = "cosine"
    warmup_ratio: float = 0.03
    """Share of all steps over which the learning rate rises from 0."""
    min_learning_rate_ratio: float = 0.1
    """Where a linear or cosine schedule ends, relative to `learning_rate`."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(f"learning: warmup_ratio must be in [0, 1), got {self.warmup_ratio}")

    def optimizer(self, total_steps: int) -> OptimizerConfig:
        """The engine's configuration for a run of that many steps."""
        warmup = min(math.ceil(self.warmup_ratio * total_steps), total_steps - 1)
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
            eps=self.eps,
            max_grad_norm=self.max_grad_norm,
            schedule=self.schedule,
            warmup_steps=warmup,
            total_steps=total_steps,
            min_learning_rate_ratio=self.min_learning_rate_ratio,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How the model is run."""

    dtype: DType = "float32"
    device: str = "cpu"
    max_tokens_per_micro_batch: int = 16384
    gradient_checkpointing: bool = False
    attention: str | None = None
    """Transformers' attention implementation; None chooses, and packs sequences where the model allows it."""
    packing: bool = True
    """Run sequences unpadded and a shared prompt once, where the model allows it."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only."""
    max_skipped_steps: int = 5
    """Consecutive steps with a non-finite loss or gradient after which the run stops."""
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training; used if there is an eval set."""

    every: int = 100
    """Optimizer steps between evaluations; there is always one at the end."""
    batch_size: int = 64
    """Examples scored at once."""
    best_metric: str | None = None
    """Metric of the best model, for instance accuracy; None: the method's own. Kept in `output/best`."""
    greater_is_better: bool | None = None
    """None: False for a metric whose name ends in loss, else True."""
    patience: int = 0
    """Stop after this many evaluations without improvement; 0 never stops early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints to resume from."""

    every: int = 0
    """Optimizer steps between checkpoints; 0 writes none."""
    keep: int = 2
    """How many of the last ones to keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineConfig:
    """A run of `rlhf-algos <method>`."""

    model: str
    """Path of a Transformers directory, or a hub name."""
    train: tuple[DataSource, ...]
    """Datasets; several are mixed by their weights."""
    output: Path
    """Gets `model/` (a Transformers directory), `metrics.jsonl`, `checkpoints/` and `best/`."""
    method: str = "dpo"
    """See `offline_methods.METHODS`."""
    eval: tuple[DataSource, ...] = ()
    """Datasets to evaluate on."""
    hold_out: float = 0.0
    """Share of each training dataset that is evaluated on instead, drawn once by `seed`."""
    loss: Any = field(default_factory=dict)
    """Fields of the method's loss config, or an instance of it."""
    loss_function: str | None = None
    """Your own loss at `module:function`, in place of the method's; see `offline_methods.with_own_loss`."""
    reference: str | None = None
    """Reference model of DPO and KTO; None: the model as it is before training."""
    reference_cache: Path | None = None
    """Where the reference's log-probs are kept; None: the user's cache directory."""
    tokenizer: str | None = None
    """None: the model's own."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    prompt_template: str | None = None
    """Text with `{}` in it, into which plain-text prompts are put."""
    apply_chat_template: bool = False
    """Take plain-text prompts and answers as messages of a user and an assistant."""
    step_separator: str = "\n"
    """Text that closes each step for `prm`; a special token of the tokenizer if it has one for that."""
    step_placeholder: str | None = None
    """For `prm` data with all steps in one text (`input`): the token that ends each step."""
    limit: LengthLimit = field(default_factory=LengthLimit)
    batch_size: int = 8
    """Examples per optimizer step, over all ranks."""
    epochs: int = 1
    max_steps: int | None = None
    """Stop after this many optimizer steps; the learning rate's course ends there too."""
    shuffle: bool = True
    """False: the order of the data."""
    seed: int = 0
    learning: LearningConfig = field(default_factory=LearningConfig)
    run: RunConfig = field(default_factory=RunConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: bool = False
    """Continue from the last checkpoint in `output`, bit for bit; starts anew if there is none."""
    tensorboard: bool = True

    def __post_init__(self) -> None:
        method = self.offline_method
        if isinstance(self.loss, Mapping) and is_dataclass(method.config):
            loss = from_mapping(method.config, self.loss, source=f"method {self.method}", prefix="loss.")
            object.__setattr__(self, "loss", loss)
        elif not isinstance(self.loss, method.config):
            raise ConfigError(
                f"loss of method {self.method!r} must be a {method.config.__name__} or a mapping of its fields, "
                f"found {type(self.loss).__name__}"
            )
        if not self.train:
            raise ConfigError("train is empty; write train: [{path: pairs.jsonl}]")
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.hold_out < 1:
            raise ConfigError(f"hold_out must be in [0, 1), got {self.hold_out}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"max_steps must be at least 1, got {self.max_steps}")

    @property
    def offline_method(self) -> Method:
        """The method itself."""
        method = find_method(self.method)
        return method if self.loss_function is None else with_own_loss(method, self.loss_function)

    @property
    def quantized_reference(self) -> bool:
        """Whether the reference holds 4-bit weights: those that a policy with 4-bit weights starts from."""
        own = self.reference in (None, self.model)
        return own and self.run.lora is not None and self.run.lora.quantize is not None

    def engine(self, total_steps: int | None, *, frozen: str | None = None) -> EngineConfig:
        """The engine to train with, or, without steps, a frozen one: of the reference, or of the model `frozen`."""
        run = self.run
        trained = total_steps is not None
        adapted = trained or (frozen is None and self.quantized_reference)
        return EngineConfig(
            model=self.model if trained else frozen or self.reference or self.model,
            role=self.offline_method.role_for(self.loss) if trained else "reference",
            optimizer=self.learning.optimizer(total_steps) if total_steps is not None else None,
            dtype=run.dtype,
            device=run.device,
            max_tokens_per_micro_batch=run.max_tokens_per_micro_batch,
            gradient_checkpointing=run.gradient_checkpointing and trained,
            attention=run.attention,
            packing=run.packing,
            lora=run.lora if adapted else None,
            seed=self.seed,
            max_skipped_steps=run.max_skipped_steps,
            trust_remote_code=run.trust_remote_code,
        )
