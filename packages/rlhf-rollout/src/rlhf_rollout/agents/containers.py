"""A command in a container of its own, by the command line of docker or podman."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core import ConfigError

from rlhf_rollout.agents.environment_calls import EnvironmentFailed

_REMOVE_S = 60.0
_OF_THE_RUNTIME = ("DOCKER_", "CONTAINER", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE")
"""How the variables begin by which a client finds its daemon."""


def container_runtime() -> str:
    """The path of docker, else of podman.

    Raises:
        ConfigError: neither is installed.
    """
    found = shutil.which("docker") or shutil.which("podman")
    if found is None:
        raise ConfigError(
            "agent: container needs docker or podman, and neither is installed here; leave it out, and the command "
            "runs as a process"
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContainer:
    """Where one command runs: the host's network, by which it reaches the gateway, and one folder of its own."""

    image: str
    """It must be on this machine: an episode's deadline is none for fetching one."""
    folder: Path
    """Seen under the same path inside."""
    runtime: str = field(default_factory=container_runtime)
    name: str = field(default_factory=lambda: f"rlhf-agent-{secrets.token_hex(8)}")

    def command(self, words: Sequence[str], variables: Collection[str]) -> list[str]:
        """The runtime's command line for a command.

        Args:
            words: the command.
            variables: names of those that it gets from the client's environment: their values, keys among them,
                stand on no command line.
        """
        return [
            *(self.runtime, "run", "--rm", "--init", "--pull", "never", "--name", self.name, "--network", "host"),
            *("--mount", f"type=bind,source={self.folder},target={self.folder}"),
            *(word for variable in sorted(variables) for word in ("--env", variable)),
            *(self.image, *words),
        ]

    @staticmethod
    def client_variables() -> dict[str, str]:
        """What the client itself needs of our environment."""
        return {name: value for name, value in os.environ.items() if name.startswith(_OF_THE_RUNTIME)}

    def remove(self) -> None:
        """End the container with all that it started, if it is still there.

        Raises:
            EnvironmentFailed: the runtime does not answer.
        """
        try:
            subprocess.run([self.runtime, "rm", "--force", self.name], capture_output=True, timeout=_REMOVE_S)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailed(
                f"{self.runtime} did not remove the container {self.name} within {_REMOVE_S:g} s"
            ) from error
