"""The configuration of an online run: what `rlhf train CONFIG` reads, one frozen dataclass per section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_algos import GRPO, PPO, OffPolicyCorrection
from rlhf_core import ConfigError, DType, LoraConfig, OptimizerConfig

from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.rollout import RolloutSection
from rlhf_launch.config.weight_sync import SyncOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The models of the run. A path is tried first, then a hub name."""

    policy: str
    """Causal language model to improve."""
    reference: str | None = None
    """Model that the KL penalty is measured against; the policy's start if not given."""
    critic: str | None = None
    """Start of the critic (PPO); the reward model, else the policy's backbone, if not given."""
    dtype: DType = "float32"
    attention: str | None = None
    """Attention implementation of the training engines; null chooses."""
    trust_remote_code: bool = False
    lora: LoraConfig | None = None
    """Train low-rank adapters of policy and critic only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Prompts to train on, and held-out ones to evaluate on."""

    prompts: str
    """JSONL or Parquet file, or a hub dataset's name."""
    split: str = "train"
    eval_rows: int = 0
    """Rows held out from the end of `prompts`, evaluated greedily under the name `held-out`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name: the file's column. `prompt` (text, or chat messages as a list of {role, content}) is what the model
    sees; every column goes to the reward function by its name here."""
    limit: int | None = None
    """Read at most this many rows of `prompts`."""
    chat: bool = False
    """Wrap plain text as a user message and apply the tokenizer's chat template; messages always get it."""
    system_prompt: str | None = None
    max_prompt_tokens: int = 1024
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt of more tokens; dropped ones are counted and reported."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmSection:
    """Which algorithm, and the hyper-parameters of each."""

    name: Literal["grpo", "ppo"] = "grpo"
    grpo: GRPO = field(default_factory=GRPO)
    ppo: PPO = field(default_factory=PPO)

    @property
    def recipe(self) -> GRPO | PPO:
        """The chosen one."""
        return self.grpo if self.name == "grpo" else self.ppo


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSection:
    """One set of held-out prompts with its own sampling."""

    prompts: str
    """JSONL or Parquet file, or a hub dataset's name."""
    split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)
    """As in `data.columns`."""
    limit: int | None = None
    samples: int = 1
    """Per prompt; from 2 on, pass@k is reported for k = 1, 2, 4, ... up to it."""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None
    """Longest response; the training's if not given."""
    pass_score: float = 0.5
    """A sample passes with a score above this."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"evaluations: samples must be at least 1, got {self.samples}")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                "evaluations: several samples of a prompt need temperature > 0; greedy ones are equal"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """How the models are trained."""

    engine: str = "auto"
    """`auto` (deepspeed where installed, else torch), an installed engine's name, or `module:Class`."""
    ranks: int = 1
    """Data-parallel ranks of the policy, and of the critic."""
    prompts_per_step: int = 32
    minibatches: int = 1
    """Optimizer steps per pass over the samples of a step."""
    epochs: int = 1
    """Passes over the samples of a step."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    critic_warmup_steps: int = 0
    """Steps at the start in which only the critic is trained."""
    max_tokens_per_micro_batch: int = 16384
    gradient_checkpointing: bool = False
    packing: bool = True
    """Run rows unpadded, and prompts that rows share once, where the model allows it."""
    average_decay: float | None = None
    """Keep an exponential moving average of the policy's weights with this decay; written to `model-average/`."""
    sequence_parallel_size: int = 1
    """Consecutive ranks of policy and critic that share their rows, each with a slice of the tokens."""
    routing_replay: bool = False
    """Mixture-of-experts policies: the update runs tokens through the experts that scoring them chose."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chosen engine (for deepspeed: stage, offload_optimizer, ...)."""

    def __post_init__(self) -> None:
        for name in ("ranks", "prompts_per_step", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSection:
    """Where the workers run."""

    executor: Literal["auto", "local", "ray"] = "auto"
    """`local`: all in this process; `ray`: an actor per worker; `auto`: ray where installed."""
    ray_address: str | None = None
    """An existing cluster (`auto` finds one on this host); null starts a local one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: float = 0.25
    """CPU cores reserved per worker. Workers mostly take turns, so a share of a core is enough on a CPU box."""
    gpus_per_worker: float = 1.0
    """GPUs reserved per worker (on cuda)."""
    max_restarts: int = 3
    """Rollout engines that are replaced in a run after they died."""
    timeout_s: float = 900.0
    """Deadline of every wait on workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    model: ModelSection
    data: DataSection
    reward: RewardSection = field(default_factory=RewardSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    train: TrainSection = field(default_factory=TrainSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    weight_sync: SyncOptions = field(default_factory=SyncOptions)
    output_dir: str = "runs/rlhf"
    steps: int = 100
    seed: int = 0
    evaluations: Mapping[str, EvaluationSection] = field(default_factory=dict)
    """Further sets of held-out prompts, by name."""
    eval_every: int = 0
    """Steps between evaluations; 0 means at the start and at the end."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 means one at the end."""
    keep_checkpoints: int = 2
    """The newest that are kept."""
    keep_best: str | None = None
    """Metric (`reward`, `eval/held-out/reward`, ...) by which one more checkpoint is kept: the best so far."""
    best_is: Literal["max", "min"] = "max"
    checkpoint_in_background: bool = False
    """Write checkpoints while training goes on, from a copy in host memory, if the engine can (deepspeed can)."""
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        self.reward.all_parts(environment=self.rollout.agent is not None)
        samples = self.train.prompts_per_step * self.rollout.samples_per_prompt
        if samples < self.train.minibatches * self.train.ranks:
            raise ConfigError(
                f"{samples} samples per step (train.prompts_per_step x rollout.samples_per_prompt) cannot be cut "
                f"into {self.train.minibatches} minibatches for {self.train.ranks} ranks; every rank needs a sample"
            )
        if self.algorithm.name == "grpo" and self.rollout.samples_per_prompt < 2:
            raise ConfigError(
                "GRPO compares samples of one prompt: rollout.samples_per_prompt must be at least 2, got 1"
            )
        self._check_overlap()
        self._check_best()
        _ = self.adapter_rank  # refuses what does not go together
        self.rollout.check_room(self.max_model_len_needed)

    def _check_overlap(self) -> None:
        overlap = self.rollout.overlap
        if overlap is not None and overlap.off_policy_correction and self.rollout.sampling.meaning.restricted:
            raise ConfigError(
                "rollout.overlap: importance weights compare the sampler's log-probs with the trainer's, which "
                "knows no top_p, top_k, min_p or min_tokens; leave them out of rollout.sampling, or set "
                "rollout.overlap.off_policy_correction=false"
            )

    def _check_best(self) -> None:
        if self.keep_best is None or not self.keep_best.startswith("eval/"):
            return
        sets = {*self.evaluations, *(["held-out"] if self.data.eval_rows else [])}
        name = self.keep_best.removeprefix("eval/").rpartition("/")[0]
        if name not in sets:
            raise ConfigError(
                f"keep_best={self.keep_best!r} names the set {name!r}; there is {', '.join(sorted(sets)) or 'none'}"
            )

    @property
    def recipe(self) -> GRPO | PPO:
        """The algorithm; where samples may be stale and it names no correction for that, with one."""
        recipe, overlap = self.algorithm.recipe, self.rollout.overlap
        if overlap is None or not overlap.off_policy_correction or recipe.off_policy:
            return recipe
        return replace(recipe, off_policy=(OffPolicyCorrection(),))

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters that travel alone; 0 where whole weights do."""
        if self.weight_sync.adapters != "adapter":
            return 0
        if self.model.lora is None:
            raise ConfigError(
                "weight_sync.adapters=adapter sends the policy's adapters, but model.lora is not set; write e.g. "
                "model.lora.rank=16, or leave weight_sync.adapters out"
            )
        return self.model.lora.rank

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample or episode: what a rollout engine has room for."""
        return self.rollout.max_model_len or self.max_model_len_needed

    @property
    def max_model_len_needed(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
