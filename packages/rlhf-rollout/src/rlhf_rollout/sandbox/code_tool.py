"""A tool for agents: Python that the policy writes, run in a sandbox."""

from __future__ import annotations

from rlhf_core import Program, ProgramLimits, Sandbox

from rlhf_rollout.sandbox.choice import open_sandbox


class CodeTool:
    """Makes the tool `run_python` of a sandbox: `ToolEnvironment(tools=[CodeTool().run_python])`.

    Raises:
        CapabilityError: there is no such sandbox here.
    """

    def __init__(
        self, sandbox: str | Sandbox = "auto", *, limits: ProgramLimits | None = None, max_chars: int = 4096
    ) -> None:
        """Open the sandbox that is named, unless one is given."""
        self._sandbox = open_sandbox(sandbox, what="the tool run_python") if isinstance(sandbox, str) else sandbox
        self._limits = limits or ProgramLimits()
        self._max_chars = max_chars

    def run_python(self, code: str) -> str:
        """Run a Python program and get what it prints. Nothing is kept from one call to the next.

        Args:
            code: The program.
        """
        program = Program(
            command=("python", "main.py"),
            files={"main.py": code.encode(errors="replace")},
            limits=self._limits,
        )
        outcome = self._sandbox.run(program)
        text = (outcome.stdout + outcome.stderr).decode(errors="replace")
        if len(text) > self._max_chars:
            text = f"{text[: self._max_chars]}\n... ({len(text)} characters)"
        if outcome.limit:
            return f"{text}\n(stopped: too much {outcome.limit})"
        return text if outcome.exit_code == 0 else f"{text}\n(exit code {outcome.exit_code})"

    def close(self) -> None:
        """Let go of the sandbox."""
        self._sandbox.close()
