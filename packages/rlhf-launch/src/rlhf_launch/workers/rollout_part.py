"""The worker that is the part of a rollout engine on one of its other hosts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace

from rlhf_core import ROLLOUT_BACKENDS, EngineDiedError, EnginePart, RolloutConfig, load_plugin


class RolloutPart:
    """The part of an engine on `config.host`; the engine itself is a `RolloutWorker` on its host 0."""

    def __init__(self, backend: str, config: RolloutConfig, env_vars: Mapping[str, str]) -> None:
        os.environ.update(env_vars)
        self._backend_name = backend
        self._config = config
        self._part: EnginePart | None = None

    async def start(self, meeting: str) -> None:
        """Build the part; returns when the engine and all of its parts are there.

        Args:
            meeting: see RolloutWorker.meeting.
        """
        config = replace(self._config, meeting=meeting)
        part = load_plugin(ROLLOUT_BACKENDS, self._backend_name).part
        # On a thread of its own, so that it can be closed while it waits for an engine that does not come.
        self._part = await asyncio.to_thread(part, config)

    async def wait(self) -> None:
        """Return when the part was closed.

        Raises:
            EngineDiedError: it has ended by itself, with the reason.
        """
        part = self._part
        if part is None:
            raise EngineDiedError("the part was not started")
        why = await asyncio.to_thread(part.wait)
        if self._part is not None:
            raise EngineDiedError(why)

    async def close(self) -> None:
        """Release everything; may be called twice."""
        part, self._part = self._part, None
        if part is not None:
            await asyncio.to_thread(part.close)
