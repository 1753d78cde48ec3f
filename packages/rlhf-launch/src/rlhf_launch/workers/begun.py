"""Work that is begun on all ranks of a role, so that several roles can work at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from rlhf_launch.workers.handles import Handle
from rlhf_launch.workers.waits import Waits

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Generic[T]):
    """One method under way on the ranks of a role."""

    what: str
    """The role and what it does, for messages: `policy to take a step`."""
    calls: Sequence[Future[Any]]
    """One for each rank."""
    workers: Sequence[Handle]
    """The ranks."""
    waits: Waits
    """How the run waits."""
    conclude: Callable[[list[Any]], T]
    """Makes the result of the role of those of its ranks."""

    def result(self) -> T:
        """Wait for all ranks; see `Waits.gather` for what it raises."""
        return results_of([self])[0]


def results_of(begun: Sequence[Begun[T]]) -> list[T]:
    """The results of work under way, in order; see `Waits.gather` for what it raises.

    All of it is one wait: a failure or a loss in one role is heard of at once, whichever is looked at first.
    """
    if not begun:
        return []
    found = iter(
        begun[0].waits.gather(
            [call for work in begun for call in work.calls],
            what=" and ".join(work.what for work in begun),
            workers=[worker for work in begun for worker in work.workers],
        )
    )
    return [work.conclude(list(islice(found, len(work.calls)))) for work in begun]
