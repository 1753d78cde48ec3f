"""A program of any kind for one episode: started with its task, killed with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf_rollout.agents.containers import CommandContainer
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow, in_thread
from rlhf_rollout.sandbox.lifetime import in_own_process_namespace

_KEPT = 2_000
"""Bytes of a command's output that are kept, for messages."""
_LARGEST_RESULT = 1 << 20


async def run_command(
    command: Sequence[str],
    variables: Mapping[str, str],
    task: Mapping[str, Any],
    *,
    timeout_s: float,
    image: str | None = None,
) -> Any:
    """Run a command for one episode; returns what it wrote as its result, or None.

    Its environment is `variables`, RLHF_TASK, and our PATH and HOME. Its result is JSON in the file that the task
    names as `result`. Where `bwrap` works here, it has a process namespace of its own, so that nothing that it
    starts outlives it; elsewhere what leaves its session does. With an image it runs in a container, and has of our
    environment `variables` and RLHF_TASK alone.

    Args:
        command: the program and its arguments.
        variables: further environment variables.
        task: becomes RLHF_TASK, as JSON; what JSON cannot say is written as text.
        timeout_s: the command's deadline.
        image: of the container in which it runs; None for a process here.

    Raises:
        ConfigError: there is nothing that runs containers.
        EnvironmentTooSlow: it missed its deadline, and was killed.
        EnvironmentFailed: it cannot be started, ended with another code than 0, or its result is not JSON.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as private:
        folder = Path(private) / "result"
        folder.mkdir()
        result = folder / "result.json"
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        given = {**variables, "RLHF_TASK": json.dumps({**task, "result": str(result)}, default=str)}
        try:
            running = _contained(command, given, kept, image, folder) if image else _Command(command, kept | given)
        except OSError as error:
            raise EnvironmentFailed(f"the command {command[0]!r} cannot be started: {error}") from error
        try:
            code = await in_thread(running.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise EnvironmentTooSlow(f"the command {command[0]!r} did not end within {timeout_s:g} s") from None
        finally:
            await asyncio.shield(in_thread(running.kill))
        if code:
            raise EnvironmentFailed(
                f"the command {command[0]!r} ended with code {code}: {running.said or 'no words'}"
            )
        return _result(result)


def _contained(
    command: Sequence[str], given: Mapping[str, str], kept: Mapping[str, str], image: str, folder: Path
) -> _Command:
    folder.chmod(0o777)  # whoever the image's user is; the folder around it is ours alone
    container = CommandContainer(image=image, folder=folder)
    client = {**kept, **container.client_variables(), **given}
    return _Command(container.command(command, given.keys()), client, container)


def _result(path: Path) -> Any:
    if path.is_symlink() or not path.is_file():
        return None
    if path.stat().st_size > _LARGEST_RESULT:
        raise EnvironmentFailed(f"the command's result is larger than {_LARGEST_RESULT} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"the command's result is not JSON: {error}") from error


class _Command:
    """A process in a session of its own, or the client of a container, whose last words are kept."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], container: CommandContainer | None = None
    ) -> None:
        self._container = container
        self._process = subprocess.Popen(
            # What runs in a container is no child of its client, which ends nothing.
            list(command) if container else in_own_process_namespace(list(command)),
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._tail = b""
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()
        self._reader = reader

    @property
    def said(self) -> str:
        """The end of what it wrote to standard output and standard error."""
        return self._tail.decode(errors="replace").strip()

    def wait(self, timeout_s: float) -> int:
        """Its exit code; TimeoutExpired if it has none in time."""
        code = self._process.wait(timeout_s)
        self._reader.join(0.5)
        return code

    def kill(self) -> None:
        """End it, and all that is still in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._container is not None:
            self._container.remove()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                self._tail = (self._tail + part)[-_KEPT:]
