"""The configurations of a round's parts, from that of all rounds: each part is a command of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_algos import (
    DataSection,
    DataSource,
    LengthSection,
    ModelSection,
    OfflineConfig,
    OfflineEvaluationSection,
    PlacementSection,
    TrainSection,
)

from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.config.run import max_length, max_prompt_tokens
from rlhf_launch.evaluation.run import EvalConfig
from rlhf_launch.named_models import FoundModel
from rlhf_launch.rounds.config import RoundsConfig
from rlhf_launch.seeds import request_seed

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFolder:
    """Where the parts of a round are."""

    path: Path

    @classmethod
    def of(cls, output: Path, number: int) -> RoundFolder:
        """That of a round; 0 is the first model before all rounds."""
        return cls(path=output / f"round-{number:02}")

    @property
    def samples(self) -> Path:
        """What was generated."""
        return self.path / "samples.jsonl"

    @property
    def scored(self) -> Path:
        """The same with scores, where they are given after generation."""
        return self.path / "scored.jsonl"

    @property
    def chosen(self) -> Path:
        """What is trained on."""
        return self.path / "chosen.jsonl"

    @property
    def training(self) -> Path:
        """The run of the offline method."""
        return self.path / "train"

    @property
    def merged(self) -> Path:
        """Adapters merged into their base."""
        return self.path / "merged"

    @property
    def evaluation(self) -> Path:
        """Results on held-out prompts."""
        return self.path / "evaluation"

    @property
    def manifest(self) -> Path:
        """Written last: the round is complete."""
        return self.path / "round.json"


def generation_config(config: RoundsConfig, number: int, *, model: str, folder: RoundFolder) -> GenerateConfig:
    """How the samples of a round are generated, by the model that it starts from."""
    own = config.of_round(number)
    return _generation(
        own,
        model,
        data=_asked(own.data, config, number - 1),
        output=folder.samples,
        scored=own.scoring == "along",
        lengths=_longer(own.lengths, config, number - 1),
        seed=request_seed(config.seed, f"round {number} generate"),
    )


def scoring_config(config: RoundsConfig, number: int, *, model: str, folder: RoundFolder) -> GenerateConfig:
    """How the samples of a round get their scores after they are there."""
    own = config.of_round(number)
    data = replace(own.data, train=(DataSource(path=str(folder.samples)),))
    return _generation(
        own, model, data=data, output=folder.scored, scored=True, lengths=own.lengths, seed=config.seed
    )


def training_config(
    config: RoundsConfig, number: int, *, model: str, first: str, folder: RoundFolder
) -> OfflineConfig:
    """How a round trains on what was chosen.

    Args:
        config: that of all rounds.
        number: the round, counted from 1.
        model: what the round starts from.
        first: what the first round started from.
        folder: the round's.
    """
    own = config.of_round(number)
    longest = max_length(own.lengths, own.rollout) + _condition_tokens(config, number)
    return OfflineConfig(
        model=replace(own.model, path=model, reference=first if own.reference == "first" else None),
        data=replace(own.data, train=(DataSource(path=str(folder.chosen)),)),
        output=folder.training,
        algorithm=own.algorithm,
        lengths=own.lengths if own.lengths.max_length is not None else replace(own.lengths, max_length=longest),
        train=own.train,
        evaluation=OfflineEvaluationSection(),
        checkpoint=config.checkpoint,
        placement=_section(PlacementSection, config.placement),
        reference_cache=folder.path / "references",
        seed=request_seed(config.seed, f"round {number} train"),
        tensorboard=config.tensorboard,
    )


def evaluation_config(config: RoundsConfig, number: int, *, model: str, folder: RoundFolder) -> EvalConfig:
    """How the model after a round is evaluated; round 0 is the first model."""
    own, wanted = config.of_round(max(1, number)), config.evaluation
    sampling = own.rollout.sampling
    temperature = (0.0 if wanted.samples == 1 else None) if wanted.temperature is None else wanted.temperature
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    data = replace(_asked(own.data, config, number), train=wanted.data)
    generation = replace(
        _generation(
            own,
            model,
            data=data,
            output=folder.evaluation / "samples.jsonl",
            scored=True,
            lengths=_longer(own.lengths, config, number),
            seed=config.seed,
        ),
        rollout=replace(own.rollout, samples_per_prompt=wanted.samples, sampling=sampling),
    )
    return EvalConfig(
        models=[FoundModel(name=folder.path.name, path=model)],
        generation=generation,
        output=folder.evaluation,
        ks=wanted.ks,
        pass_score=wanted.pass_score,
    )


def _generation(
    own: RoundsConfig,
    model: str,
    *,
    data: DataSection,
    output: Path,
    scored: bool,
    lengths: LengthSection,
    seed: int,
) -> GenerateConfig:
    return GenerateConfig(
        model=_whole(own.model, model),
        data=data,
        output=output,
        reward=own.reward if scored else None,
        lengths=lengths,
        rollout=own.rollout,
        train=_section(TrainSection, own.train),
        placement=own.placement,
        seed=seed,
    )


def _whole(section: ModelSection, model: str) -> ModelSection:
    """The model as it is, without adapters to train."""
    return replace(section, path=model, lora=None)


def _section(kind: type[Section], own: Any) -> Section:
    """The part of a section that a command reads which has fewer keys."""
    return kind(**{item.name: getattr(own, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def _asked(data: DataSection, config: RoundsConfig, after: int) -> DataSection:
    """The data with prompts that ask a model after so many rounds for the highest level that it knows."""
    rule = config.asking(after)
    if rule is None:
        return data
    template = rule.highest if data.prompt_template is None else data.prompt_template.replace("{}", rule.highest)
    return replace(data, prompt_template=template)


def _longer(lengths: LengthSection, config: RoundsConfig, after: int) -> LengthSection:
    """Lengths with room for the condition."""
    more = _condition_tokens(config, after)
    if not more:
        return lengths
    longest = None if lengths.max_length is None else lengths.max_length + more
    return replace(lengths, max_prompt_tokens=max_prompt_tokens(lengths) + more, max_length=longest)


def _condition_tokens(config: RoundsConfig, after: int) -> int:
    """At most so many tokens: no token is shorter than a byte."""
    rule = config.asking(after)
    return 0 if rule is None else len(rule.highest.encode())
