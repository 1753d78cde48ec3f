"""The pulse of a worker: what it has got done, what it is doing and where it stands, told while it is busy."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from rlhf_core import noted_progress

_FRAMES = 6
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """An answer of a worker's process, given beside the call that it is busy with."""

    progress: Mapping[str, int] = field(default_factory=dict)
    """What it has noted (`rlhf_core.note_progress`), and the MiB that it and its children have moved to and from
    disks."""
    doing: str = "nothing"
    """The calls under way, with their seconds."""
    stack: str = ""
    """The innermost frames of the thread of the latest call."""


class CallsUnderWay:
    """The calls that are under way in a worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[str, float, int]] = {}

    @contextlib.contextmanager
    def under_way(self, method: str) -> Iterator[None]:
        """A block that carries out a call, on this thread."""
        number = next(self._numbers)
        self._under_way[number] = (method, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            del self._under_way[number]

    def pulse(self) -> Pulse:
        """The pulse of this process, with these calls as what it is doing."""
        calls = list(self._under_way.copy().values())
        if not calls:
            return Pulse(progress=own_progress())
        counts: dict[str, tuple[int, float]] = {}
        for method, since, _ in calls:
            number, oldest = counts.get(method, (0, since))
            counts[method] = (number + 1, min(oldest, since))
        now = time.monotonic()
        parts = [
            (f"{number} x " if number > 1 else "") + f"{method} since {now - since:.0f} s"
            for method, (number, since) in counts.items()
        ]
        return Pulse(progress=own_progress(), doing=", ".join(parts), stack=_stack(calls[-1][2]))


def attended(worker: type) -> type:
    """The class of a worker whose calls are watched, with a method `pulse` that tells of them.

    `pulse` may be called from any thread while another method runs.
    """

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self._calls = CallsUnderWay()
        with self._calls.under_way("construction"):
            worker.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def pulse(self: Any) -> Pulse:
        return self._calls.pulse()

    methods: dict[str, Any] = {"__init__": construct, "pulse": pulse, "__doc__": worker.__doc__}
    for name, method in inspect.getmembers(worker, inspect.isfunction):
        if not name.startswith("_"):
            methods[name] = _attended_method(name, method)
    return type(worker.__name__, (worker,), methods)


def _attended_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._calls.under_way(name):
            return method(self, *args, **kwargs)

    @wraps(method)
    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._calls.under_way(name):
            return await method(self, *args, **kwargs)

    return coroutine if inspect.iscoroutinefunction(method) else call


def own_progress() -> dict[str, int]:
    """What this process has got done until now; see `Pulse.progress`."""
    return {**noted_progress(), "MiB of disk": _disk_bytes(os.getpid()) // _MIB}


def _disk_bytes(process: int) -> int:
    """Bytes that a process and its children have moved from and to disks; 0 where the system does not say."""
    folder = Path("/proc") / str(process)
    total = 0
    try:
        lines = (folder / "io").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes", "write_bytes")))
        tasks = list((folder / "task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return total
    return total + sum(_disk_bytes(int(child)) for child in children)


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
