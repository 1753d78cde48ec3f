"""The configuration of `rlhf iterate`: rounds of generation, scores, selection and offline training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_algos import (
    SELECTION_RULES,
    BestOfNConfig,
    CheckpointSection,
    ConditionalConfig,
    DataSection,
    DataSource,
    LengthSection,
    ModelSection,
    OfflineAlgorithmSection,
    OfflineTrainSection,
    SelectionConfig,
    from_mapping,
    to_plain,
)
from rlhf_core import ConfigError

from rlhf_launch.config.placement import OnlinePlacementSection
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.rollout import RolloutSection

_OF_A_ROUND = frozenset({"data", "reward", "rollout", "select", "algorithm", "reference", "lengths", "train"})
"""What a round may have otherwise than the others."""
_KINDS = {"select": "kind", "algorithm": "name"}
"""Groups whose keys depend on one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundEvaluationSection:
    """Evaluation of the first model and of every round's, as `rlhf eval` does it."""

    data: tuple[DataSource, ...] = ()
    """Held-out prompts, as in `data.train`; nothing is evaluated without."""
    samples: int = 1
    """Per prompt."""
    ks: tuple[int, ...] = (1,)
    """The k of pass@k."""
    pass_score: float = 0.5
    """A sample passes with a score above this."""
    temperature: float | None = None
    """Null: 0 (greedy) for one sample per prompt, else that of `rollout.sampling`."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"evaluation.samples must be at least 1, got {self.samples}")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                "evaluation.temperature=0 makes all samples of a prompt equal; write evaluation.samples: 1, or a "
                "positive temperature"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsConfig:
    """What `rlhf iterate` reads: sections of `rlhf generate` and of `rlhf offline`, each with its meaning there."""

    model: ModelSection
    """The model that the first round starts from; each other one starts from the last round's."""
    data: DataSection
    """The prompts, all of them in every round."""
    output: Path
    """Directory: `round-01/`, `round-02/`, ..., and `metrics.jsonl`."""
    reward: RewardSection
    """Scores the samples."""
    rounds: int | tuple[Mapping[str, Any], ...] = 3
    """How many; or a list with what each round has otherwise: keys of data, reward, rollout, select, algorithm,
    reference, lengths and train. `{}` is a round like the others."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """How samples are generated."""
    scoring: Literal["along", "after"] = "along"
    """`along`: samples are scored as they come, reward models sit beside the generator. `after`: the generator is
    closed first, so that reward models have its memory."""
    select: SelectionConfig = field(default_factory=BestOfNConfig)
    """What is trained on: {kind: best_of_n | threshold | quantile | pairs | labels | conditional, and what the kind
    has} (docs/rounds.md)."""
    algorithm: OfflineAlgorithmSection = field(default_factory=lambda: OfflineAlgorithmSection(name="sft"))
    """A method of `rlhf offline`."""
    reference: Literal["round", "first"] = "round"
    """Of a preference loss: the model that the round starts from, or that of the first round."""
    lengths: LengthSection = field(default_factory=LengthSection)
    train: OfflineTrainSection = field(default_factory=OfflineTrainSection)
    """How each round trains; epochs and the course of the learning rate are a round's."""
    evaluation: RoundEvaluationSection = field(default_factory=RoundEvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    placement: OnlinePlacementSection = field(default_factory=lambda: OnlinePlacementSection(executor="local"))
    seed: int = 0
    tensorboard: bool = True
    """Write TensorBoard files of each round's training."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds!r}")
        if self.model.reference is not None or self.model.critic is not None:
            raise ConfigError(
                "model.reference and model.critic have no place here; write reference: round (or first)"
            )
        if self.data.hold_out:
            raise ConfigError("data.hold_out: every prompt is trained on; name held-out prompts in evaluation.data")
        self._check_rule()
        for number in range(1, self.count + 1):
            self.of_round(number)

    def _check_rule(self) -> None:
        name = self.algorithm.name
        known = {method for rule in SELECTION_RULES.values() for method in rule.methods}
        if name in self.select.methods or ":" in name:
            return
        if name not in known:
            raise ConfigError(
                f"algorithm {name!r} cannot train on chosen answers; write {', '.join(sorted(known))}"
            )
        fitting = [kind for kind, rule in SELECTION_RULES.items() if name in rule.methods]
        raise ConfigError(
            f"select.kind={self.select.kind} chooses what {', '.join(self.select.methods)} trains on, and "
            f"algorithm.name is {name!r}; write select.kind: {' or '.join(fitting)}"
        )

    @property
    def count(self) -> int:
        """The number of rounds."""
        return self.rounds if isinstance(self.rounds, int) else len(self.rounds)

    def of_round(self, number: int) -> RoundsConfig:
        """The settings of a round, counted from 1, as those of a run of one round.

        Raises:
            ConfigError: a key that a round cannot have of its own, or a value that no run can have.
        """
        if isinstance(self.rounds, int):
            return replace(self, rounds=1) if self.rounds > 1 else self
        own = self.rounds[number - 1]
        if unknown := sorted(set(own) - _OF_A_ROUND):
            raise ConfigError(
                f"rounds[{number - 1}]: {unknown[0]!r} is the same in all rounds, or no key; a round may have "
                f"{', '.join(sorted(_OF_A_ROUND))}"
            )
        whole = {item.name: getattr(self, item.name) for item in fields(self)} | {"rounds": 1}
        merged = {key: _laid_over(key, to_plain(whole[key]), value) for key, value in own.items()}
        return from_mapping(type(self), whole | merged, source=f"rounds[{number - 1}]")

    def asking(self, number: int) -> ConditionalConfig | None:
        """The condition that a model after so many rounds knows; None if it knows none."""
        if number < 1:
            return None
        rule = self.of_round(number).select
        return rule if isinstance(rule, ConditionalConfig) else None


def _laid_over(key: str, whole: Any, own: Any) -> Any:
    """A group of keys with some of them replaced; anything else is replaced whole."""
    if not isinstance(whole, Mapping) or not isinstance(own, Mapping):
        return own
    kind = _KINDS.get(key)
    if kind is not None and own.get(kind, whole.get(kind)) != whole.get(kind):
        return own
    return {**whole, **{name: _laid_over("", whole.get(name), value) for name, value in own.items()}}
