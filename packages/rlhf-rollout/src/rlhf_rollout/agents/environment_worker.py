"""The program of an environment's process, which `environment_process` starts."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from rlhf_core import Closable

from rlhf_rollout.agents.config import AgentConfig
from rlhf_rollout.sandbox.worker_process import read_message, take_pipes, write_message


def main() -> None:
    """Import the environment that the first message names, then play one episode after the other."""
    source, target = take_pipes()
    try:
        setup = read_message(source)
        make = AgentConfig(
            environment=setup["environment"], environment_options=setup["options"]
        ).environment_maker()
    except (Exception, SystemExit) as error:
        write_message(target, ("refused", f"{type(error).__name__}: {error}"))
        return
    write_message(target, ("ready", ""))
    environment: Any = None
    with asyncio.Runner() as runner:
        while True:
            try:
                name, arguments = read_message(source)
            except EOFError:
                return
            try:
                if name == "make":
                    environment = make()
                    answer = None
                elif name == "close" and not isinstance(environment, Closable):
                    answer = None
                else:
                    answer = _result(runner, getattr(environment, name)(*arguments))
                message = ("answer", answer)
            except (Exception, SystemExit) as error:
                where = f"{type(environment).__qualname__}.{name}" if environment is not None else "the constructor"
                message = ("error", f"{where} raised {type(error).__name__}: {error}")
            try:
                write_message(target, message)
            except Exception as error:  # pickle refused the answer before a byte of it was written
                write_message(target, ("error", f"{name} returned what pickle cannot write: {error}"))


def _result(runner: asyncio.Runner, answer: Any) -> Any:
    async def awaited() -> Any:
        return await answer

    return runner.run(awaited()) if inspect.isawaitable(answer) else answer
