"""Programs and outcomes as JSON, for a sandbox behind HTTP.

    POST /v1/run   {"programs": [PROGRAM]} or two, which are linked
                   PROGRAM: {"command": [...], "files": {name: base64}, "stdin": base64, "env_vars": {...},
                             "limits": {"wall_s": ..., "memory_bytes": ..., ...}}
    answer         {"outcomes": [{"exit_code": 0, "stdout": base64, "stderr": base64, "limit": ""}]}
    GET /v1/health {"sandbox": "BubblewrapSandbox"}

An error is {"error": text}: 400 for a request that is wrong, 401 without the token, 413 for one that is too large,
503 where the sandbox failed, which may be tried again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rlhf_core import DataError, Program, ProgramLimits, ProgramOutcome, UserError

_LIMITS = {one.name: float if one.name == "wall_s" else int for one in fields(ProgramLimits)}
_VERDICTS = ("", "time", "memory", "processes", "output", "files")


def program_to_json(program: Program) -> dict[str, Any]:
    """See the module."""
    return {
        "command": list(program.command),
        "files": {name: _text(content) for name, content in program.files.items()},
        "stdin": _text(program.stdin),
        "env_vars": dict(program.env_vars),
        "limits": asdict(program.limits),
    }


def program_from_json(found: Any) -> Program:
    """See the module.

    Raises:
        DataError: it is no program.
    """
    try:
        limits = dict(found.get("limits", {}))
        if unknown := set(limits) - set(_LIMITS):
            raise DataError(f"there is no limit {min(unknown)!r}")
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in limits.values()):
            raise DataError("limits must be numbers")
        return Program(
            command=tuple(_string(word) for word in found["command"]),
            files={_string(name): _bytes(content) for name, content in found.get("files", {}).items()},
            stdin=_bytes(found.get("stdin", "")),
            env_vars={_variable(name): _string(value) for name, value in found.get("env_vars", {}).items()},
            limits=ProgramLimits(**{name: _LIMITS[name](value) for name, value in limits.items()}),  # type: ignore[arg-type]
        )
    except UserError as error:
        raise DataError(f"not a program: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"not a program: {type(error).__name__}: {error}") from None


def outcome_to_json(outcome: ProgramOutcome) -> dict[str, Any]:
    """See the module."""
    return {
        "exit_code": outcome.exit_code,
        "stdout": _text(outcome.stdout),
        "stderr": _text(outcome.stderr),
        "limit": outcome.limit,
    }


def outcome_from_json(found: Any) -> ProgramOutcome:
    """See the module.

    Raises:
        DataError: it is no outcome.
    """
    if not isinstance(found, Mapping) or found.get("limit") not in _VERDICTS:
        raise DataError(f"not an outcome: {str(found)[:200]}")
    try:
        return ProgramOutcome(
            exit_code=int(found["exit_code"]),
            stdout=_bytes(found["stdout"]),
            stderr=_bytes(found["stderr"]),
            limit=found["limit"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not an outcome: {type(error).__name__}: {error}") from None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(content: Any) -> bytes:
    try:
        return base64.b64decode(_string(content), validate=True)
    except binascii.Error as error:
        raise DataError(f"not base64: {error}") from None


def _string(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise DataError(f"needs text, got {str(value)[:80]!r}")
    return value


def _variable(name: Any) -> str:
    if not _string(name) or "=" in name:
        raise DataError(f"no name of an environment variable: {name!r}")
    return name
