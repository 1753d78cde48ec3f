"""Programs on a server for them: the client's side. `wire` has the protocol."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from rlhf_core import CapabilityError, DataError, Program, ProgramOutcome, SandboxError

from rlhf_rollout.sandbox.wire import outcome_from_json, program_to_json

TOKEN_VARIABLE = "RLHF_SANDBOX_TOKEN"
"""Environment variable with the token that the server wants."""
_WAIT_S = 300.0
_ENVELOPE = 1 << 16


class RemoteSandbox:
    """Sandbox behind an address. Asks at once whether it is there.

    Raises:
        CapabilityError: nobody answers, or the token is wrong.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        """Without a token, that of the environment variable `RLHF_SANDBOX_TOKEN` is sent."""
        self._url = url.rstrip("/")
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
        try:
            self._ask("/v1/health", None, seconds=10.0, most=_ENVELOPE)
        except (SandboxError, DataError) as error:
            raise CapabilityError(
                f"no sandbox answers at {self._url}: {error}; start `rlhf serve-sandbox`"
            ) from error

    def run(self, program: Program) -> ProgramOutcome:
        """See Sandbox."""
        (outcome,) = self._run(program)
        return outcome

    def run_linked(self, first: Program, second: Program) -> tuple[ProgramOutcome, ProgramOutcome]:
        """See Sandbox."""
        one, other = self._run(first, second)
        return one, other

    def close(self) -> None:
        """See Sandbox; every request has a connection of its own."""

    def _run(self, *programs: Program) -> list[ProgramOutcome]:
        body = json.dumps({"programs": [program_to_json(program) for program in programs]}).encode()
        # Waiting for a place among the server's programs counts too.
        seconds = _WAIT_S + max(program.limits.wall_s for program in programs)
        most = _ENVELOPE + 3 * sum(program.limits.output_bytes for program in programs)
        answer = self._ask("/v1/run", body, seconds=seconds, most=most)
        outcomes = answer.get("outcomes") if isinstance(answer, dict) else None
        if not isinstance(outcomes, list) or len(outcomes) != len(programs):
            raise SandboxError(f"{self._url} answered something else than {len(programs)} outcomes")
        try:
            return [outcome_from_json(outcome) for outcome in outcomes]
        except DataError as error:
            raise SandboxError(f"{self._url}: {error}") from error

    def _ask(self, path: str, body: bytes | None, *, seconds: float, most: int) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                data = response.read(most + 1)
            if len(data) > most:
                raise SandboxError(f"{self._url} answered more than {most} bytes")
            return json.loads(data)
        except urllib.error.HTTPError as error:
            reason = error.read(1000).decode(errors="replace")
            error.close()
            if error.code in (400, 413):
                raise DataError(f"{self._url} refuses a program: {reason}") from error
            raise SandboxError(f"{self._url} answered {error.code}: {reason}") from error
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url}: {type(error).__name__}: {error}") from error
