"""Whether the processes that a cluster lives by still answer: found out by knocking at their ports."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_PERIOD_S = 2.0
_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """A port at which a process listens for as long as it lives."""

    name: str
    """Whose it is, for messages."""
    host: str
    port: int
    refused_s: float = 3.0
    """Nothing may listen there for so long: the process has ended, or is being started again."""
    silent_s: float = 30.0
    """The host may give no answer for so long: it is off, cut off, or very busy."""


class DoorWatch:
    """Knocks at doors, on a thread of its own, until it is closed; tells of each that stays shut, once.

    Args:
        on_lost: is told of a door, and why it counts as lost, on the watch's thread.
        period_s: between two rounds.
    """

    def __init__(self, on_lost: Callable[[Door, str], None], *, period_s: float = _PERIOD_S) -> None:
        self._on_lost = on_lost
        self._period_s = period_s
        self._lock = threading.Lock()
        self._shut: dict[Door, tuple[str, float] | None] = {}
        """What keeps a door shut, and since when; None while somebody answers there."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, doors: Iterable[Door]) -> None:
        """Knock at these, too."""
        with self._lock:
            for door in doors:
                self._shut.setdefault(door, None)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._watch, name="door-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Knock no more; may be called twice, and from `on_lost`."""
        self._closed.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def refused(self) -> list[tuple[Door, str]]:
        """The doors at which nothing listens now, for however long that has been so, and the words for it."""
        with self._lock:
            doors = list(self._shut)
        return [(door, _not_listening(door)) for door in doors if self._knock(door) == "refused"]

    def _watch(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="knock") as knockers:
            while not self._closed.wait(self._period_s):
                with self._lock:
                    doors = list(self._shut)
                begun = time.monotonic()
                try:
                    found = zip(doors, knockers.map(self._knock, doors), strict=True)
                except RuntimeError:  # the interpreter ends
                    return
                for door, why in [self._note(door, answer, begun) for door, answer in found]:
                    if why is not None and not self._closed.is_set():
                        self._on_lost(door, why)

    def _knock(self, door: Door) -> str | None:
        """What keeps a door shut; None if somebody answers."""
        try:
            with contextlib.closing(socket.create_connection((door.host, door.port), timeout=self._period_s)):
                return None
        except ConnectionError:
            return "refused"
        except OSError:
            return "silent"

    def _note(self, door: Door, answer: str | None, now: float) -> tuple[Door, str | None]:
        """Why a door counts as lost from now on; None if it does not."""
        with self._lock:
            last = self._shut[door]
            if answer is None:
                self._shut[door] = None
                return door, None
            # A host that is silent and then refuses has lost the process meanwhile: its time counts anew.
            since = last[1] if last is not None and last[0] == answer else now
            self._shut[door] = (answer, since)
            limit = door.refused_s if answer == "refused" else door.silent_s
            if now - since < limit:
                return door, None
            del self._shut[door]
        if answer == "refused":
            return door, _not_listening(door)
        silent = f"{door.host}:{door.port} has not answered for {now - since:.0f} s"
        return door, f"{silent}; the host is off, or cut off from this one"


def _not_listening(door: Door) -> str:
    return f"nothing listens at {door.host}:{door.port} any more, where it did"
