"""Prompts to trajectories: one request per prompt for all its samples, or episodes in an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlhf_core import DeadlineExceeded, GenerationRequest, GenerationResult, SamplingConfig, Trajectory
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, tool_call_parser

from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.rollout_pool import RolloutPool


async def sample_group(
    pool: RolloutPool, prompt: Prompt, sampling: SamplingConfig, request_id: str, *, n: int, seed: int
) -> list[Trajectory]:
    """`n` single-turn samples of one prompt.

    Args:
        pool: the rollout engines.
        prompt: may be under way more than once, with other ids.
        sampling: settings of all samples.
        request_id: unique in the run; sample ids and seeds follow from it.
        n: samples.
        seed: the run's seed.
    """
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        n=n,
        seed=request_seed(seed, request_id),
    )
    return trajectories_of(prompt, await pool.generate(request))


GroupSampler = Callable[[Prompt, str, int], Awaitable[list[Trajectory]]]
"""(prompt, id unique in the run, samples) to the samples; some may be missing if their environment failed."""


def group_sampler(
    pool: RolloutPool,
    sampling: SamplingConfig,
    agent: AgentConfig | None,
    tokenizer: Any,
    *,
    max_tokens: int,
    seed: int,
) -> GroupSampler:
    """What draws the samples of one prompt: single responses, or an agent's episodes of up to `max_tokens`."""
    if agent is None:
        return lambda prompt, label, n: sample_group(pool, prompt, sampling, label, n=n, seed=seed)
    loop = AgentLoop(
        pool,
        tokenizer,
        agent,
        sampling=sampling,
        max_tokens=max_tokens,
        parse_tool_calls=tool_call_parser(tokenizer),
    )

    async def play(prompt: Prompt, label: str, n: int) -> list[Trajectory]:
        task = AgentTask(
            group_id=label,
            prompt_token_ids=prompt.token_ids,
            metadata={**prompt.metadata, "prompt": prompt.text},
            episodes=n,
            seed=request_seed(seed, label),
        )
        return [episode for episode in await loop.run_group(task) if isinstance(episode, Trajectory)]

    return play


def trajectories_of(prompt: Prompt, result: GenerationResult) -> list[Trajectory]:
    """Single-turn trajectories: the prompt's tokens, then the sampled ones."""
    size = len(prompt.token_ids)
    return [
        Trajectory(
            sample_id=f"{result.request_id}/{index}",
            group_id=result.request_id,
            token_ids=prompt.token_ids + sample.token_ids,
            response_mask=(False,) * size + (True,) * sample.length,
            rollout_log_probs=(0.0,) * size + sample.log_probs,
            weight_versions=(-1,) * size + sample.weight_versions,
            meaning=result.meaning,
            truncated=sample.finish_reason != "stop",
            metadata={**prompt.metadata, "prompt": prompt.text},
        )
        for index, sample in enumerate(result.samples)
    ]


def generate(
    pool: RolloutPool,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    *,
    label: str,
    samples: int,
    seed: int,
    timeout_s: float,
) -> list[Trajectory]:
    """Sample every prompt, from code that is not a coroutine; the samples of one prompt are consecutive.

    Raises:
        DeadlineExceeded: not all were finished within `timeout_s`.
    """

    async def everything() -> list[list[Trajectory]]:
        work = [
            sample_group(pool, prompt, sampling, f"{label}/{index}", n=samples, seed=seed)
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.wait_for(asyncio.gather(*work), timeout_s)

    try:
        return [trajectory for group in asyncio.run(everything()) for trajectory in group]
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for {samples} samples each of {len(prompts)} prompts"
        ) from None
