"""What happens when a reward fails: tried again, then the sample is dropped by name, or the run stops."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_core import (
    Closable,
    ConfigError,
    DroppedSample,
    EngineDiedError,
    PlacesRewards,
    RewardError,
    RewardFunction,
    Score,
    Trajectory,
    UserError,
    check_scores,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureHandling:
    """What a failed reward costs: `attempts` tries, then a dropped sample or the end of the run."""

    attempts: int = 2
    """Times that a batch is tried; 1 does not retry."""
    backoff_s: float = 1.0
    """Pause before the second attempt, doubled before each further one."""
    then: Literal["drop", "stop"] = "stop"
    """`drop`: leave out the samples at fault and keep the others; `stop`: raise the error."""
    max_dropped_in_a_row: int = 256
    """The run stops after this many drops without a score in between: the fault then lies with the reward, not
    with the samples."""
    timeout_s: float | None = None
    """Deadline of an attempt, beside the reward's own. It ends coroutines, not a function that blocks."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.backoff_s < 0 or self.max_dropped_in_a_row < 1:
            raise ConfigError(
                "reward on_failure: needs attempts >= 1, backoff_s >= 0 and max_dropped_in_a_row >= 1, got "
                f"{self.attempts}, {self.backoff_s} and {self.max_dropped_in_a_row}"
            )
        if self.then not in ("drop", "stop"):
            raise ConfigError(f"reward on_failure: then={self.then!r} is unknown; write drop or stop")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """Counts of failed attempts and dropped samples."""

    failed_attempts: int
    """Calls of the reward that raised or returned something unusable."""
    dropped: int
    """Samples left out."""
    latest: tuple[DroppedSample, ...]
    """The last few of them."""


class RobustReward:
    """RewardFunction around another one that handles its failures.

    A batch that still fails after its attempts is cut up until the samples at fault are alone: those that the
    error names, or else by halves. The other samples keep their scores. Errors of the configuration and dead
    engines are never a sample's fault and are always raised.
    """

    def __init__(
        self, reward: RewardFunction, on_failure: FailureHandling | None = None, *, name: str | None = None
    ) -> None:
        self._reward = reward
        self._handling = on_failure or FailureHandling()
        self.name: str = name or getattr(reward, "name", type(reward).__name__)
        self._failed_attempts = self._dropped = self._dropped_in_a_row = 0
        self._warned = False
        self._latest: deque[DroppedSample] = deque(maxlen=16)

    @property
    def report(self) -> FaultReport:
        """The failures since the start."""
        return FaultReport(failed_attempts=self._failed_attempts, dropped=self._dropped, latest=tuple(self._latest))

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        """See RewardFunction.

        Raises:
            RewardError: `then` is stop, or too many samples in a row were dropped.
        """
        return await self._score(trajectories, texts, attempts=self._handling.attempts)

    def placed(self, trajectory: Trajectory) -> Sequence[float]:
        """See PlacesRewards."""
        return self._reward.placed(trajectory) if isinstance(self._reward, PlacesRewards) else ()

    def close(self) -> None:
        """Close the wrapped reward, if it has a `close`."""
        if isinstance(self._reward, Closable):
            self._reward.close()

    async def _score(
        self, trajectories: Sequence[Trajectory], texts: Sequence[str], *, attempts: int
    ) -> list[Score | DroppedSample]:
        if not trajectories:
            return []
        try:
            return await self._attempt(trajectories, texts, attempts)
        except RewardError as error:
            if self._handling.then == "stop":
                raise
            if len(trajectories) == 1:
                return [self._drop(trajectories[0], error)]
            parts = _cut(trajectories, error)
        outcomes: list[Score | DroppedSample | None] = [None] * len(trajectories)

        async def rescore(part: Sequence[int]) -> None:
            found = await self._score([trajectories[i] for i in part], [texts[i] for i in part], attempts=1)
            for index, outcome in zip(part, found, strict=True):
                outcomes[index] = outcome

        await asyncio.gather(*(rescore(part) for part in parts))
        return [outcome for outcome in outcomes if outcome is not None]

    async def _attempt(
        self, trajectories: Sequence[Trajectory], texts: Sequence[str], attempts: int
    ) -> list[Score | DroppedSample]:
        """The scores, from the first attempt that works."""
        for attempt in range(attempts - 1):
            try:
                return await self._once(trajectories, texts)
            except RewardError as error:
                # Whole batches fail at once: one line says so, and the error itself comes at the end.
                level = logging.INFO if self._warned else logging.WARNING
                self._warned = True
                _log.log(level, "attempt %d of %d: %s", attempt + 1, attempts, error)
                await asyncio.sleep(self._handling.backoff_s * 2**attempt)
        return await self._once(trajectories, texts)

    async def _once(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        try:
            call = self._reward.score(trajectories, texts)
            scores = list(await asyncio.wait_for(call, self._handling.timeout_s))
            check_scores(scores, trajectories, source=self.name)
        except (UserError, EngineDiedError):
            raise
        except Exception as error:
            self._failed_attempts += 1
            if (found := self._as_reward_error(error)) is error:
                raise
            raise found from error
        self._dropped_in_a_row = 0
        self._warned = False
        return scores

    def _as_reward_error(self, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        if isinstance(error, TimeoutError) and self._handling.timeout_s is not None:
            return RewardError(f"reward {self.name} did not return within {self._handling.timeout_s:g} s")
        return RewardError(f"reward {self.name} raised {type(error).__name__}: {error}")

    def _drop(self, trajectory: Trajectory, error: RewardError) -> DroppedSample:
        failed = DroppedSample(sample_id=trajectory.sample_id, reason=str(error))
        self._dropped += 1
        self._dropped_in_a_row += 1
        self._latest.append(failed)
        _log.warning("dropped sample %r: %s", failed.sample_id, failed.reason)
        if self._dropped_in_a_row >= self._handling.max_dropped_in_a_row:
            raise RewardError(
                f"reward {self.name} failed for {self._dropped_in_a_row} samples in a row, so the run stops; the "
                f"last was {failed.sample_id!r}: {failed.reason}"
            ) from error
        return failed


def _cut(trajectories: Sequence[Trajectory], error: RewardError) -> list[list[int]]:
    """Indices in parts to be scored again: each sample that the error names alone, else two halves."""
    places = range(len(trajectories))
    named = [i for i in places if trajectories[i].sample_id in set(error.sample_ids)]
    if named and len(named) < len(trajectories):
        return [[i] for i in named] + [[i for i in places if i not in set(named)]]
    middle = len(trajectories) // 2
    return [list(places[:middle]), list(places[middle:])]
