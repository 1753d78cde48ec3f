"""The reward of a run: checked before anything is started, put together when the reward models are up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from rlhf_core import Closable, ConfigError, DataError, RewardFunction, Score, Trajectory, check_model_path
from rlhf_rollout import (
    CombinedReward,
    EngineRewardConfig,
    FailureHandling,
    RewardPart,
    RobustReward,
    unreachable,
)

from rlhf_launch.config.placement import REWARD
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.reward_scale import RewardScales
from rlhf_launch.workers.train_group import TrainGroup

_WITH_EPISODES = frozenset({"turns", "earned", "environment"})
"""Columns that the agent loop adds to those of the data."""


@dataclass(frozen=True, slots=True)
class Rewarder:
    """A reward together with the tokenizer that gives it the text of the responses."""

    reward: RewardFunction
    tokenizer: Any

    def decode(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """The text of each response, without special tokens."""
        # Arrays are spared the tokenizer's look at every number.
        responses = [np.asarray(trajectory.response_token_ids) for trajectory in trajectories]
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)


class Unscored:
    """In the place of a reward, where the algorithm reads no scores: every score is 0."""

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> Sequence[Score]:
        """See RewardFunction."""
        return [Score(value=0.0) for _ in trajectories]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedReward:
    """The parts of a reward, of which those without an engine of their own are made and ready."""

    parts: Mapping[str, RewardPart]
    ready: Mapping[str, RewardFunction]
    tokenizers: Mapping[str, Any]
    """The reward models' own, by part; None where a model's directory has none."""
    needed: Mapping[str, frozenset[str]]
    """Columns of the data that each part needs."""
    on_failure: FailureHandling
    combined: bool
    """False for a lone short form, whose components keep their names."""

    def check_columns(
        self,
        prompts: Sequence[Prompt],
        source: str,
        *,
        environment: bool,
        places: Mapping[str, str] | None = None,
    ) -> None:
        """Refuse data without a column that a part needs.

        Args:
            prompts: with their columns.
            source: where they come from, for messages.
            environment: whether an agent loop adds columns of its own.
            places: where each prompt stands, by its id; None where the id is the row of `source`, counted from 0.

        Raises:
            DataError: names the part, the row and the columns that are there.
        """
        given = frozenset({"prompt"}) | (_WITH_EPISODES if environment else frozenset())
        for name, columns in self.needed.items():
            for prompt in prompts:
                if missing := columns - given - set(prompt.metadata):
                    there = ", ".join(sorted({"prompt", *prompt.metadata}))
                    place = places[prompt.prompt_id] if places else f"{source} row {int(prompt.prompt_id) + 1}"
                    raise DataError(
                        f"{place}: the reward {name!r} needs the column "
                        f"{min(missing)!r}; found {there}. Add it, or say which column it is "
                        "(columns beside the path in data.train, or the part's own setting)"
                    )

    @property
    def summary(self) -> str:
        """A line that names the parts with their kinds and weights."""
        return (
            "none"
            if not self.parts
            else " + ".join(f"{part.weight:g} * {name} ({part.kind})" for name, part in self.parts.items())
        )

    def close(self) -> None:
        """End what the ready parts have started."""
        for reward in self.ready.values():
            if isinstance(reward, Closable):
                reward.close()


def check_reward(
    section: RewardSection, tokenizer: Any, *, environment: bool, trust_remote_code: bool = False
) -> CheckedReward:
    """Make every part that needs no engine, and check the others' models.

    Args:
        section: what the configuration says; without any part every score will be 0.
        tokenizer: the policy's.
        environment: whether there are episodes in an environment.
        trust_remote_code: whether a model's directory may bring code for its tokenizer.

    Raises:
        ConfigError: a key that is not set, a server that cannot be reached, a model that is not there or has
            another vocabulary.
        PluginError: a function that cannot be imported or called, or a missing extra.
    """
    parts = section.all_parts(environment=environment) if section.given or environment else {}
    ready: dict[str, RewardFunction] = {}
    tokenizers: dict[str, Any] = {}
    needed: dict[str, frozenset[str]] = {}
    with ExitStack() as undo:
        for name, part in parts.items():
            if isinstance(part, EngineRewardConfig):
                check_model_path(part.path, what=f"reward {name!r}")
                own = _load_tokenizer(name, part, trust_remote_code=trust_remote_code)
                _check_vocabulary(name, part, tokenizer, own)
                part.check(own, name=name)
                if part.compares_samples and (part.on_failure or section.on_failure).then == "drop":
                    raise ConfigError(
                        f"reward {name!r} compares the samples of a prompt, and on_failure.then=drop would score "
                        f"them among fewer; write reward.parts.{name}.on_failure: {{then: stop}}"
                    )
                tokenizers[name], needed[name] = own, part.columns
                continue
            if part.servers:
                _check_servers(name, part.servers)
            ready[name], needed[name] = part.make(name)
            if isinstance(made := ready[name], Closable):
                undo.callback(made.close)
        undo.pop_all()
    return CheckedReward(
        parts=parts,
        ready=ready,
        tokenizers=tokenizers,
        needed=needed,
        on_failure=section.on_failure,
        combined=bool(section.parts) or len(parts) > 1,
    )


def open_reward(
    checked: CheckedReward, groups: Mapping[str, TrainGroup], tokenizer: Any, scales: RewardScales | None = None
) -> tuple[RewardFunction, Callable[[], None]]:
    """Put the reward together; returns it with the function that closes it.

    Args:
        checked: the parts.
        groups: the ranks of the reward models, by `reward <part>`.
        tokenizer: the policy's.
        scales: normalise parts; without them scores are what they are.
    """
    scales = scales or RewardScales()
    rewards: dict[str, RewardFunction] = {}
    for name, part in checked.parts.items():
        if isinstance(part, EngineRewardConfig):
            its_own = checked.tokenizers[name]
            reward = part.make(groups[f"{REWARD}{name}"], name=name, tokenizer=its_own, policy_tokenizer=tokenizer)
        else:
            reward = checked.ready[name]
        robust = RobustReward(reward, part.on_failure or checked.on_failure, name=name)
        rewards[name] = scales.of(name, robust)
    if not rewards:
        return Unscored(), lambda: None
    if not checked.combined:
        (alone,) = rewards.values()
        return alone, alone.close  # type: ignore[attr-defined]
    combined = CombinedReward(rewards, {name: part.weight for name, part in checked.parts.items()})
    return combined, combined.close


def _check_servers(name: str, urls: Sequence[str]) -> None:
    lost = unreachable(urls)
    if len(lost) == len(set(urls)):
        url, reason = next(iter(lost.items()))
        raise ConfigError(f"reward {name!r}: no server answers at {url} ({reason}); start it, or mend the address")


def _load_tokenizer(name: str, part: EngineRewardConfig, *, trust_remote_code: bool) -> Any:
    """The model's own tokenizer; a reward model on the policy's tokens can do without."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(part.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if part.reads_policy_tokens:
            return None
        raise ConfigError(f"reward {name!r}: no tokenizer can be loaded from {part.path!r}: {error}") from error


def _check_vocabulary(name: str, part: EngineRewardConfig, ours: Any, theirs: Any) -> None:
    """Refuse a reward model of another vocabulary: it reads the policy's tokens (a step model is given text)."""
    if not part.reads_policy_tokens or theirs is None:
        return
    probe = "The answer is 42: 6 * 7.\n"
    mine, its = (tokenizer(probe, add_special_tokens=False)["input_ids"] for tokenizer in (ours, theirs))
    if mine != its:
        raise ConfigError(
            f"reward {name!r}: {part.path!r} has another vocabulary than the policy, whose tokens it would read; "
            "use a reward model of the policy's family, or serve it and use kind: http"
        )
