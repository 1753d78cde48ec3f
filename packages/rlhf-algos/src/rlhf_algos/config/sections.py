"""The sections that all configuration files share: `rlhf train`, `rlhf offline` and `rlhf-algos` say one thing one
way.

A *section* is a group of keys in a file; a *config* is what a class takes; *options* are the settings of one
engine, backend or loss that nothing else reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from ipaddress import ip_network
from typing import Any, ClassVar, Literal

from rlhf_core import ConfigError, DType, LoraConfig, OptimizerConfig, Schedule

from rlhf_algos.data.sources import DataSource

LORA_RATE_FACTOR = 10.0
"""Low-rank adapters take about ten times the rate of full training (Schulman et al. 2025, "LoRA Without
Regret")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The models of a run. A path is tried first, then a hub name. `model: PATH` is short for `model: {path:
    PATH}`."""

    short_form: ClassVar[str] = "path"

    path: str
    """The model to train: a Transformers directory or a hub name."""
    reference: str | None = None
    """Model that a KL penalty or a preference loss is measured against; null for the trained model's start."""
    critic: str | None = None
    """Start of PPO's critic; null for the reward model, else the policy's backbone."""
    teacher: str | None = None
    """Model that judges the policy's tokens in `on_policy_distillation` (`rlhf train`): any architecture, with the
    policy's vocabulary. `self_distillation` takes the policy's start without it."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """Several teachers, by name, in the place of `teacher`: each judges the samples of the prompts whose column
    `teacher` names it."""
    tokenizer: str | None = None
    """Where the tokenizer is; null for the model's own."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    dtype: DType | Literal["auto"] = "auto"
    """Numbers in which the models run; `auto`: bfloat16 on a GPU, float32 on a CPU."""
    attention: str | None = None
    """Transformers' attention implementation; null chooses, and packs sequences where the model allows it."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only, over 4-bit weights if it says `quantize`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """What is trained on."""

    train: tuple[DataSource, ...]
    """A file, directory or hub name, a list of these, or groups {path, name, split, columns, limit, weight};
    several are mixed by their weights."""
    hold_out: float = 0.0
    """What is evaluated on instead of being trained on: a share of each training dataset if below 1, else a number
    of rows; drawn once by `seed`."""
    chat: bool = False
    """Take plain text as chat messages and apply the tokenizer's chat template; messages always get it."""
    system_prompt: str | None = None
    """Put before the messages of every prompt that has no system message."""
    prompt_template: str | None = None
    """Text with `{}` in it, into which plain-text prompts are put."""
    shuffle: bool = True
    """False: the order of the data."""
    image_urls: bool = False
    """Fetch images that rows give by URL (offline training); else a URL is refused, and images are files beside the
    data or stand in it."""
    step_separator: str = "\n"
    """Text that closes each step for `prm`; a special token of the tokenizer if it has one for that."""
    step_placeholder: str | None = None
    """For `prm` data with all steps in one text (`input`): the token that ends each step."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("data.train is empty; write data.train: pairs.jsonl, or a list of files")
        if self.hold_out < 0 or not math.isfinite(self.hold_out):
            raise ConfigError(f"data.hold_out must not be negative, got {self.hold_out}")
        if self.hold_out >= 1 and self.hold_out != int(self.hold_out):
            raise ConfigError(f"data.hold_out from 1 on is a number of rows; {self.hold_out} is none")
        if self.prompt_template is not None and "{}" not in self.prompt_template:
            raise ConfigError(
                f"data.prompt_template {self.prompt_template!r} has no '{{}}' for the prompt to stand in"
            )

    @property
    def description(self) -> str:
        """The datasets in a few words, for messages."""
        return ", ".join(source.path for source in self.train)

    def held_out_rows(self, rows: int) -> int:
        """How many of a dataset's rows are held out.

        Raises:
            ConfigError: nothing would be left to train on.
        """
        if not self.hold_out:
            return 0
        count = int(self.hold_out) if self.hold_out >= 1 else max(1, round(self.hold_out * rows))
        if count >= rows:
            raise ConfigError(
                f"data.hold_out={self.hold_out:g} of {rows} rows leaves nothing to train on; lower it"
            )
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection:
    """The optimizer and the course of its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al. 2024) orthogonalises the momentum of hidden matrices; the rest keeps AdamW."""
    learning_rate: float | None = None
    """Null for the method's own default, ten times as high with `model.lora`."""
    muon_learning_rate: float | None = None
    """Rate of the matrices under `muon`; null for `learning_rate`."""
    muon_momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 switches clipping off."""
    schedule: Schedule = "constant"
    warmup: float = 0.0
    """Optimizer steps over which the rate rises linearly from 0: a share of all steps if below 1, else their
    number."""
    min_learning_rate_ratio: float = 0.0
    """Where a linear, cosine or wsd schedule ends, relative to `learning_rate`."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.warmup) or self.warmup < 0:
            raise ConfigError(f"optimizer: warmup must not be negative, got {self.warmup}")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(f"optimizer: warmup from 1 on is a number of steps; {self.warmup} is none")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"optimizer: learning_rate must be a finite number and not negative, got {rate}")
        self.config(1_000_000)  # refuses what the engines would refuse

    def with_default_rate(self, rate: float) -> OptimizerSection:
        """With this learning rate where none is written."""
        return self if self.learning_rate is not None else replace(self, learning_rate=rate)

    def config(self, total_steps: int) -> OptimizerConfig:
        """What an engine takes, for a run of that many optimizer steps."""
        if self.warmup < 1:
            warmup = min(math.ceil(self.warmup * total_steps), total_steps - 1)
        else:
            warmup = int(self.warmup)
            if self.schedule != "constant" and warmup >= total_steps:
                raise ConfigError(
                    f"optimizer.warmup={warmup} steps is not less than the {total_steps} optimizer steps of the run"
                )
        shared = {item.name for item in fields(OptimizerConfig)} & {item.name for item in fields(self)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        if self.learning_rate is None:
            del values["learning_rate"]
        total = 0 if self.schedule == "constant" else total_steps
        return OptimizerConfig(**values, warmup_steps=warmup, total_steps=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """How models are trained; offline and online runs add keys of their own."""

    engine: str = "auto"
    """`auto` (deepspeed where installed, else torch; `rlhf-algos`: torch), an installed engine's name, or
    `module:Class`."""
    ranks: int = 1
    """Data-parallel ranks; under ZeRO-3 they hold one copy of the model together."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    max_tokens_per_micro_batch: int | Literal["auto"] = 16384
    """Tokens that go through the model together; a longer sequence has a micro-batch of its own. `auto`: as many as
    fit into memory, at most 16384. Each engine tries it before its first step and its first scoring, with the
    longest sequences there can be, says what it found, and keeps to it after a resume. A number is the default,
    because the last bits of a run depend on it: with `auto` they depend on what memory a machine has free."""
    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass: less memory, about a third more time."""
    max_tokens_per_mlp_tile: int | None = None
    """Run the MLP of each layer over so many tokens at a time, and again in the backward pass; for sequences whose
    activations do not fit otherwise. None runs it over a whole micro-batch, which takes less time. Not for mixtures
    of experts."""
    packing: bool = True
    """Run sequences unpadded and a shared prompt once, where the model allows it."""
    max_skipped_steps: int = 5
    """Consecutive steps with a non-finite loss or gradient after which the run stops."""
    average_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay per optimizer step, and export it too."""
    sequence_parallel_size: int = 1
    """Ranks that share each sequence (Ulysses)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chosen engine (for deepspeed: stage, offload_optimizer, ...)."""

    def __post_init__(self) -> None:
        for name in ("ranks", "max_tokens_per_micro_batch", "max_tokens_per_mlp_tile", "sequence_parallel_size"):
            if (value := getattr(self, name)) not in ("auto", None) and value < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {value}")
        if self.max_skipped_steps < 0:
            raise ConfigError(f"train.max_skipped_steps must not be negative, got {self.max_skipped_steps}")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ConfigError(f"train.average_decay must be between 0 and 1, got {self.average_decay}")
        if self.ranks % self.sequence_parallel_size:
            raise ConfigError(
                f"train.sequence_parallel_size={self.sequence_parallel_size} does not divide "
                f"train.ranks={self.ranks}"
            )

    @property
    def engine_name(self) -> str:
        """The engine, `auto` resolved."""
        if self.engine != "auto":
            return self.engine
        return "deepspeed" if find_spec("deepspeed") is not None else "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSection:
    """Evaluation while training; offline and online runs add keys of their own."""

    every: int = 0
    """Steps between evaluations; 0 for one at the end (online runs: and one at the start)."""
    data: tuple[DataSource, ...] = ()
    """Datasets to evaluate on, as in `data.train`; rows of `data.hold_out` come on top."""
    best_metric: str | None = None
    """Metric of the best model; null for the method's own offline, and for no best checkpoint in an online run."""
    greater_is_better: bool | None = None
    """Null: false for a metric whose name ends in loss, else true."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"evaluation.every must not be negative, got {self.every}")

    def better_sign(self, metric: str) -> float:
        """1.0 if more of the metric is better, else -1.0."""
        greater = self.greater_is_better
        return 1.0 if (not metric.endswith("loss") if greater is None else greater) else -1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """Checkpoints to resume from."""

    every: int = 0
    """Steps between checkpoints; 0 for those by time alone (online runs: and one at the end)."""
    minutes: float = 30.0
    """A checkpoint is also written after the first step that ends so long after the last one; 0 for never."""
    keep: int = 2
    """How many of the newest stay."""
    in_background: bool = False
    """Write checkpoints while training goes on, from a copy in host memory, if the engine can (deepspeed can)."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every must not be negative, got {self.every}")
        if not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise ConfigError(f"checkpoint.minutes must be a finite number and not negative, got {self.minutes}")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {self.keep}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSection:
    """Where the work runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is a GPU: in the cluster that is joined, else on this host."""
    executor: Literal["auto", "local", "ray"] = "auto"
    """`local`: all in this process; `ray`: an actor per worker; `auto`: ray where it is installed and needed."""
    ray_address: str | None = None
    """An existing cluster (`auto` finds one on this host); null starts a local one."""
    cpus_per_worker: float = 0.25
    """CPU cores reserved per worker. Workers mostly take turns, so a share of a core is enough on a CPU box."""
    interface: str | None = None
    """Network interface (`eth1`) or network (`10.1.0.0/16`) over which the hosts of a cluster reach each other;
    null for the addresses under which Ray knows them."""
    forward_env: tuple[str, ...] = ()
    """Environment variables of this process that the workers of a joined cluster get, too, beside those that begin
    with NCCL_, GLOO_, HF_ or RLHF_."""
    restarts: int = 0
    """How often a run begins again from its newest checkpoint, within the same command, after it lost a training
    rank or Ray's head, or a wait saw no progress."""
    engine_restarts: int = 3
    """Rollout engines that are replaced in a run after they died; those that cannot start count, too."""
    timeout_s: float = 1800.0
    """A wait on workers ends when nothing has moved for so many seconds: no token, no row, no byte. Work that moves
    may take as long as it takes."""

    def __post_init__(self) -> None:
        for name in ("cpus_per_worker", "restarts", "engine_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"placement.{name} must not be negative, got {getattr(self, name)}")
        if self.interface is not None and "/" in self.interface:
            try:
                ip_network(self.interface, strict=False)
            except ValueError as error:
                raise ConfigError(
                    f"placement.interface={self.interface!r} is no network: {error}; write e.g. 10.1.0.0/16, or "
                    "the name of an interface"
                ) from None
        if not self.timeout_s > 0:
            raise ConfigError(f"placement.timeout_s must be positive, got {self.timeout_s}")
