"""Configuration of an offline training run: what `rlhf-algos METHOD` and `rlhf offline METHOD` read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rlhf_core import ConfigError, EngineConfig

from rlhf_algos.config.devices import choose_device, choose_dtype
from rlhf_algos.config.loader import from_mapping, to_plain
from rlhf_algos.config.sections import (
    LORA_RATE_FACTOR,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    TrainSection,
)
from rlhf_algos.data.lengths import LengthSection
from rlhf_algos.offline.methods import Method, find_method, with_own_loss

_NAMES = ("name", "loss_function")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineAlgorithmSection:
    """Which method, and beside its name the fields of its loss config (`algorithm: {name: dpo, beta: 0.05}`)."""

    short_form: ClassVar[str] = "name"

    name: str = "dpo"
    """dpo, kto, simpo, cpo, orpo, sft, rm, prm, distill, or `module:attribute` of your own `Method`."""
    loss_function: str | None = None
    """Your own loss at `module:function` in place of the method's; rows and model stay the method's."""
    loss: Any = field(default_factory=dict)
    """The loss's config, or a mapping of its fields. In a file the fields stand beside `name`."""

    def __post_init__(self) -> None:
        method = self.method
        if isinstance(self.loss, Mapping) and is_dataclass(method.config):
            loss = from_mapping(method.config, self.loss, source=f"method {self.name}", prefix="algorithm.")
            object.__setattr__(self, "loss", loss)
        elif not isinstance(self.loss, method.config):
            raise ConfigError(
                f"algorithm.loss of method {self.name!r} must be a {method.config.__name__} or a mapping of its "
                f"fields, found {type(self.loss).__name__}"
            )

    @classmethod
    def from_keys(cls, data: Mapping[str, Any], *, source: str, prefix: str) -> OfflineAlgorithmSection:
        """The section from keys of a file, the loss's fields beside `name`."""
        names = {key: value for key, value in data.items() if key in _NAMES}
        section = from_mapping(_Names, names, source=source, prefix=prefix)
        method = _method(section.name, section.loss_function)
        fields: Any = {key: value for key, value in data.items() if key not in _NAMES}
        if is_dataclass(method.config):
            fields = from_mapping(method.config, fields, source=source, prefix=prefix)
        return cls(name=section.name, loss_function=section.loss_function, loss=fields)

    def to_keys(self) -> dict[str, Any]:
        """The section as keys of a file."""
        return {"name": self.name, "loss_function": self.loss_function} | to_plain(self.loss)

    @property
    def settings(self) -> Any:
        """What holds the keys beside `name`."""
        return self.loss

    @property
    def method(self) -> Method:
        """The method itself."""
        return _method(self.name, self.loss_function)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    name: str = "dpo"
    loss_function: str | None = None


def _method(name: str, loss_function: str | None) -> Method:
    method = find_method(name)
    return method if loss_function is None else with_own_loss(method, loss_function)


def _offline_optimizer() -> OptimizerSection:
    return OptimizerSection(schedule="cosine", warmup=0.03, min_learning_rate_ratio=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineTrainSection(TrainSection):
    """How the model is trained on its data."""

    batch_size: int = 8
    """Examples per optimizer step, over all ranks."""
    epochs: int = 1
    """Passes over the data."""
    steps: int | None = None
    """Stop after this many optimizer steps; the learning rate's course ends there too."""
    optimizer: OptimizerSection = field(default_factory=_offline_optimizer)

    def __post_init__(self) -> None:
        TrainSection.__post_init__(self)
        for name in ("batch_size", "epochs", "steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineEvaluationSection(EvaluationSection):
    """Evaluation on held-out examples; used if `evaluation.data` or `data.hold_out` gives any."""

    every: int = 100
    """Optimizer steps between evaluations; 0 for one at the end. There is always one at the end."""
    batch_size: int = 64
    """Examples scored at once."""
    patience: int = 0
    """Stop after this many evaluations without improvement; 0 never stops early."""

    def __post_init__(self) -> None:
        EvaluationSection.__post_init__(self)
        if self.batch_size < 1 or self.patience < 0:
            raise ConfigError("evaluation: batch_size must be at least 1 and patience must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineConfig:
    """A run of `rlhf-algos METHOD` or `rlhf offline METHOD`."""

    renamed_keys: ClassVar[Mapping[str, str]]

    model: ModelSection
    data: DataSection
    output: Path
    """Gets `model/` (a Transformers directory), `metrics.jsonl`, `config.yaml`, `checkpoints/` and `best/`."""
    algorithm: OfflineAlgorithmSection = field(default_factory=OfflineAlgorithmSection)
    lengths: LengthSection = field(default_factory=LengthSection)
    train: OfflineTrainSection = field(default_factory=OfflineTrainSection)
    evaluation: OfflineEvaluationSection = field(default_factory=OfflineEvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    reference_cache: Path | None = None
    """Where log-probs of references and teachers are kept; null for the user's cache directory."""
    seed: int = 0
    """Seed of everything."""
    tensorboard: bool = True
    """Write TensorBoard files beside `metrics.jsonl`."""

    def __post_init__(self) -> None:
        rate = self.method.learning_rate * (LORA_RATE_FACTOR if self.model.lora is not None else 1)
        train = replace(self.train, optimizer=self.train.optimizer.with_default_rate(rate))
        object.__setattr__(self, "train", train)
        if self.model.critic is not None:
            raise ConfigError("model.critic is PPO's (`rlhf train`); offline methods have no critic")
        if self.model.teacher is not None:
            raise ConfigError(
                "model.teacher is that of on-policy distillation (`rlhf train`); write algorithm.teacher for the "
                "method `distill`"
            )

    @property
    def method(self) -> Method:
        """The method itself."""
        return self.algorithm.method

    @property
    def loss(self) -> Any:
        """The loss's config."""
        return self.algorithm.loss

    @property
    def quantized_reference(self) -> bool:
        """Whether the reference holds 4-bit weights: those that a policy with 4-bit weights starts from."""
        own = self.model.reference in (None, self.model.path)
        return own and self.model.lora is not None and self.model.lora.quantize is not None

    @property
    def device(self) -> str:
        """Where the models run, `auto` resolved."""
        asked = self.placement.device
        # Whether the hosts of a cluster have GPUs is for the launcher to find out.
        elsewhere = self.placement.ray_address is not None or "RAY_ADDRESS" in os.environ
        return choose_device(asked, gpus=1 if asked == "cuda" and elsewhere else None)

    def engine(self, total_steps: int | None, *, frozen: str | None = None, images: bool = False) -> EngineConfig:
        """The engine to train with, or, without steps, a frozen one: of the reference, or of the model `frozen`.

        `images` says whether rows of the data have some.
        """
        model, train = self.model, self.train
        trained = total_steps is not None
        adapted = trained or (frozen is None and self.quantized_reference)
        device = self.device
        return EngineConfig(
            model=model.path if trained else frozen or model.reference or model.path,
            role=self.method.role_for(self.loss) if trained else "reference",
            optimizer=train.optimizer.config(total_steps) if total_steps is not None else None,
            dtype=choose_dtype(model.dtype, device),
            device=device,
            max_tokens_per_micro_batch=train.max_tokens_per_micro_batch,
            longest_row=self.lengths.longest,
            gradient_checkpointing=train.gradient_checkpointing and trained,
            max_tokens_per_mlp_tile=train.max_tokens_per_mlp_tile,
            attention=model.attention,
            seed=self.seed,
            max_skipped_steps=train.max_skipped_steps,
            trust_remote_code=model.trust_remote_code,
            lora=model.lora if adapted else None,
            packing=train.packing,
            images=images,
            average_decay=train.average_decay if trained else None,
            sequence_parallel_size=train.sequence_parallel_size,
            options=train.options,
        )


OfflineConfig.renamed_keys = {
    "model.policy": "model.path",
    "train=": "data.train",
    "eval": "evaluation.data",
    "hold_out": "data.hold_out",
    "method": "algorithm.name",
    "loss": "its fields beside algorithm.name, for instance algorithm.beta",
    "loss_function": "algorithm.loss_function",
    "reference": "model.reference",
    "tokenizer": "model.tokenizer",
    "chat_template": "model.chat_template",
    "prompt_template": "data.prompt_template",
    "apply_chat_template": "data.chat",
    "step_separator": "data.step_separator",
    "step_placeholder": "data.step_placeholder",
    "limit": "lengths",
    "batch_size": "train.batch_size",
    "epochs": "train.epochs",
    "max_steps": "train.steps",
    "shuffle": "data.shuffle",
    "learning": "train.optimizer (warmup_ratio is train.optimizer.warmup)",
    "run.dtype": "model.dtype",
    "run.device": "placement.device",
    "run.lora": "model.lora",
    "run.attention": "model.attention",
    "run.trust_remote_code": "model.trust_remote_code",
    "run.packing": "train.packing",
    "run.gradient_checkpointing": "train.gradient_checkpointing",
    "run.max_tokens_per_micro_batch": "train.max_tokens_per_micro_batch",
    "run.max_skipped_steps": "train.max_skipped_steps",
    "resume": "the flag --resume on the command line",
    "output_dir": "output",
    "scale.ranks": "train.ranks",
    "scale.engine": "train.engine",
    "scale.options": "train.options",
    "scale.executor": "placement.executor",
    "scale.ray_address": "placement.ray_address",
    "scale.cpus_per_worker": "placement.cpus_per_worker",
    "placement.gpus_per_worker": "nothing; a rank has one GPU",
    "scale.timeout_s": "placement.timeout_s",
    "train.optimizer.warmup_ratio": "train.optimizer.warmup",
    "train.optimizer.warmup_steps": "train.optimizer.warmup",
    **{
        f"data.train.*.{name}_key": f"columns: {{{name}: ...}} of the dataset"
        for name in ("input", "output", "prompt", "chosen", "rejected", "label")
    },
}
