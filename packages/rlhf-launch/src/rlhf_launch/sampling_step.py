"""Prompts to trajectories: one request per prompt for all its samples."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from rlhf_core import DeadlineExceeded, GenerationRequest, GenerationResult, SamplingConfig, Trajectory

from rlhf_launch.prompts import Prompt
from rlhf_launch.rollout_pool import RolloutPool


def request_seed(run_seed: int, label: str) -> int:
    """A seed for one request. Distinct labels give seeds far apart, so sample i may be drawn with seed + i."""
    digest = hashlib.blake2b(f"{run_seed}/{label}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33 << 8 & 0x7FFFFF00


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
    """Sample every prompt; the trajectories of one prompt are consecutive and share a group id.

    Args:
        pool: the rollout engines.
        prompts: may contain a prompt twice.
        sampling: settings of all samples.
        label: makes ids and seeds of this call unique in the run, for instance the step.
        samples: per prompt.
        seed: the run's seed.
        timeout_s: deadline for all samples together.
    """
    requests = [
        GenerationRequest(
            request_id=f"{label}/{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            n=samples,
            seed=request_seed(seed, f"{label}/{index}"),
        )
        for index, prompt in enumerate(prompts)
    ]
    results = run_requests(pool, requests, timeout_s=timeout_s)
    return [
        trajectory
        for prompt, result in zip(prompts, results, strict=True)
        for trajectory in trajectories_of(prompt, result)
    ]


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


def run_requests(
    pool: RolloutPool, requests: Sequence[GenerationRequest], *, timeout_s: float
) -> list[GenerationResult]:
    """Run all requests at once, from code that is not a coroutine; results in order.

    Raises:
        DeadlineExceeded: names how many requests were still running.
    """

    async def everything() -> list[GenerationResult]:
        tasks = [asyncio.ensure_future(pool.generate(request)) for request in requests]
        try:
            return await asyncio.wait_for(asyncio.gather(*tasks), timeout_s)
        except TimeoutError:
            running = sum(not task.done() or task.cancelled() for task in tasks)
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for generation; {running} of {len(tasks)} requests were still running"
            ) from None

    return asyncio.run(everything())
