"""Prompts to trajectories: one request per prompt for all its samples, or episodes in an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rlhf_core import (
    DroppedSample,
    GenerationRequest,
    GenerationResult,
    PackedFlags,
    PackedFloats,
    PackedInts,
    SamplingConfig,
    Trajectory,
)
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, tool_call_parser

from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.rollout_pool import RolloutPool

GroupSampler = Callable[[Prompt, str, int], Awaitable[list[Trajectory | DroppedSample]]]
"""Draws samples: from a prompt, a label that is unique in the run, and the number of samples."""


def response_sampler(pool: RolloutPool, sampling: SamplingConfig, *, seed: int) -> GroupSampler:
    """A sampler of single responses, all those to a prompt in one request.

    Args:
        pool: the rollout engines.
        sampling: settings of all samples.
        seed: the run's; the seed of a request follows from it and the label.
    """

    async def sample(prompt: Prompt, label: str, samples: int) -> list[Trajectory | DroppedSample]:
        request = GenerationRequest(
            request_id=label,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            n=samples,
            seed=request_seed(seed, label),
        )
        return [*trajectories_of(prompt, await pool.generate(request))]

    return sample


def episode_sampler(
    pool: RolloutPool,
    agent: AgentConfig,
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    max_tokens: int,
    seed: int,
) -> GroupSampler:
    """A sampler of episodes of several turns.

    Args:
        pool: the rollout engines.
        agent: the environment, and the limits of an episode.
        sampling: settings of every turn.
        tokenizer: the policy's.
        max_tokens: tokens of an episode, prompt and environment included.
        seed: the run's; the seeds of the turns follow from it and the label.
    """
    tool_calls = tool_call_parser(tokenizer)
    loop = AgentLoop(pool, tokenizer, agent, sampling=sampling, max_tokens=max_tokens, parse_tool_calls=tool_calls)

    async def play(prompt: Prompt, label: str, samples: int) -> list[Trajectory | DroppedSample]:
        task = AgentTask(
            group_id=label,
            prompt_token_ids=prompt.token_ids,
            metadata={**prompt.metadata, "prompt": prompt.text},
            episodes=samples,
            seed=request_seed(seed, label),
        )
        return await loop.run_group(task)

    return play


def greedy_sampling(sampling: SamplingConfig) -> SamplingConfig:
    """Settings with the same limits and stops that take the most likely token everywhere."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def trajectories_of(prompt: Prompt, result: GenerationResult) -> list[Trajectory]:
    """Single-turn trajectories: the prompt's tokens, then the sampled ones."""
    size, tokens = len(prompt.token_ids), PackedInts.of(prompt.token_ids)
    given, nothing, none = PackedFlags.full(size, False), PackedFloats.full(size, 0.0), PackedInts.full(size, -1)
    return [
        Trajectory(
            sample_id=f"{result.request_id}/{index}",
            group_id=result.request_id,
            token_ids=tokens + sample.token_ids,
            response_mask=given + PackedFlags.full(sample.length, True),
            rollout_log_probs=nothing + sample.log_probs,
            weight_versions=none + sample.weight_versions,
            meaning=result.meaning,
            truncated=sample.finish_reason != "stop",
            metadata={**prompt.metadata, "prompt": prompt.text},
        )
        for index, sample in enumerate(result.samples)
    ]
