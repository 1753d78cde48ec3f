"""Episodes of other people's programs: each talks to the model through a session of the gateway.

The turns of a session are recorded by the gateway and come back as trajectories, one for each branch of its
conversations. All of them are one episode: they share its score.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from rlhf_core import ConfigError, DataError, DroppedSample, SamplingConfig, Trajectory, note_progress

from rlhf_rollout.agents.attempts import attempts
from rlhf_rollout.agents.commands import run_command
from rlhf_rollout.agents.config import AgentConfig, AgentTask
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, call_by_deadline
from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.sandbox.lifetime import in_own_process_namespace


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTask:
    """What a program is called with: its task, and where the model is."""

    prompt: str
    """The row's prompt as text: the last user message of a chat."""
    messages: tuple[Mapping[str, Any], ...]
    """The row's prompt as chat messages."""
    metadata: Mapping[str, Any]
    """The row's other columns."""
    base_url: str
    """For OpenAI's clients; ends in `/v1`."""
    root_url: str
    """The same for Anthropic's clients, without `/v1`."""
    api_key: str = field(repr=False)
    """Opens this episode's session alone."""
    model: str
    """The name under which clients ask for the model."""
    sample_id: str


class Access(Protocol):
    """What the client of a session needs; see `SessionAccess`."""

    @property
    def url(self) -> str:
        """Base URL that ends in `/v1`."""
        ...

    @property
    def root_url(self) -> str:
        """The same without `/v1`."""
        ...

    @property
    def api_key(self) -> str:
        """The key of the session."""
        ...


class Sessions(Protocol):
    """What a `Gateway` has for programs."""

    def open_session(
        self,
        session_id: str,
        *,
        group_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        sampling: SamplingConfig | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> Access:
        """Begin to record."""
        ...

    def session(self, session_id: str) -> Any:
        """What is recorded: a `RecordedSession`."""
        ...

    def close_session(self, session_id: str) -> list[Trajectory]:
        """End a session and return what was recorded; blocks for turns under way."""
        ...

    def drop_session(self, session_id: str) -> None:
        """End a session and forget it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Earned:
    """What a program says of its episode."""

    final: float = 0.0
    """Reward of the episode as a whole."""
    turns: tuple[float, ...] = ()
    """Reward of each turn, in the order in which the turns were sampled."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts, to log."""
    given: bool = True
    """False if the program said nothing."""

    @classmethod
    def of(cls, answer: Any) -> Earned:
        """What a program returned: None, a number, or a mapping of parts.

        A part that is a list has a number for each turn; the reward is the sum of all.

        Raises:
            EnvironmentFailed: it returned something else.
        """
        if answer is None:
            return cls(given=False)
        if not isinstance(answer, Mapping):
            return cls(final=_number(answer, "a reward"))
        final, turns, parts = 0.0, [0.0], {}
        for name, value in answer.items():
            if isinstance(value, list | tuple):
                numbers = [_number(one, f"the part {name!r}") for one in value]
                turns += [0.0] * (len(numbers) - len(turns))
                turns = [
                    a + b for a, b in zip(turns, [*numbers, *[0.0] * (len(turns) - len(numbers))], strict=True)
                ]
                parts[str(name)] = sum(numbers)
            else:
                parts[str(name)] = _number(value, f"the part {name!r}")
                final += parts[str(name)]
        return cls(final=final, turns=tuple(turns) if any(turns) else (), parts=parts)


class ProgramLoop:
    """Runs the programs of episodes, `max_episodes` at the same time."""

    def __init__(
        self,
        sessions: Sessions,
        config: AgentConfig,
        *,
        sampling: SamplingConfig,
        model: str,
        needs_reward: bool = False,
    ) -> None:
        """Import the program.

        Args:
            sessions: a gateway that listens.
            config: the program or the command, and the limits of an episode.
            sampling: settings of every turn; programs can only ask for shorter answers and further stops.
            model: the name under which clients ask for the model.
            needs_reward: whether an episode whose program returns no reward has failed: nothing else scores it.

        Raises:
            PluginError: the program cannot be imported.
            ConfigError: there is neither a program nor a command.
        """
        if not config.uses_gateway:
            raise ConfigError("agent: an environment is played by AgentLoop; write a program or a command")
        config.check()
        self._program: Callable[[ProgramTask], Any] | None = None
        if config.program is not None:
            self._program = config.program_function()
        else:
            in_own_process_namespace([])  # finds out now whether there are namespaces, which takes a moment
        self._sessions, self._config, self._sampling = sessions, config, sampling
        self._model, self._needs_reward = model, needs_reward
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run_group(self, task: AgentTask) -> list[Trajectory | DroppedSample]:
        """Episodes of one task: of each, its trajectories, or what was dropped.

        Raises:
            EnvironmentFailed: a program failed, and `on_error` is raise.
            EnvironmentTooSlow: one missed its deadline, and `on_deadline` is raise.
        """
        episodes = await gather_or_cancel(self._episode(task, index) for index in range(task.episodes))
        return [trajectory for episode in episodes for trajectory in episode]

    async def _episode(self, task: AgentTask, index: int) -> list[Trajectory] | list[DroppedSample]:
        config, sample_id = self._config, f"{task.group_id}/{index}"
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(config.max_episodes))
        async with room:
            found = await attempts(config, sample_id, lambda number: self._attempt(task, sample_id, number))
        return [found] if isinstance(found, DroppedSample) else found

    async def _attempt(self, task: AgentTask, sample_id: str, attempt: int) -> list[Trajectory]:
        """Run the program once, in a session of its own."""
        config = self._config
        session_id = f"{sample_id}/again{attempt}" if attempt else sample_id
        access = self._sessions.open_session(
            session_id,
            group_id=task.group_id,
            metadata=task.metadata,
            sampling=self._sampling,
            max_turns=config.max_turns,
            max_tokens=config.max_sampled_tokens,
            deadline_s=config.episode_timeout_s,
        )
        closed = False
        try:
            earned = Earned.of(await self._run(_task_of(task, access, self._model, sample_id)))
            if self._needs_reward and not earned.given:
                raise EnvironmentFailed(
                    "the program returned no reward, and reward.parts has nothing to score it by"
                )
            record = self._sessions.session(session_id)
            try:
                record.reward_turns(earned.turns)
            except DataError as error:
                raise EnvironmentFailed(f"the program's rewards: {error}") from error
            closed = True
            trajectories = await asyncio.to_thread(self._sessions.close_session, session_id)
        finally:
            if not closed:
                self._drop(session_id)
        note_progress("programs")
        if not trajectories:
            raise EnvironmentFailed("the program asked the model for nothing")
        return _as_episode(trajectories, sample_id, earned, turns=len(record.turns))

    async def _run(self, task: ProgramTask) -> Any:
        limit = self._config.episode_timeout_s
        if self._program is not None:
            return await call_by_deadline(self._program, task, timeout_s=limit)
        variables = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.root_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }
        described = {
            "prompt": task.prompt,
            "messages": list(task.messages),
            "metadata": dict(task.metadata),
            "model": task.model,
            "sample_id": task.sample_id,
        }
        return await run_command(
            self._config.command, variables, described, timeout_s=limit, image=self._config.container
        )

    def _drop(self, session_id: str) -> None:
        with contextlib.suppress(ConfigError):  # nobody used it for so long that it is gone
            self._sessions.drop_session(session_id)


def _task_of(task: AgentTask, access: Access, model: str, sample_id: str) -> ProgramTask:
    text = str(task.metadata.get("prompt", ""))
    messages = tuple(task.messages) or ({"role": "user", "content": text},)
    spoken = [message.get("content") for message in messages if message.get("role") == "user"]
    return ProgramTask(
        prompt=spoken[-1] if spoken and isinstance(spoken[-1], str) else text,
        messages=messages,
        metadata={name: value for name, value in task.metadata.items() if name != "prompt"},
        base_url=access.url,
        root_url=access.root_url,
        api_key=access.api_key,
        model=model,
        sample_id=sample_id,
    )


def _as_episode(
    trajectories: Sequence[Trajectory], sample_id: str, earned: Earned, *, turns: int
) -> list[Trajectory]:
    """The trajectories of a session as those of one episode; the last says what was earned in all of it."""
    metadata = {
        **trajectories[-1].metadata,
        "turns": turns,
        "earned": earned.final + sum(earned.turns),
        "environment": dict(earned.parts),
    }
    several = len(trajectories) > 1
    return [
        replace(
            trajectory,
            sample_id=f"{sample_id}/{index}" if several else sample_id,
            episode_id=sample_id,
            metadata=metadata,
        )
        for index, trajectory in enumerate(trajectories)
    ]


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise EnvironmentFailed(
            f"the program returned {value!r} as {what}; return None, a finite number, or a mapping of names to "
            "numbers or to lists of one number for each turn"
        )
    return number
