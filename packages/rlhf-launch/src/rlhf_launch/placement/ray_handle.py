"""A worker in a Ray actor: how it is called, where it runs, and what its failures were first of all."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import EngineDiedError, ResourceError, RLHFError, UserError

from rlhf_launch.workers.handles import finished
from rlhf_launch.workers.process import use_address
from rlhf_launch.workers.pulse import Pulse

PULSE = "pulse"
"""The threads of an actor that answer while its others are busy."""


class RayHandle:
    """A worker in a Ray actor."""

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        logs: Path | None = None,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Call an actor.

        Args:
            name: of the worker.
            actor: Ray's handle.
            logs: where its process writes its logs, if that is known.
            on_death: is told the name of a worker whose process died.
        """
        self.name = name
        self.place: Place | None = None
        """Where it runs, once its process is up and has said so."""
        self._actor = actor
        self._logs, self._on_death = logs, on_death
        self._lock = threading.Lock()
        self._under_way: set[Future[Any]] = set()
        self._lost: RLHFError | None = None

    @property
    def described(self) -> str:
        """The worker's name, with its process and host where they are known."""
        place = self.place
        return self.name if place is None else f"{self.name} (process {place.pid} on {place.address})"

    def find_place(self) -> None:
        """Ask the worker where it runs."""

        def note(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self.place = done.result()
            elif isinstance(cause := _first_cause(self.name, "settling in", error), UserError):
                self.lose(cause)

        actor: Any = self._actor
        actor.__ray_call__.remote(_settle_in).future().add_done_callback(note)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See handles.Handle; errors arrive as the worker raised them."""
        return self._settled(method, lambda: getattr(self._actor, method).remote(*args, **kwargs))

    def _settled(self, method: str, start: Callable[[], Any]) -> Future[Any]:
        """The future of a call, with errors as the worker raised them."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            self._under_way.add(future)
        raw: Future[Any] = start().future()

        def settle(done: Future[Any]) -> None:
            if not self._ends(future):
                return
            error = done.exception()
            if error is None:
                future.set_result(done.result())
                return
            try:
                error = _first_cause(self.described, method, error)
                if isinstance(error, EngineDiedError) and self._actor is not None:
                    self._on_death(self.name)
                    if self._logs is not None:
                        error.add_note(f"the logs of {self.name} are in {self._logs} until the next run starts")
            finally:  # whatever happens here, the caller must hear of the failure
                future.set_exception(error)

        raw.add_done_callback(settle)
        return future

    def lose(self, error: RLHFError) -> None:
        """Let all calls fail by this error, those under way and later ones: the worker is out of reach."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            given_up, self._under_way = self._under_way, set()
        for future in given_up:
            future.set_exception(error)

    def _ends(self, future: Future[Any]) -> bool:
        """Whether a call was still under way, which is over now."""
        with self._lock:
            if future not in self._under_way:
                return False
            self._under_way.discard(future)
            return True

    def pulse(self) -> Future[Pulse]:
        """See Handle."""
        if self._actor is None:
            raise EngineDiedError(f"{self.name} is closed")
        return self._settled("pulse", self._actor.pulse.options(concurrency_group=PULSE).remote)

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        return finished(None) if self._actor is None else self.call("close")

    def end(self) -> None:
        """See Handle."""
        if self._actor is None:
            return
        import ray

        actor, self._actor = self._actor, None
        if self._lost is None:  # else Ray may wait for an answer that will not come
            ray.kill(actor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker runs."""

    node: str
    """Ray's id of the host."""
    address: str
    pid: int
    started: str
    """When the process was started, in the kernel's ticks: a number may be given to another process later."""

    def kill(self) -> None:
        """End the process, if it is still there; for a worker on this host."""
        if _started(self.pid) == self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def at_home(worker: type) -> type:
    """The class of a worker that has the `host_address` that Ray knows from its first call on."""

    # Not by a call ahead of the others, which Ray may run in any order where they are asynchronous.
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        import ray

        with contextlib.suppress(ResourceError):  # `RayHandle.find_place` hears of it
            use_address(ray.util.get_node_ip_address())
        worker.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(worker.__name__, (worker,), {"__init__": construct, "__doc__": worker.__doc__})


def _settle_in(worker: Any) -> Place:
    """Runs in a worker: where it is, if the address that it is to use is one of this host."""
    import ray

    address = ray.util.get_node_ip_address()
    use_address(address)
    node, pid = ray.get_runtime_context().get_node_id(), os.getpid()
    return Place(node=node, address=address, pid=pid, started=_started(pid))


def _started(pid: int) -> str:
    """When a process was started; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _first_cause(name: str, method: str, error: BaseException) -> BaseException:
    """The exception that the worker raised, without Ray's wrapper around it."""
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            cause.add_note(f"raised by {name} in {method}; its traceback:\n{error}")
            return cause
        return error
    if isinstance(error, RayActorError):
        # Of Ray's lines, those with ids say nothing to a reader.
        said = " ".join(str(error).split())
        return EngineDiedError(
            f"{name} died during {method}: {said[max(0, said.find('The actor is dead because')) :]}"
        )
    return error
