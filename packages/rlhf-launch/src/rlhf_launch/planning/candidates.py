"""Layouts that a run could have on its GPUs: who sits with whom, how many ranks and engines, and how they train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import yaml

from rlhf_launch.config.placement import REWARD, TEACHER, EnginePlacement, OnlinePlacementSection, key_of
from rlhf_launch.config.run import OnlineConfig

Grouping = Literal["separate", "pairs", "together"]
SAID: Mapping[Grouping, str] = {
    "separate": "GPUs of its own for each role",
    "pairs": "policy and reference, critic and reward in pairs",
    "together": "all roles on the same GPUs",
}
_TOKENS = (4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How engines train, which all roles share."""

    offload: bool
    """Whether the optimizer's state is in host memory."""
    tokens: int | Literal["auto"]
    """Of a micro-batch."""
    checkpointing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout."""

    grouping: Grouping
    ranks: Mapping[str, int]
    """Of every role but the rollout's."""
    engines: int
    tensor_parallel: int
    training: Training

    def same_places(self, other: Candidate) -> bool:
        """Whether workers are as many and sit alike, however they train."""
        return (self.ranks, self.engines, self.tensor_parallel) == (
            other.ranks,
            other.engines,
            other.tensor_parallel,
        )

    @property
    def summary(self) -> str:
        """Numbers of workers, for people."""
        counts = set(self.ranks.values())
        roles = ", ".join(f"{role} {count}" for role, count in self.ranks.items())
        ranks = f"{counts.pop()} ranks each" if self.grouping == "together" and len(counts) == 1 else roles
        ways = f" of {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        how = self.training
        more = [
            *(["optimizer offloaded"] if how.offload else []),
            *(["checkpointing"] if how.checkpointing else []),
            f"micro-batches of {how.tokens}",
        ]
        return f"{SAID[self.grouping]}: {ranks}, {self.engines} engines{ways}; {', '.join(more)}"


def device_sets_of(grouping: Grouping, roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The sets of roles on the same devices, each led by the role that the others sit with."""
    if grouping == "together":
        return [roles]
    if grouping == "separate":
        return [(role,) for role in roles]
    rewards = tuple(role for role in roles if role.startswith(REWARD))
    pairs = [("policy", *(role for role in roles if role in ("reference", "teacher") or role.startswith(TEACHER)))]
    pairs += [("critic", *rewards)] if "critic" in roles else [(role,) for role in rewards]
    return [*pairs, ("rollout",)]


def trainings(config: OnlineConfig, row: int) -> list[Training]:
    """Ways to train, that of the file first.

    Args:
        config: the run.
        row: tokens of its longest row, of which a micro-batch has one at least.
    """
    train = config.train
    offload = bool(train.options.get("offload_optimizer", False))
    written = train.max_tokens_per_micro_batch
    sizes = [] if written == "auto" else [tokens for tokens in _TOKENS if tokens >= row and tokens != written]
    return [
        Training(offload=offloaded, tokens=tokens, checkpointing=checkpointing)
        for offloaded, tokens, checkpointing in product(
            (offload, not offload),
            (written, *sorted(sizes, reverse=True)),
            (train.gradient_checkpointing, not train.gradient_checkpointing),
        )
        if not (offloaded and train.options.get("stage", 3) == 0)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What bounds the numbers of workers."""

    gpus: int
    host_gpus: int
    """Of the smallest host that has any."""
    together: int
    """Ranks that share rows, layers or shards."""
    heads: int
    """Of the policy's attention, which tensor parallelism divides."""
    stages: int
    """Pipeline stages of an engine."""


def layouts(config: OnlineConfig, room: Room) -> Iterator[tuple[Grouping, dict[str, int], int, int]]:
    """Groupings, ranks of each role, engines and tensor parallel size, that fill the GPUs.

    Ranks are powers of two times those that must stay together, and what the file says; the rest generates.
    """
    roles = config.roles
    for grouping in ("separate", "pairs", "together"):
        sets = device_sets_of(grouping, roles)
        if grouping == "pairs" and all(len(members) == 1 for members in sets):
            continue
        if grouping == "together" and config.rollout.overlap is not None:
            continue
        for ways in _ways(room):
            size = ways * room.stages
            for counts, rest in _shares(config, sets, room):
                engines = min(rest // size, _samples(config))
                if engines:
                    yield grouping, counts, engines, ways


def _ways(room: Room) -> list[int]:
    most = room.host_gpus // room.stages
    return [2**power for power in range(most.bit_length()) if 2**power <= most and room.heads % 2**power == 0]


def _shares(config: OnlineConfig, sets: list[tuple[str, ...]], room: Room) -> Iterator[tuple[dict[str, int], int]]:
    """Ranks of the roles, and GPUs that are left for generation."""
    if len(sets) == 1:
        counts = min(room.gpus, _most_ranks(config)) // room.together * room.together
        if counts:
            yield {role: counts for role in sets[0] if role != "rollout"}, room.gpus
        return
    training = [members for members in sets if "rollout" not in members]
    sizes = [room.together * 2**power for power in range(room.gpus.bit_length())]
    allowed = sorted({size for size in (*sizes, config.train.ranks) if size <= min(room.gpus, _most_ranks(config))})
    for chosen in product(allowed, repeat=len(training)):
        left = room.gpus - sum(chosen)
        if left > 0:
            yield {role: size for members, size in zip(training, chosen, strict=True) for role in members}, left


def _samples(config: OnlineConfig) -> int:
    return config.train.prompts_per_step * config.rollout.samples_per_prompt


def _most_ranks(config: OnlineConfig) -> int:
    return _samples(config) // config.train.minibatches


def applied(config: OnlineConfig, one: Candidate) -> OnlineConfig:
    """The run with this layout.

    Raises:
        ConfigError: the run cannot have it.
    """
    train, how = config.train, one.training
    options = {**train.options, "offload_optimizer": how.offload}
    return replace(
        config,
        train=replace(
            train,
            ranks=one.ranks["policy"],
            options=options,
            max_tokens_per_micro_batch=how.tokens,
            gradient_checkpointing=how.checkpointing,
        ),
        rollout=replace(config.rollout, engines=one.engines, tensor_parallel_size=one.tensor_parallel),
        placement=_placement(config, one),
    )


def _placement(config: OnlineConfig, one: Candidate) -> OnlinePlacementSection:
    placement = config.placement
    partners = {role: members[0] for members in device_sets_of(one.grouping, config.roles) for role in members[1:]}
    for role in config.roles:
        changed = replace(placement.of(role), colocate_with=partners.get(role))
        if isinstance(changed, EnginePlacement):
            changed = replace(changed, ranks=one.ranks[role])
        placement = placement.with_role(role, changed)
    return replace(placement, layout="written")


def fragment(config: OnlineConfig, written: OnlineConfig) -> str:
    """What to paste of a layout: the keys of a file that say numbers and places.

    Args:
        config: the run with the layout.
        written: the run as the file has it, whose places must be taken back.
    """
    train, rollout = config.train, config.rollout
    placement: dict[str, Any] = {"layout": "written"}
    for role in config.roles:
        placed = config.placement.of(role)
        said: dict[str, Any] = {"colocate_with": placed.colocate_with}
        if isinstance(placed, EnginePlacement):
            said["ranks"] = placed.ranks
        group, _, name = key_of(role).partition(".")
        if name:
            placement.setdefault(group, {})[name] = said
        elif said != {"colocate_with": None} or written.placement.of(role).colocate_with:
            placement[role] = said
    found = {
        "train": {
            "ranks": train.ranks,
            "max_tokens_per_micro_batch": train.max_tokens_per_micro_batch,
            "gradient_checkpointing": train.gradient_checkpointing,
            "options": {"offload_optimizer": train.options["offload_optimizer"]},
        },
        "rollout": {"engines": rollout.engines, "tensor_parallel_size": rollout.tensor_parallel_size},
        "placement": placement,
    }
    return yaml.safe_dump(found, sort_keys=False).rstrip()


def unit_of(config: OnlineConfig) -> int:
    """Ranks that must stay together in every role."""
    options = config.train.options
    sizes = (options.get(name, 1) for name in ("autotp_size", "zero_hpz_partition_size"))
    return math.lcm(config.train.sequence_parallel_size, *map(int, sizes))
