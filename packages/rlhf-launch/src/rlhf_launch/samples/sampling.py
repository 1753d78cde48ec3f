"""Prompts to trajectories: one request per prompt for all its samples, or episodes in an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core import (
    DroppedSample,
    GenerationRequest,
    GenerationResult,
    PackedFlags,
    PackedFloats,
    PackedInts,
    PluginError,
    Run,
    SamplingConfig,
    Trajectory,
)
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, GatewayConfig, ProgramLoop

from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.rollout_pool import RolloutPool

if TYPE_CHECKING:
    from rlhf_rollout import Gateway

GATEWAY_MODEL = "policy"
"""The name under which programs ask for the model."""
GroupSampler = Callable[[Prompt, str, int], Awaitable[list[Trajectory | DroppedSample]]]
"""Draws samples: from a prompt, a label that is unique in the run, and the number of samples."""


def response_sampler(pool: RolloutPool, sampling: SamplingConfig, *, seed: int | None) -> GroupSampler:
    """A sampler of single responses, all those to a prompt in one request.

    Args:
        pool: the rollout engines.
        sampling: settings of all samples.
        seed: the run's; the seed of a request follows from it and the label. None for requests without.
    """

    async def sample(prompt: Prompt, label: str, samples: int) -> list[Trajectory | DroppedSample]:
        request = GenerationRequest(
            request_id=label,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            n=samples,
            seed=None if seed is None else request_seed(seed, label),
        )
        return [*trajectories_of(prompt, await pool.generate(request))]

    return sample


def episode_sampler(loop: AgentLoop | ProgramLoop, *, seed: int | None) -> GroupSampler:
    """A sampler of episodes of several turns.

    Args:
        loop: plays them.
        seed: the run's; the seeds of the turns in an environment follow from it and the label. What a program asks
            for is its own affair: its turns have no seeds of ours. None for turns without.
    """

    async def play(prompt: Prompt, label: str, samples: int) -> list[Trajectory | DroppedSample]:
        task = AgentTask(
            group_id=label,
            prompt_token_ids=prompt.token_ids,
            metadata={**prompt.metadata, "prompt": prompt.text},
            messages=prompt.messages,
            episodes=samples,
            seed=None if seed is None else request_seed(seed, label),
        )
        return await loop.run_group(task)

    return play


def open_gateway(pool: RolloutPool, tokenizer: Any, agent: AgentConfig, *, max_length: int) -> Gateway:
    """A gateway in front of the rollout engines, for the programs of a run. It listens once it is started."""
    config = GatewayConfig(
        model=GATEWAY_MODEL,
        max_model_len=max_length,
        max_sessions=2 * agent.max_episodes,
        session_idle_s=2 * agent.episode_timeout_s,
    )
    return gateway_class()(pool, tokenizer, config)


def gateway_class() -> type[Gateway]:
    """The class `Gateway`, which needs an extra.

    Raises:
        PluginError: the extra is not installed.
    """
    try:
        from rlhf_rollout import Gateway
    except ImportError as error:
        raise PluginError(f"rollout.agent: a program or a command talks to the gateway, but {error}") from error
    return Gateway


def greedy_sampling(sampling: SamplingConfig) -> SamplingConfig:
    """Settings with the same limits and stops that take the most likely token everywhere."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def trajectories_of(prompt: Prompt, result: GenerationResult) -> list[Trajectory]:
    """Single-turn trajectories: the prompt's tokens, then the sampled ones."""
    size, tokens = len(prompt.token_ids), PackedInts.of(prompt.token_ids)
    given, nothing, none = Run(False, size), Run(0.0, size), Run(-1, size)
    return [
        Trajectory(
            sample_id=f"{result.request_id}/{index}",
            group_id=result.request_id,
            token_ids=PackedInts.joined((tokens, sample.token_ids)),
            response_mask=PackedFlags.joined((given, Run(True, sample.length))),
            rollout_log_probs=PackedFloats.joined((nothing, sample.log_probs)),
            weight_versions=PackedInts.joined((none, sample.weight_versions)),
            meaning=result.meaning,
            truncated=sample.finish_reason != "stop",
            metadata={**prompt.metadata, "prompt": prompt.text},
        )
        for index, sample in enumerate(result.samples)
    ]
