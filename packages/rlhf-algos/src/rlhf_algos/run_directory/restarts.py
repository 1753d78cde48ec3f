"""A run that begins again from its newest checkpoint, within one command, after it has lost a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlhf_core import DeadlineExceeded, EngineDiedError, RLHFError, StopRequest, UserError

from rlhf_algos.run_directory.checkpoints import Checkpoint, CheckpointStore

T = TypeVar("T")


def with_restarts(
    attempt: Callable[[Checkpoint | None], T],
    begin: Checkpoint | None,
    store: CheckpointStore,
    *,
    limit: int,
    stop: StopRequest,
    say: Callable[[str], None],
) -> T:
    """The result of an attempt, which is made anew from the newest checkpoint when a worker was lost.

    Args:
        attempt: the run from a checkpoint, or from its start, to its end; has closed everything when it raises.
        begin: what the first attempt goes on from.
        store: where the later ones find theirs.
        limit: attempts after the first one.
        stop: a run that was asked to end does not begin again.
        say: is told why the run begins again, and from where.

    Raises:
        RLHFError: what ended the last attempt, with a note of what had ended the first.
    """
    causes: list[str] = []
    while True:
        try:
            return attempt(begin)
        except RLHFError as error:
            if causes:
                error.add_note(f"the run had begun again {len(causes)} time(s); at first because: {causes[0]}")
            if len(causes) >= limit or stop.reason is not None or not can_begin_again(error):
                raise
            causes.append(str(error))
        begin = store.latest() if store.steps() else None
        where = "from its start, since it has no checkpoint yet" if begin is None else f"after step {begin.step}"
        say(f"{causes[-1]}\nrestart {len(causes)} of {limit}: the run begins again {where}")


def can_begin_again(error: BaseException | None) -> bool:
    """Whether a run that ended by this error may be expected to get further with new workers.

    So it is after the loss of a worker and after a wait without progress; not after a mistake in the input, an end
    that was asked for, or a training that has diverged.
    """
    seen: set[int] = set()  # an error that was raised again from one of its own causes is a circle
    while error is not None and id(error) not in seen and not isinstance(error, UserError):
        if isinstance(error, EngineDiedError | DeadlineExceeded):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False
