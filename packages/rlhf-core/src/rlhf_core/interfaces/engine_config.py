"""What a training engine is told before it is built: the model, its role, the optimizer, how the model is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from rlhf_core.adapters.lora import FourBit, LoraConfig
from rlhf_core.checks import check_choice, check_number, check_switch, check_whole
from rlhf_core.errors import ConfigError
from rlhf_core.options import config_from

Options = TypeVar("Options")

Role = Literal["policy", "critic", "reference", "reward"]
"""`policy` and `reference` are causal language models, `critic` and `reward` have a scalar head."""

DType = Literal["float32", "bfloat16", "float16"]
OptimizerKind = Literal["adamw", "muon"]
Schedule = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices and AdamW for the rest, with a warm-up schedule.

    >>> OptimizerConfig(learning_rate=1e-6, schedule="cosine", warmup_steps=10, total_steps=200).eps
    1e-08

    Raises:
        ConfigError: a value is not finite, is out of its range, or does not go with another one.
    """

    kind: OptimizerKind = "adamw"
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
    """Where a schedule ends, relative to `learning_rate`."""

    def __post_init__(self) -> None:
        check_choice("optimizer: kind", self.kind, get_args(OptimizerKind))
        check_choice("optimizer: schedule", self.schedule, get_args(Schedule))
        check_number("optimizer: learning_rate", self.learning_rate, at_least=0)
        if self.muon_learning_rate is not None:
            check_number("optimizer: muon_learning_rate", self.muon_learning_rate, at_least=0)
        check_number("optimizer: muon_momentum", self.muon_momentum, at_least=0, below=1)
        check_number("optimizer: weight_decay", self.weight_decay, at_least=0)
        if len(self.betas) != 2:
            raise ConfigError(f"optimizer: betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("optimizer: each of betas", beta, at_least=0, below=1)
        check_number("optimizer: eps", self.eps, above=0)
        check_number("optimizer: max_grad_norm", self.max_grad_norm, at_least=0)
        check_whole("optimizer: warmup_steps", self.warmup_steps, at_least=0)
        check_whole("optimizer: total_steps", self.total_steps, at_least=0)
        check_number("optimizer: min_learning_rate_ratio", self.min_learning_rate_ratio, at_least=0, at_most=1)
        if self.total_steps and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer: schedule {self.schedule!r} needs total_steps > warmup_steps, got "
                f"total_steps={self.total_steps}, warmup_steps={self.warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What every training engine needs to know. `options` belong to the one engine that reads them.

    An engine refuses a field that it cannot honour before it loads anything (`TrainEngine.capabilities`).

    >>> EngineConfig(model="Qwen/Qwen2.5-0.5B", optimizer=OptimizerConfig(), lora=LoraConfig(rank=8)).trained
    True

    Raises:
        ConfigError: a value is out of its range, or means nothing for the role.
    """

    model: str
    """Path of a Transformers directory, or a hub name."""
    role: Role = "policy"
    optimizer: OptimizerConfig | None = None
    """None for a frozen role (reference, reward): no optimizer state is made."""
    dtype: DType = "float32"
    device: str = "cpu"
    attention: str | None = None
    """Attention implementation of the model; None chooses."""
    packing: bool = True
    """Run rows unpadded, and prompts that rows share once, where the model allows it."""
    max_tokens_per_micro_batch: int | Literal["auto"] = 16384
    """Tokens that go through the model together: those that it runs, so a prompt that packed rows share counts
    once, and padding counts where rows are padded. A longer row has a micro-batch of its own. `auto`: as many as
    fit, found by a trial (`MeasuresMicroBatches`)."""
    longest_row: int | None = None
    """Tokens of the longest row there can be, for which `auto` makes room; None for that of the first batch."""
    gradient_checkpointing: bool = False
    max_tokens_per_mlp_tile: int | None = None
    """Run the MLP of each layer over so many tokens at a time, and again in the backward pass, so that what it
    makes inside exists for one tile (`rlhf_core.model.tiled_mlp`); for long rows. None runs it over all tokens of
    the micro-batch, which is faster: a tile's forward pass is done once more. Dense models only."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only. A frozen engine takes no adapters; with `lora.quantize` it holds the same 4-bit
    weights as the engine that is trained."""
    average_decay: float | None = None
    """Keep an exponential moving average of the trained weights with this decay; see `KeepsAverage`."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share their rows and hold a slice of the tokens each; for long rows."""
    routing_replay: bool = False
    """Mixture-of-experts policies: `score` of log-probs also says which experts each token went through
    (`ModelOutputs.routed_experts`). A batch with this column runs through the same experts again."""
    images: bool = False
    """Whether rows may have images (`Batch.images`): for a policy or a reference that takes them. The trial of the
    model then has rows with images, too, and where several ranks work together all of them run the image encoder in
    every micro-batch."""
    seed: int = 0
    max_skipped_steps: int = 5
    """Consecutive steps with a non-finite loss or gradient after which the engine raises."""
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that only this engine knows."""

    def __post_init__(self) -> None:
        check_choice("engine: role", self.role, get_args(Role))
        check_choice("engine: dtype", self.dtype, get_args(DType))
        check_whole("engine: sequence_parallel_size", self.sequence_parallel_size, at_least=1)
        tokens, setting = self.max_tokens_per_micro_batch, "engine: max_tokens_per_micro_batch"
        if isinstance(tokens, str):
            check_choice(f"{setting}, if no number,", tokens, ("auto",))
        else:
            check_whole(setting, tokens, at_least=1)
        if self.longest_row is not None:
            check_whole("engine: longest_row", self.longest_row, at_least=1)
        if self.max_tokens_per_mlp_tile is not None:
            check_whole("engine: max_tokens_per_mlp_tile", self.max_tokens_per_mlp_tile, at_least=1)
        check_whole("engine: max_skipped_steps", self.max_skipped_steps, at_least=0)
        check_whole("engine: seed", self.seed, at_least=0)
        for name in ("packing", "gradient_checkpointing", "routing_replay", "images", "trust_remote_code"):
            check_switch(f"engine: {name}", getattr(self, name))
        if self.average_decay is not None:
            check_number("engine: average_decay", self.average_decay, above=0, below=1)
            if not self.trained:
                raise ConfigError(
                    f"engine: average_decay averages weights that change, and this {self.role} is frozen; leave "
                    "it out, or give an optimizer"
                )
        if self.routing_replay and self.role != "policy":
            raise ConfigError(
                f"engine: routing_replay is for a policy, the role is {self.role}; leave it out for this engine"
            )

        if self.images:
            self._check_images()

    def _check_images(self) -> None:
        """Refuse what does not work for rows with images."""
        if self.role not in ("policy", "reference"):
            raise ConfigError(
                f"engine: rows with images are for a policy or a reference, the role is {self.role}; give it rows "
                "of text"
            )
        if self.max_tokens_per_micro_batch == "auto":
            raise ConfigError(
                "engine: max_tokens_per_micro_batch 'auto' tries rows of text, and what images take is not in it; "
                "write a number for rows with images"
            )
        for name, off in (
            ("sequence_parallel_size", 1),
            ("max_tokens_per_mlp_tile", None),
            ("routing_replay", False),
        ):
            if (found := getattr(self, name)) != off:
                raise ConfigError(
                    f"engine: {name} ({found}) does not work for rows with images; leave it out, or images"
                )

    @property
    def trained(self) -> bool:
        """Whether the engine has an optimizer."""
        return self.optimizer is not None

    @property
    def quantize(self) -> FourBit | None:
        """The 4-bit type of the frozen linear layers, if they are to be quantised."""
        return None if self.lora is None else self.lora.quantize

    def options_as(self, cls: type[Options], *, engine: str) -> Options:
        """The `options` as the dataclass in which an engine describes them.

        Raises:
            ConfigError: a key is no field of `cls`, or is one of EngineConfig, which every engine has; or `cls`
                refuses a value.
        """
        common = {item.name for item in fields(EngineConfig)} - {item.name for item in fields(cls)}  # type: ignore
        for key in self.options:
            if key in common:
                raise ConfigError(
                    f"options of the {engine} engine: {key!r} is a setting of every engine, not of this one alone; "
                    f"give it as the field {key} of EngineConfig"
                )
        return config_from(cls, self.options, what=f"options of the {engine} engine")
