"""What a failure or a missed deadline costs: the run, the sample, or another attempt."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlhf_core import DroppedSample

from rlhf_rollout.agents.config import AgentConfig
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def attempts(
    config: AgentConfig, sample_id: str, attempt: Callable[[int], Awaitable[T]]
) -> T | DroppedSample:
    """What the first attempt that succeeds gives, as `on_error` and `on_deadline` say.

    Args:
        config: says what a failure costs.
        sample_id: of the sample, for messages.
        attempt: is called with the number of attempts before.

    Raises:
        EnvironmentFailed: an attempt failed, and `on_error` is raise.
        EnvironmentTooSlow: one missed a deadline, and `on_deadline` is raise.
    """
    reason = ""
    for number in range(config.attempts):
        try:
            return await attempt(number)
        except (EnvironmentFailed, EnvironmentTooSlow) as error:
            policy = config.on_deadline if isinstance(error, EnvironmentTooSlow) else config.on_error
            if policy == "raise":
                raise type(error)(f"sample {sample_id!r}: {error}") from error
            reason = str(error)
            _log.warning("sample %r, attempt %d: %s", sample_id, number + 1, reason)
            if policy != "retry":
                break
    return DroppedSample(sample_id=sample_id, reason=reason)
