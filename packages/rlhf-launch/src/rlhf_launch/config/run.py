"""The configuration of an online run: what `rlhf train CONFIG` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlhf_algos import (
    LORA_RATE_FACTOR,
    CheckpointSection,
    DataSource,
    EvaluationSection,
    LearnsFromPairs,
    LearnsFromTeacher,
    LengthSection,
    ModelSection,
    OffPolicyCorrection,
    OptimizerSection,
    Recipe,
    TrainSection,
    make_recipe,
    to_plain,
)
from rlhf_core import ConfigError

from rlhf_launch.config.bundles import BundleSection
from rlhf_launch.config.data import OnlineDataSection, check_pretraining
from rlhf_launch.config.placement import (
    REWARD,
    TEACHER,
    EnginePlacement,
    OnlinePlacementSection,
    is_training,
    shared_roles,
)
from rlhf_launch.config.renamed import RENAMED
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.rollout import RolloutSection
from rlhf_launch.config.signals import check_signals
from rlhf_launch.config.weight_sync import WeightSyncSection

POLICY_RATE = 1e-6
"""TRL's GRPOConfig and OpenRLHF's actor."""
CRITIC_RATE = 9e-6
"""OpenRLHF's critic (its paper, table of hyper-parameters)."""
MAX_PROMPT_TOKENS = 1024
MAX_EPISODE_TOKENS = 4096
_PROCESSING = "top_p, top_k, min_p, min_tokens, penalties or json_schema"
"""What makes the distribution that is sampled another one than the trained one."""
HELD_OUT = "held-out"
"""Name of the set that `data.hold_out` and `evaluation.data` make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmSection:
    """Which online algorithm, and beside its name the fields that differ from it (`{name: dapo, kl_coef:
    0.01}`)."""

    short_form: ClassVar[str] = "name"

    name: str = "grpo"
    """A name of docs/algorithms.md (grpo, ppo, dapo, rloo, remax, ...), or `module:Class` of your own `Recipe`."""
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Fields of the recipe that differ from the named one's. In a file they stand beside `name`."""
    recipe: Recipe = field(init=False)
    """The algorithm itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", make_recipe(self.name, self.options))

    @classmethod
    def from_keys(cls, data: Mapping[str, Any], *, source: str, prefix: str) -> AlgorithmSection:
        """The section from keys of a file, the recipe's fields beside `name`."""
        options = dict(data)
        name = options.pop("name", "grpo")
        if not isinstance(name, str):
            raise ConfigError(f"{source}: {prefix}name must be text, found {name!r}")
        try:
            return cls(name=name, options=options)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    def to_keys(self) -> dict[str, Any]:
        """The section as keys of a file: every field of the recipe."""
        return {"name": self.name} | to_plain(self.recipe)

    @property
    def settings(self) -> Any:
        """What holds the keys beside `name`."""
        return self.recipe

    @property
    def min_samples_per_prompt(self) -> int:
        """Fewer samples of a prompt give the algorithm nothing to compare."""
        return self.recipe.min_samples_per_prompt


ScoreBeforeUpdate = Literal["auto", "always"]
"""Whether the policy runs over its samples before it is trained on them, for the log-probs that ratios start
from. `auto`: not where these are those of the update itself: one optimizer step per batch of samples, in an
algorithm that needs them no earlier, without routing replay and dropout in adapters. `always`: in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineTrainSection(TrainSection):
    """How policy and critic are trained on the samples of each step."""

    steps: int = 100
    """Steps of the loop: sample, score, update, send the weights."""
    prompts_per_step: int = 32
    epochs_per_step: int = 1
    """Passes over the samples of a step."""
    minibatches: int = 1
    """Optimizer steps per pass over the samples of a step."""
    critic_optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    critic_warmup_steps: int = 0
    """Steps at the start in which only the critic is trained."""
    pretrain_rows: int | None = None
    """Rows of `data.pretrain` in each optimizer step of the policy; null for as many as it has samples."""
    score_before_update: ScoreBeforeUpdate = "auto"
    """See `ScoreBeforeUpdate`."""
    routing_replay: bool = False
    """Mixture-of-experts policies: the update runs tokens through the experts that scoring them chose."""

    def __post_init__(self) -> None:
        TrainSection.__post_init__(self)
        for name in ("steps", "prompts_per_step", "minibatches", "epochs_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.critic_warmup_steps < self.steps:
            raise ConfigError(
                f"train.critic_warmup_steps={self.critic_warmup_steps} must lie between 0 and train.steps="
                f"{self.steps}, which leaves the policy a step to train"
            )

    def updates(self, steps: int) -> int:
        """Optimizer steps in this many steps of the loop."""
        return steps * self.epochs_per_step * self.minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """One set of held-out prompts with its own sampling."""

    short_form: ClassVar[str] = "data"

    data: tuple[DataSource, ...]
    """As in `data.train`."""
    samples: int = 1
    """Per prompt; from 2 on, pass@k is reported for k = 1, 2, 4, ... up to it."""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None
    """Longest response; the training's if not given."""
    pass_score: float = 0.5
    """A sample passes with a score above this."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("evaluation.sets: data is empty; give a file or hub name")
        if self.samples < 1:
            raise ConfigError(f"evaluation.sets: samples must be at least 1, got {self.samples}")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                "evaluation.sets: several samples of a prompt need temperature > 0; greedy ones are equal"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineEvaluationSection(EvaluationSection):
    """Evaluation on held-out prompts. Those of `evaluation.data` and `data.hold_out` are the set `held-out`,
    sampled greedily; further sets have names and sampling of their own. `best_metric`: `reward`, `reward/<part>` or
    `eval/<set>/<metric>`."""

    sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    """Further sets of held-out prompts, by name."""

    def __post_init__(self) -> None:
        EvaluationSection.__post_init__(self)
        for name in self.sets:
            if not name or "/" in name or name == HELD_OUT:
                raise ConfigError(f"evaluation.sets: {name!r} is no name for a set; take another one without '/'")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """A run of `rlhf train`."""

    renamed_keys: ClassVar[Mapping[str, str]] = RENAMED

    model: ModelSection
    data: OnlineDataSection
    reward: RewardSection = field(default_factory=RewardSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    lengths: LengthSection = field(default_factory=LengthSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    train: OnlineTrainSection = field(default_factory=OnlineTrainSection)
    evaluation: OnlineEvaluationSection = field(default_factory=OnlineEvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    bundles: BundleSection = field(default_factory=BundleSection)
    placement: OnlinePlacementSection = field(default_factory=OnlinePlacementSection)
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    output: Path = Path("runs/rlhf")
    """Gets `model/` (a Transformers directory), `metrics.jsonl`, `samples.jsonl` (what became of every prompt),
    `config.yaml`, `plot.png` and `checkpoints/`."""
    seed: int = 0
    """Seed of everything."""
    tensorboard: bool = True
    """Write TensorBoard files beside `metrics.jsonl`."""

    def __post_init__(self) -> None:
        factor = LORA_RATE_FACTOR if self.model.lora is not None else 1
        train = replace(
            self.train,
            optimizer=self.train.optimizer.with_default_rate(POLICY_RATE * factor),
            critic_optimizer=self.train.critic_optimizer.with_default_rate(CRITIC_RATE * factor),
        )
        object.__setattr__(self, "train", train)
        if self.is_scored or self.needs_scores:
            self.reward.all_parts(environment=self.rollout.agent is not None)
        check_signals(self)
        self._check_samples()
        self._check_models()
        self._check_overlap()
        self._check_best()
        self._check_roles()
        _ = self.adapter_rank  # refuses what does not go together
        check_room(self.lengths, self.rollout)

    def _check_samples(self) -> None:
        train, rollout = self.train, self.rollout
        samples = train.prompts_per_step * rollout.samples_per_prompt
        if samples < train.minibatches * train.ranks:
            raise ConfigError(
                f"{samples} samples per step (train.prompts_per_step x rollout.samples_per_prompt) cannot be cut "
                f"into {train.minibatches} minibatches for {train.ranks} ranks; every rank needs a sample"
            )
        least = self.algorithm.min_samples_per_prompt
        if rollout.samples_per_prompt < least:
            raise ConfigError(
                f"algorithm {self.algorithm.name!r} compares samples of one prompt: rollout.samples_per_prompt "
                "must "
                f"be at least {least}, got {rollout.samples_per_prompt}"
            )
        if rollout.sampling.temperature == 0 and rollout.samples_per_prompt > 1:
            raise ConfigError(
                "rollout.sampling.temperature=0 makes all samples of a prompt equal, so there is nothing to learn "
                "from; write a positive temperature"
            )

    def _check_models(self) -> None:
        recipe = self.algorithm.recipe
        check_pretraining(
            self.data,
            recipe,
            self.algorithm.name,
            temperature=self.rollout.sampling.temperature,
            rows=self.train.pretrain_rows,
        )
        if self.model.critic is not None and not recipe.needs_critic:
            raise ConfigError(
                f"model.critic is set, but algorithm {self.algorithm.name!r} has no critic; leave it out"
            )
        if self.train.critic_warmup_steps and not recipe.needs_critic:
            raise ConfigError(
                f"train.critic_warmup_steps is set, but algorithm {self.algorithm.name!r} has no critic; leave it "
                "out"
            )
        if self.model.reference is not None and not recipe.needs_reference:
            raise ConfigError(
                f"model.reference is set, but algorithm {self.algorithm.name!r} measures no KL against it; write "
                "algorithm.kl_coef (or algorithm.track_kl: true), or leave it out"
            )

    def _check_overlap(self) -> None:
        overlap = self.rollout.overlap
        if overlap is None and self.weight_sync.keep_kv_cache:
            raise ConfigError(
                "weight_sync.keep_kv_cache=true is about samples that run on across a sync, and without "
                "rollout.overlap there are none; write e.g. rollout.overlap.max_staleness=1, or leave it out"
            )
        beside = {role for members in self.shared if "rollout" in members for role in members}
        if overlap is not None and (others := [role for role in beside if is_training(role)]):
            raise ConfigError(
                f"rollout.overlap lets generation go on while the others work, but {min(others)} takes turns with "
                "it on the same devices (placement.*.colocate_with); leave rollout.overlap out, or give the "
                "rollout engines devices of their own"
            )
        if "log_probs" not in self.algorithm.recipe.old_outputs and not self.learns_from_pairs:
            self._check_sampler_stands_in()
        if overlap is not None and overlap.off_policy_correction and not self.rollout.sampling.meaning.plain:
            raise ConfigError(
                "rollout.overlap: importance weights compare the sampler's log-probs with the trainer's, which "
                f"knows no {_PROCESSING}; leave them out of rollout.sampling, or set "
                "rollout.overlap.off_policy_correction=false"
            )

    def _check_sampler_stands_in(self) -> None:
        """Refuse settings under which the sampler's log-probs cannot stand in for the trainer's."""
        what = f"algorithm {self.algorithm.name!r} starts its ratios from the sampler's log-probs (old_log_probs)"
        if not self.rollout.sampling.meaning.plain:
            raise ConfigError(
                f"{what}, but with {_PROCESSING} they are of another distribution than the "
                "trained one; leave these out of rollout.sampling, or write algorithm.old_log_probs: trainer"
            )
        if self.train.routing_replay:
            raise ConfigError(
                f"{what}, while train.routing_replay takes the experts from scoring the samples again; write "
                "algorithm.old_log_probs: trainer, or leave routing_replay out"
            )

    def _check_best(self) -> None:
        metric = self.evaluation.best_metric
        if metric is None:
            return
        sets = [*self.evaluation.sets, *([HELD_OUT] if self.data.hold_out or self.evaluation.data else [])]
        if metric.startswith("eval/") and (name := metric.removeprefix("eval/").partition("/")[0]) not in sets:
            there = ", ".join(sorted(sets)) or "none; give evaluation.data, evaluation.sets or data.hold_out"
            raise ConfigError(f"evaluation.best_metric={metric!r} names the set {name!r}; there is {there}")

    def _check_roles(self) -> None:
        """Refuse a placement of roles that the run does not have, or that sit with such."""
        parts = self.reward.engine_parts()
        if unknown := [name for name in self.placement.reward if name not in parts]:
            there = ", ".join(parts) or "none"
            raise ConfigError(
                f"placement.reward.{unknown[0]}: the reward has no part of this name with a model of its own; "
                f"there are: {there}"
            )
        if unknown := [name for name in self.placement.teachers if name not in self.model.teachers]:
            there = ", ".join(self.model.teachers) or "none"
            raise ConfigError(
                f"placement.teachers.{unknown[0]}: model.teachers has no teacher of this name; there are: {there}"
            )
        for name in ("critic", "reference", "teacher"):
            if name not in self.roles and self.placement.of(name) != EnginePlacement():
                why = f"algorithm {self.algorithm.name!r} has no {name}; leave it out"
                if name == "reference" and self.reference_is_policy:
                    why = "the reference is the policy with its adapters off; leave it out, or set model.reference"
                if name == "teacher" and self.model.teachers:
                    why = "there are several; write placement.teachers.<name>"
                raise ConfigError(f"placement.{name} is set, but {why}")
        _ = self.shared  # refuses what does not go together

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have workers: `policy`, `critic`, `reference`, `teacher` or `teacher <name>`, `reward
        <part>`, `rollout`."""
        recipe = self.algorithm.recipe
        roles = ["policy"]
        if recipe.needs_critic:
            roles.append("critic")
        if recipe.needs_reference and not self.reference_is_policy:
            roles.append("reference")
        if self.needs_teacher:
            roles += [TEACHER + name for name in self.model.teachers] or ["teacher"]
        return (*roles, *(REWARD + name for name in self.reward.engine_parts()), "rollout")

    @property
    def learns_from_pairs(self) -> bool:
        """Whether the algorithm trains on the best and the worst sample of each prompt."""
        recipe = self.algorithm.recipe
        return isinstance(recipe, LearnsFromPairs) and recipe.learns_from_pairs

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads what a teacher says of the samples."""
        recipe = self.algorithm.recipe
        return isinstance(recipe, LearnsFromTeacher) and recipe.needs_teacher

    @property
    def needs_scores(self) -> bool:
        """Whether the algorithm reads the scores of the task."""
        recipe = self.algorithm.recipe
        return not isinstance(recipe, LearnsFromTeacher) or recipe.needs_scores

    @property
    def is_scored(self) -> bool:
        """Whether there is a reward, or an environment, which gives one."""
        return self.reward.given or self.rollout.agent is not None

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy with its adapters off, and so has no workers."""
        recipe = self.algorithm.recipe
        return recipe.needs_reference and self.model.lora is not None and self.model.reference is None

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """Sets of roles that sit on the same devices, as the configuration says."""
        return shared_roles(self.placement, self.roles)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal here and surely unwanted."""
        found = []
        if self.rollout.sampling.temperature == 0:
            found.append(
                "rollout.sampling.temperature=0: the policy never tries anything but its likeliest answer, so it "
                "can "
                "hardly find a better one"
            )
        if self.train.optimizer.learning_rate == 0:
            found.append("train.optimizer.learning_rate=0: nothing is learnt")
        return tuple(found)

    @property
    def recipe(self) -> Recipe:
        """The algorithm; where samples may be stale and it names no correction for that, with one."""
        recipe, overlap = self.algorithm.recipe, self.rollout.overlap
        # Ratios that start from the sampler's log-probs need no weights beside them.
        corrected = getattr(recipe, "off_policy", True) or "log_probs" not in recipe.old_outputs
        if overlap is None or not overlap.off_policy_correction or corrected:
            return recipe
        return replace(recipe, off_policy=(OffPolicyCorrection(),))  # type: ignore[type-var]

    @property
    def scores_always(self) -> bool:
        """Whether the policy scores its samples before every update, also where the update's own would do.

        Experts are chosen by the scoring pass, and dropout makes the update's log-probs other than the policy's.
        """
        lora, train = self.model.lora, self.train
        dropout = lora is not None and lora.dropout > 0
        return train.score_before_update == "always" or train.routing_replay or dropout

    @property
    def request_seed(self) -> int | None:
        """What the seeds of requests follow from; None if they have none."""
        return self.seed if self.rollout.request_seeds else None

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
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max_prompt_tokens(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample, or of the longest episode."""
        return max_length(self.lengths, self.rollout)


def max_prompt_tokens(lengths: LengthSection) -> int:
    """Tokens of the longest prompt of an online run or of generation."""
    return MAX_PROMPT_TOKENS if lengths.max_prompt_tokens is None else lengths.max_prompt_tokens


def max_length(lengths: LengthSection, rollout: RolloutSection) -> int:
    """Tokens of the longest sample, prompt included, or of the longest episode."""
    if lengths.max_length is not None:
        return lengths.max_length
    if rollout.agent is not None:
        return MAX_EPISODE_TOKENS
    return max_prompt_tokens(lengths) + rollout.sampling.max_tokens


def check_room(lengths: LengthSection, rollout: RolloutSection) -> None:
    """Refuse a `lengths.max_length` in which the longest sample has no room.

    Raises:
        ConfigError: it is given and too small.
    """
    needed = max_prompt_tokens(lengths) + rollout.sampling.max_tokens
    if rollout.agent is None and lengths.max_length is not None and lengths.max_length < needed:
        raise ConfigError(
            f"lengths.max_length={lengths.max_length} is less than the {needed} tokens of the longest sample "
            "(lengths.max_prompt_tokens + rollout.sampling.max_tokens); raise it, or leave it out"
        )
