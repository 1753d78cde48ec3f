"""Prompts to trajectories: one request per prompt for all its samples, or episodes in an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rlhf_core import (
    CapabilityError,
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


def response_sampler(
    pool: RolloutPool,
    sampling: SamplingConfig,
    *,
    seed: int | None,
    image_token_ids: Collection[int] = (),
) -> GroupSampler:
    """A sampler of single responses, all those to a prompt in one request.

    Args:
        pool: the rollout engines.
        sampling: settings of all samples.
        seed: the run's; the seed of a request follows from it and the label. None for requests without.
        image_token_ids: tokens that stand for images in a prompt, where the policy is shown some.
    """

    async def sample(prompt: Prompt, label: str, samples: int) -> list[Trajectory | DroppedSample]:
        shown = prompt.shown
        request = GenerationRequest(
            request_id=label,
            prompt_token_ids=prompt.token_ids if shown is None else shown.request_token_ids,
            sampling=sampling,
            n=samples,
            seed=None if seed is None else request_seed(seed, label),
            images=() if shown is None else shown.images.open(),
        )
        drawn = trajectories_of(prompt, await pool.generate(request))
        return [_without_sampled_images(one, image_token_ids) for one in drawn]

    return sample


def episode_sampler(
    loop: AgentLoop | ProgramLoop, *, seed: int | None, image_token_ids: Collection[int] = ()
) -> GroupSampler:
    """A sampler of episodes of several turns.

    Args:
        loop: plays them.
        seed: the run's; the seeds of the turns in an environment follow from it and the label. What a program asks
            for is its own affair: its turns have no seeds of ours. None for turns without.
        image_token_ids: see `response_sampler`.
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
        return _whole_episodes(await loop.run_group(task), image_token_ids)

    return play


def open_gateway(
    pool: RolloutPool, tokenizer: Any, agent: AgentConfig, *, max_length: int, processor: Any = None
) -> Gateway:
    """A gateway in front of the rollout engines, for the programs of a run. It listens once it is started.

    `processor`: the policy's, where programs show it images.
    """
    config = GatewayConfig(
        model=GATEWAY_MODEL,
        max_model_len=max_length,
        max_sessions=2 * agent.max_episodes,
        session_idle_s=2 * agent.episode_timeout_s,
    )
    return gateway_class()(pool, tokenizer, config, processor=processor)


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
    """Single-turn trajectories: the prompt's tokens, then the sampled ones.

    Raises:
        CapabilityError: the engine ran a prompt with images as other tokens than the trainer will.
    """
    if prompt.shown is not None:
        _check_same_prompt(prompt, result)
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
            shown=None if prompt.shown is None else prompt.shown.images,
        )
        for index, sample in enumerate(result.samples)
    ]


def _without_sampled_images(trajectory: Trajectory, image_token_ids: Collection[int]) -> Trajectory | DroppedSample:
    """A sample in which the policy itself wrote the token of an image is left out: to the generator it is a token
    like any other, to the trainer's model it would be the place of an image that is not there."""
    return _wrote_image(trajectory.sample_id) if _has_sampled_images(trajectory, image_token_ids) else trajectory


def _whole_episodes(
    drawn: Sequence[Trajectory | DroppedSample], image_token_ids: Collection[int]
) -> list[Trajectory | DroppedSample]:
    """The same of episodes, whose trajectories share a score: one that is left out is left out whole."""
    wrote = {
        one.episode_id for one in drawn if isinstance(one, Trajectory) and _has_sampled_images(one, image_token_ids)
    }
    kept = [one for one in drawn if isinstance(one, DroppedSample) or one.episode_id not in wrote]
    return [*kept, *map(_wrote_image, sorted(wrote))]


def _has_sampled_images(trajectory: Trajectory, image_token_ids: Collection[int]) -> bool:
    if not any(trajectory.token_ids.count(token) for token in image_token_ids):
        return False
    sampled = np.asarray(trajectory.token_ids)[np.asarray(trajectory.response_mask)]
    return bool(np.isin(sampled, list(image_token_ids)).any())


def _wrote_image(sample_id: str) -> DroppedSample:
    return DroppedSample(sample_id=sample_id, reason="the policy wrote the token of an image")


def _check_same_prompt(prompt: Prompt, result: GenerationResult) -> None:
    """Refuse samples of another prompt than the one that is trained on: the places of images are expanded twice,
    by the engine and by the processor, which may be of other versions or settings."""
    ran, ours = result.prompt_token_ids, prompt.token_ids
    if ran == ours:
        return
    found = "it does not say which" if ran is None else f"{len(ran)} there, {len(ours)} here"
    raise CapabilityError(
        f"prompt {prompt.prompt_id}: the rollout engine ran its images as other tokens than the trainer would "
        f"({found}), so that samples would be trained on as answers to another prompt. Both must use the processor "
        "of the checkpoint: leave out rollout.options such as mm_processor_kwargs"
    )
