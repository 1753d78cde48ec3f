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
    ToolCall,
    Trajectory,
    Turn,
)

from rlhf_rollout.agents.attempts import attempts
from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import (
    EnvironmentFailed,
    EnvironmentTooSlow,
    call_by_deadline,
    call_environment,
    in_thread,
)
from rlhf_rollout.agents.environment_process import START_TIMEOUT_S, EnvironmentProcesses
from rlhf_rollout.agents.episode import Ending, Episode
from rlhf_rollout.agents.turn_tokens import Said, TurnTokens, beside, tokens_beside
from rlhf_rollout.agents.turns import SharedFirstTurn, turn_seed
from rlhf_rollout.chat.thoughts import begins_inside_thought, knows_thoughts, split_thought
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
        self._processes = EnvironmentProcesses(config) if config.isolate == "process" else None
        self._make_environment = self._processes.environment if self._processes else config.environment_maker()
        self._start_s = config.step_timeout_s + (START_TIMEOUT_S if self._processes else 0)
        self._turns = TurnTokens(tokenizer)
        self._config = config
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._parse = parse_tool_calls or (lambda text: ())
        self._thinks = knows_thoughts(tokenizer)
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def close(self) -> None:
        """End the environments' processes, if there are any; may be called twice."""
        if self._processes is not None:
            self._processes.close()

    async def run(self, tasks: Sequence[AgentTask]) -> list[Trajectory | DroppedSample]:
        """Episodes of all tasks, in order; those of one task are consecutive."""
        groups = await gather_or_cancel(self.run_group(task) for task in tasks)
        return [episode for group in groups for episode in group]

    async def run_group(self, task: AgentTask) -> list[Trajectory | DroppedSample]:
        """Episodes of one task.

        Raises:
            EnvironmentFailed: an environment failed, and `on_error` is raise.
            EnvironmentTooSlow: one missed its deadline, and `on_deadline` is raise.
        """
        first = SharedFirstTurn(self._generator, task)
        try:
            return await gather_or_cancel(self._episode(task, index, first) for index in range(task.episodes))
        finally:
            first.close()

    async def _episode(self, task: AgentTask, index: int, first: SharedFirstTurn) -> Trajectory | DroppedSample:
        config, sample_id = self._config, f"{task.group_id}/{index}"
        most = min(config.max_episodes, config.processes) if self._processes else config.max_episodes
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(most))
        async with room:
            return await attempts(
                config,
                sample_id,
                lambda number: self._attempt(Episode(sample_id=sample_id, attempt=number), task, first),
            )

    async def _attempt(self, episode: Episode, task: AgentTask, first: SharedFirstTurn) -> Trajectory:
        """Play an episode once.

        Raises:
            EnvironmentFailed: the environment failed.
            EnvironmentTooSlow: a deadline was missed, and the turns so far are not kept, or there is none.
        """
        environment = await call_by_deadline(self._make_environment, timeout_s=self._start_s)
        try:
            ending = await self._until_deadline(environment, episode, task, first)
        finally:
            await self._close(environment)
        return episode.trajectory(task.group_id, task.metadata, ending)

    async def _until_deadline(
        self, environment: Environment, episode: Episode, task: AgentTask, first: SharedFirstTurn
    ) -> Ending:
        limit = self._config.episode_timeout_s
        try:
            try:
                async with asyncio.timeout(limit) as deadline:
                    return await self._play(environment, episode, task, first)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise EnvironmentTooSlow(f"the episode did not end within {limit:g} s") from error
        except EnvironmentTooSlow as error:
            if self._config.on_deadline != "keep" or not episode.turns:
                raise
            _log.warning("sample %r is truncated: %s", episode.sample_id, error)
            return "deadline"

    async def _play(
        self, environment: Environment, episode: Episode, task: AgentTask, first: SharedFirstTurn
    ) -> Ending:
        config = self._config
        said = await call_environment(environment.reset, task.metadata, timeout_s=config.step_timeout_s)
        limit = self._limit(0 if said.messages else len(task.prompt_token_ids))
        limit += 0 if said.messages else len(task.prompt_token_ids)
        opening = await tokens_beside(self._turns.opening, said, task.prompt_token_ids, said, limit)
        self._add(episode, opening, (*task.images, *said.images))
        shared = config.max_turns == 1 and not episode.attempt
        shared = shared and episode.token_ids == PackedInts.of(task.prompt_token_ids)
        while True:
            room = self._max_tokens - len(episode.token_ids)
            if room < 1:
                return self._out_of_room(episode)
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
            limit = self._limit(len(episode.token_ids))
            if limit < 1:
                return "tokens"
            reply = await tokens_beside(self._turns.reply, said, said, episode.token_ids[-1], limit)
            self._add(episode, reply, said.images)

    def _limit(self, used: int) -> int:
        """Tokens that an observation may have: a whole turn fits behind it, or a quarter of the room is left."""
        room = self._max_tokens - used
        fits = room - min(self._sampling.max_tokens, max(1, room // 4))
        most = self._config.max_observation_tokens
        return fits if most is None else min(fits, most)

    def _add(self, episode: Episode, said: Said, images: Sequence[Any]) -> None:
        episode.add_given(said.token_ids, images)
        if said.cut:
            episode.info["cut_observations"] = episode.info.get("cut_observations", 0.0) + 1

    def _out_of_room(self, episode: Episode) -> Ending:
        if not episode.turns:
            raise EnvironmentFailed(
                f"the prompt has {len(episode.token_ids)} tokens, which leaves no room for a turn in an episode of "
                f"{self._max_tokens}"
            )
        return "tokens"

    async def _sample_turn(
        self, episode: Episode, task: AgentTask, room: int, shared: SharedFirstTurn | None
    ) -> None:
        index = int(episode.sample_id.rpartition("/")[2])
        sampling = self._sampling
        limit = min(sampling.max_tokens, room)
        sampling = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))
        again = f"/again{episode.attempt}" if episode.attempt else ""
        if shared is not None:
            result = await shared.result(sampling)
            sample = result.samples[index]
        else:
            result = await self._generator.generate(
                GenerationRequest(
                    request_id=f"{episode.sample_id}/{episode.turns}{again}",
                    prompt_token_ids=episode.token_ids,
                    sampling=sampling,
                    seed=turn_seed(task.seed, index, episode.turns, episode.attempt),
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

        def heard() -> Turn:
            return Turn(
                token_ids=token_ids,
                text=self._turns.decode(token_ids),
                tool_calls=tuple(self._calls(episode, token_ids)),
                finish_reason=episode.finish_reason,  # type: ignore[arg-type]
                index=episode.turns - 1,
            )

        try:
            turn = await beside(len(token_ids), heard)
        except Exception as error:  # of a parser of somebody's own
            raise EnvironmentFailed(f"reading the turn raised {type(error).__name__}: {error}") from error
        return await call_environment(environment.step, turn, timeout_s=self._config.step_timeout_s)

    def _calls(self, episode: Episode, token_ids: Sequence[int]) -> Sequence[ToolCall]:
        """The calls of a turn, without those that were only thought of."""
        text = self._turns.decode(token_ids, special=True)
        if self._thinks:
            before = episode.token_ids[max(0, episode.turn_start - 8) : episode.turn_start].tolist()
            _, text = split_thought(text, inside=begins_inside_thought(self._turns.tokenizer, before))
        return self._parse(text)

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
