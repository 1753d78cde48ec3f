"""Episodes of a policy in an environment: token in, token out. A single turn is the one-step case."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from rlhf_core import (
    Closable,
    ConfigError,
    DroppedSample,
    Environment,
    GenerationRequest,
    Observation,
    PackedInts,
    SamplingConfig,
    Trajectory,
    Turn,
)

from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow, call_environment, in_thread
from rlhf_rollout.agents.episode import Ending, Episode
from rlhf_rollout.agents.turns import SharedFirstTurn, TurnTokens, turn_seed
from rlhf_rollout.chat.tool_calls import ToolCallParser
from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.generator import Generator

_log = logging.getLogger(__name__)


class SingleTurn:
    """Environment of ordinary prompts, which says nothing and is done after one turn."""

    async def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment."""
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """See Environment."""
        return Observation(done=True)


class AgentLoop:
    """Plays episodes, all at once; each waits for its own environment and its own turns alone.

    After each sampled turn the environment's answer is tokenised, once, and appended with `response_mask` False.
    The sampled tokens stay as they were sampled.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        config: AgentConfig,
        *,
        sampling: SamplingConfig,
        max_tokens: int,
        parse_tool_calls: ToolCallParser | None = None,
    ) -> None:
        """Import the environment.

        Args:
            generator: samples the turns.
            tokenizer: the policy's.
            config: the environment, and the limits of an episode.
            sampling: settings of every turn; its `max_tokens` is a turn's.
            max_tokens: tokens of an episode, prompt and environment included; at most the generator's
                `max_model_len`.
            parse_tool_calls: finds the tool calls in a turn; see `tool_call_parser`. None finds none.

        Raises:
            PluginError: the environment cannot be imported.
        """
        if max_tokens < 1:
            raise ConfigError(f"agent: max_tokens must be at least 1, got {max_tokens}")
        self._generator = generator
        self._make_environment = config.environment_maker()
        self._turns = TurnTokens(tokenizer)
        self._config = config
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._parse = parse_tool_calls or (lambda text: ())
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, tasks: Sequence[AgentTask]) -> list[Trajectory | DroppedSample]:
        """Episodes of all tasks, in order; those of one task are consecutive."""
        groups = await gather_or_cancel(self.run_group(task) for task in tasks)
        return [episode for group in groups for episode in group]

    async def run_group(self, task: AgentTask) -> list[Trajectory | DroppedSample]:
        """Episodes of one task.

        Raises:
            EnvironmentFailed: an environment raised, and `on_error` is stop.
        """
        first = SharedFirstTurn(self._generator, task)
        try:
            return await gather_or_cancel(self._episode(task, index, first) for index in range(task.episodes))
        finally:
            first.close()

    async def _episode(self, task: AgentTask, index: int, first: SharedFirstTurn) -> Trajectory | DroppedSample:
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._config.max_episodes))
        async with room:
            episode = Episode(sample_id=f"{task.group_id}/{index}")
            environment = self._make_environment()
            try:
                ending = await self._until_deadline(environment, episode, task, first)
            except EnvironmentFailed as error:
                if self._config.on_error == "stop":
                    raise EnvironmentFailed(f"sample {episode.sample_id!r}: {error}") from error
                _log.warning("dropped sample %r: %s", episode.sample_id, error)
                return DroppedSample(sample_id=episode.sample_id, reason=str(error))
            finally:
                await self._close(environment)
        if not episode.token_ids:
            return DroppedSample(
                sample_id=episode.sample_id,
                reason="the environment's reset did not return in time, and the row has no prompt",
            )
        return episode.trajectory(task.group_id, task.metadata, ending)

    async def _until_deadline(
        self, environment: Environment, episode: Episode, task: AgentTask, first: SharedFirstTurn
    ) -> Ending:
        try:
            async with asyncio.timeout(self._config.episode_timeout_s) as deadline:
                return await self._play(environment, episode, task, first)
        except EnvironmentTooSlow as error:
            _log.warning("sample %r is truncated: %s", episode.sample_id, error)
        except TimeoutError:
            if not deadline.expired():
                raise
            _log.warning("sample %r is truncated after %g s", episode.sample_id, self._config.episode_timeout_s)
        if not episode.token_ids and task.prompt_token_ids:
            episode.add_given(task.prompt_token_ids, task.images)
        return "deadline"

    async def _play(
        self, environment: Environment, episode: Episode, task: AgentTask, first: SharedFirstTurn
    ) -> Ending:
        config = self._config
        said = await call_environment(environment.reset, task.metadata, timeout_s=config.step_timeout_s)
        opening = self._turns.opening(task.prompt_token_ids, said)
        episode.add_given(opening, (*task.images, *said.images))
        shared = config.max_turns == 1 and episode.token_ids == PackedInts.of(task.prompt_token_ids)
        while True:
            room = self._max_tokens - len(episode.token_ids)
            if room < 1:
                return "tokens"
            await self._sample_turn(episode, task, room, first if shared else None)
            if episode.finish_reason == "abort":
                return "abort"
            said = await self._step(environment, episode)
            episode.reward(said.reward)
            episode.info |= said.info
            if said.done:
                return "done"
            if episode.finish_reason == "length":
                return "tokens" if len(episode.token_ids) >= self._max_tokens else "length"
            if episode.turns == config.max_turns:
                return "turns"
            episode.add_given(self._turns.reply(said, episode.token_ids[-1]), said.images)

    async def _sample_turn(
        self, episode: Episode, task: AgentTask, room: int, shared: SharedFirstTurn | None
    ) -> None:
        index = int(episode.sample_id.rpartition("/")[2])
        sampling = self._sampling
        limit = min(sampling.max_tokens, room)
        sampling = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))
        if shared is not None:
            result = await shared.result(sampling)
            sample = result.samples[index]
        else:
            result = await self._generator.generate(
                GenerationRequest(
                    request_id=f"{episode.sample_id}/{episode.turns}",
                    prompt_token_ids=episode.token_ids,
                    sampling=sampling,
                    seed=turn_seed(task.seed, index, episode.turns),
                    images=tuple(episode.images),
                )
            )
            (sample,) = result.samples
        episode.add_turn(sample, result.meaning)
        if not sample.length:
            episode.finish_reason = "abort"

    async def _step(self, environment: Environment, episode: Episode) -> Observation:
        """The environment's answer to the last turn."""
        token_ids = tuple(episode.token_ids[episode.turn_start :].tolist())
        turn = Turn(
            token_ids=token_ids,
            text=self._turns.decode(token_ids),
            tool_calls=tuple(self._parse(self._turns.decode(token_ids, special=True))),
            finish_reason=episode.finish_reason,  # type: ignore[arg-type]
            index=episode.turns - 1,
        )
        return await call_environment(environment.step, turn, timeout_s=self._config.step_timeout_s)

    async def _close(self, environment: Environment) -> None:
        """Close an environment that can be closed; if that fails, the sample is kept all the same."""
        if not isinstance(environment, Closable):
            return
        try:
            async with asyncio.timeout(self._config.step_timeout_s):
                answer = await in_thread(environment.close)
                if asyncio.iscoroutine(answer):
                    await answer
        except Exception as error:
            _log.warning("an environment could not be closed: %s: %s", type(error).__name__, error)
