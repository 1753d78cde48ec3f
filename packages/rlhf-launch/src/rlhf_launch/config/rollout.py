"""The `rollout` section of a run's configuration: how samples are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from rlhf_core import ConfigError, SamplingConfig, check_switch
from rlhf_rollout import AgentConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Replace groups whose scores are all equal by new prompts (DAPO), one for one, as they are found."""

    max_rounds: int = 4
    """Prompts replaced for a step at most, as a multiple of train.prompts_per_step; a step that is still short
    trains on what it has."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"rollout.dynamic_sampling: max_rounds must be at least 1, got {self.max_rounds}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """More prompts are under way than the next step needs; what is unfinished belongs to later steps."""

    max_staleness: int = 1
    """Weight updates that may lie between a sample's oldest token and the step that trains on it. At most
    (max_staleness + 1) x train.prompts_per_step prompts are under way or waiting; nothing is thrown away."""
    pause_while_training: bool = False
    """False (asynchronous): generation goes on while the policy is trained. True (partial rollouts): unfinished
    samples stand still meanwhile. Either way they go on under the new weights, from the token they had reached."""
    max_in_flight: int = 0
    """Prompts being generated or scored at the same time; 0 for as many as max_staleness allows."""
    off_policy_correction: bool = True
    """Truncated importance sampling where the algorithm's `off_policy` names no correction."""

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(
                f"rollout.overlap: max_staleness must be at least 1, got {self.max_staleness}; leave out "
                "rollout.overlap to alternate generation and training"
            )
        if self.max_in_flight < 0:
            raise ConfigError(
                f"rollout.overlap: max_in_flight must be 0 (no limit) or positive, got {self.max_in_flight}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSection:
    """How samples are generated."""

    backend: str = "auto"
    """`auto` (vllm where installed, else transformers), an installed backend's name, or `module:Class`."""
    engines: int = 1
    samples_per_prompt: int = 8
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=256))
    agent: AgentConfig | None = None
    """Episodes of several turns in an environment or of a program, of `lengths.max_length` tokens at most, whose
    rewards count towards the score; single responses if not given."""
    dynamic_sampling: DynamicSampling | None = None
    """Off if not given."""
    overlap: Overlap | None = None
    """Generation and training alternate if not given."""
    request_seeds: bool = True
    """Each request has a seed of its own, made from the run's seed and the prompt's place, so that a run that goes
    on or is run again draws the same samples. False: engines draw from streams of their own, which begin anew with
    them, and vLLM's older model runner draws for all requests at once (docs/rollout.md)."""
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    """GPUs among which an engine divides each layer; on one host."""
    pipeline_parallel_size: int = 1
    """Stages among which an engine divides its layers; on one host, unless `placement.rollout.hosts_per_engine` is
    above 1."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chosen backend."""

    @property
    def backend_name(self) -> str:
        """The backend, `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "vllm" if find_spec("vllm") is not None else "transformers"

    def __post_init__(self) -> None:
        check_switch("rollout.request_seeds", self.request_seeds)
        for name in (
            "engines",
            "samples_per_prompt",
            "max_num_seqs",
            "tensor_parallel_size",
            "pipeline_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} must be at least 1, got {getattr(self, name)}")
