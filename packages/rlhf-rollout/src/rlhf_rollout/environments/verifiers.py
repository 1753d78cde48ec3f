"""Tasks of the package `verifiers`, with the rewards that their authors wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError, DataError, Observation, Turn

from rlhf_rollout.environments.optional import optional_module

_INSTALL = "verifiers==0.4.* (it pins other packages: see docs/environments.md)"


def verifiers_rows(taskset: str, *, limit: int | None = None, **config: Any) -> list[dict[str, str]]:
    """The rows of data of a task set of `verifiers`: write them to a .jsonl file and name it in `data.train`.

    Args:
        taskset: the module that has the task set.
        limit: rows at most; needed where the task set has no end.
        config: fields of the task set's configuration.

    Raises:
        ConfigError: verifiers is not installed, or the task set has no end and there is no limit.
    """
    tasks = _taskset(taskset, config)
    if limit is None and not tasks.bounded:
        raise ConfigError(f"the task set {taskset!r} has no end; give a limit")
    chosen = tasks if limit is None else tasks.take(limit)
    return [{"prompt": task.data.prompt_text, "task": task.data.model_dump_json()} for task in chosen]


class VerifiersEnvironment:
    """Environment of a task set of `verifiers` (0.4): one turn, scored by the task's rewards and judges.

    It reads the column `task` of rows that `verifiers_rows` made. The weighted sum of the rewards is the turn's;
    rewards and metrics are logged by their names. Tasks that need tools, a container or a harness of their own are
    refused: let such a harness play through the gateway, which records it.

    >>> AgentConfig(environment=VerifiersEnvironment, environment_options={"taskset": "my_tasks"})  # doctest: +SKIP
    """

    def __init__(self, taskset: str, **config: Any) -> None:
        """Load the task set.

        Args:
            taskset: the module that has the task set.
            config: fields of the task set's configuration.

        Raises:
            ConfigError: verifiers is not installed, or the tasks need more than a conversation.
        """
        self._verifiers = optional_module("verifiers.v1", install=_INSTALL, needed_by="VerifiersEnvironment")
        tasks = _taskset(taskset, config)
        self._kind, self._config = type(tasks).task_type(), tasks.config
        tools = [*self._kind.toolsets(self._config.task), *type(tasks).toolsets(self._config)]
        if tools or self._kind.NEEDS_CONTAINER:
            what = "tools" if tools else "a container"
            raise ConfigError(
                f"the tasks of {taskset!r} need {what}; let a harness of verifiers play them through the gateway"
            )
        self._task: Any = None
        self._messages: tuple[Any, ...] = ()

    def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment.

        Raises:
            DataError: the row has no column `task`, or its task has no prompt.
        """
        if "task" not in metadata:
            raise DataError("the row has no column `task`; make the rows with verifiers_rows")
        self._task = self._kind(self._kind.data_type().model_validate_json(metadata["task"]), self._config.task)
        data, vf = self._task.data, self._verifiers
        if not data.prompt:
            raise DataError(f"task {data.idx} has no prompt: its user opens the conversation, which is not played")
        system = (vf.SystemMessage(content=data.system_prompt),) if data.system_prompt else ()
        asked = (vf.UserMessage(content=data.prompt),) if isinstance(data.prompt, str) else tuple(data.prompt)
        self._messages = (*system, *asked)
        return Observation(
            messages=tuple(message.model_dump(mode="json", exclude_none=True) for message in self._messages)
        )

    async def step(self, turn: Turn) -> Observation:
        """See Environment."""
        trace = self._trace(turn.text)
        await self._task.score(trace)
        numbers = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
        return Observation(reward=trace.reward, done=True, info=numbers)

    def _trace(self, reply: str) -> Any:
        """The conversation as the task's rewards read it."""
        vf = self._verifiers
        trace = vf.Trace(
            task=vf.TraceTask(type=self._kind.__name__, data=self._task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        for index, message in enumerate((*self._messages, vf.AssistantMessage(content=reply))):
            sampled = index == len(self._messages)
            trace.nodes.append(
                vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=sampled)
            )
        return trace


def _taskset(name: str, config: Mapping[str, Any]) -> Any:
    vf = optional_module("verifiers.v1", install=_INSTALL, needed_by="VerifiersEnvironment")
    try:
        return vf.load_taskset(vf.taskset_config_type(name)(id=name, **config))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"environment_options: verifiers cannot load the task set {name!r}: {error}") from error
