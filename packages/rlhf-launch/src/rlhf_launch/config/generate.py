"""The configuration of `rlhf generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rlhf_algos import DataSection, LengthSection, ModelSection, TrainSection, to_plain
from rlhf_core import ConfigError

from rlhf_launch.config.curriculum import OnlineDataSection
from rlhf_launch.config.placement import REWARD, OnlinePlacementSection, shared_roles
from rlhf_launch.config.renamed import RENAMED
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.rollout import RolloutSection
from rlhf_launch.config.run import OnlineConfig, OnlineTrainSection, check_room, max_length


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What `rlhf generate` reads. A file for `rlhf train` will do: what generation does not need is left out."""

    renamed_keys: ClassVar[Mapping[str, str]] = RENAMED

    model: ModelSection
    data: DataSection
    output: Path
    """JSONL file to write, or to complete."""
    reward: RewardSection | None = None
    """Scores the samples, reward models included; without it they are not scored."""
    lengths: LengthSection = field(default_factory=LengthSection)
    rollout: RolloutSection = field(default_factory=lambda: RolloutSection(samples_per_prompt=1))
    train: TrainSection = field(default_factory=TrainSection)
    """Engine and settings of reward models; nothing is trained."""
    placement: OnlinePlacementSection = field(default_factory=lambda: OnlinePlacementSection(executor="local"))
    """Where the engines sit; roles that generation does not have are passed over."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rollout.agent is not None:
            raise ConfigError(
                "rlhf generate writes single responses; leave rollout.agent out (rollout.agent=null), and with it "
                "rewards that come from an environment"
            )
        if not self.rollout.request_seeds:
            raise ConfigError(
                "rlhf generate completes a file that was broken off with the samples that it would have had, which "
                "need their seeds; leave rollout.request_seeds=false out"
            )
        if Path(self.output).is_dir():
            raise ConfigError(f"output={str(self.output)!r} is a directory; give the JSONL file to write")
        check_room(self.lengths, self.rollout)
        if self.reward is not None:
            self.reward.all_parts(environment=False)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return max_length(self.lengths, self.rollout)

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """Sets of roles that sit on the same devices, of those that generation has."""
        parts = {} if self.reward is None else self.reward.engine_parts()
        roles = (*(REWARD + name for name in parts), "rollout")
        return shared_roles(self.placement, roles, others_alone=True)

    def settings(self) -> dict[str, Any]:
        """What decides the content of the output."""
        return {
            "model": self.model.path,
            "dtype": self.model.dtype,
            "prompts": to_plain(self.data.train),
            "chat": self.data.chat,
            "system_prompt": self.data.system_prompt,
            "prompt_template": self.data.prompt_template,
            "backend": self.rollout.backend,
            "samples_per_prompt": self.rollout.samples_per_prompt,
            "reward": to_plain(self.reward.all_parts(environment=False)) if self.reward else None,
            "seed": self.seed,
            **{f"sampling.{name}": value for name, value in asdict(self.rollout.sampling).items()},
        }


def ignored_by_generation() -> frozenset[str]:
    """Dotted keys of a training configuration that generation passes over."""
    groups = _names(OnlineConfig) - _names(GenerateConfig)
    train = _names(OnlineTrainSection) - _names(TrainSection)
    data = _names(OnlineDataSection) - _names(DataSection)
    return frozenset(groups | {f"train.{name}" for name in train} | {f"data.{name}" for name in data})


def _names(section: type) -> set[str]:
    return {item.name for item in fields(section)}  # type: ignore[arg-type]
