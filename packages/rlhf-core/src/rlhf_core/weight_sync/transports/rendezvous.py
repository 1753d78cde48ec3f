"""Where the ends of a weight link meet: a board with notes, on a TCP store or in a directory.

Bulk data never passes through it. Joining, announcing and acknowledging are a note each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.errors import DeadlineExceeded, WeightSyncError

LEFT = b"left"
"""Posted in place of an announcement or an acknowledgement by an end that leaves."""
GIVEN_UP = b"given up"
"""Posted in place of acknowledgements by one who knows that they will never come."""
_AWAITED = "awaited"
_RELEASED = "released"
_POLL_S = (0.001, 0.02)
_RELEASE_S = 10.0
"""How long a sender that is to be released may take to answer."""


class Board(Protocol):
    """Notes that all ends of a link can post and read."""

    def post(self, key: str, value: bytes = b"") -> None:
        """Put up a note."""
        ...

    def read(self, keys: Sequence[str], *, timeout_s: float, what: str) -> list[bytes]:
        """The notes, once all are up.

        Raises:
            DeadlineExceeded: names `what`, and the keys that are missing.
            WeightSyncError: the other end is gone.
        """
        ...

    def seen(self, key: str) -> bytes | None:
        """The note, if it is up."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Take notes down, so that a long run does not pile them up."""
        ...


class StoreBoard:
    """A board in torch's TCP store, which lives in the sender's process."""

    def __init__(self, address: tuple[str, int] | None, host: str, *, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        limit = timedelta(seconds=timeout_s)
        if address is None:
            # Port 0: the store binds a free port itself and tells which.
            self.store: Any = TCPStore(host, 0, None, True, limit, wait_for_workers=False)
        else:
            self.store = TCPStore(address[0], address[1], None, False, limit, wait_for_workers=False)

    def post(self, key: str, value: bytes = b"") -> None:
        """See Board."""
        with self._lost("posting"):
            self.store.set(key, b"=" + value)

    def read(self, keys: Sequence[str], *, timeout_s: float, what: str) -> list[bytes]:
        """See Board."""
        from torch.distributed import DistStoreError

        with self._lost(what):
            # One call waits for all and fetches them.
            self.store.set_timeout(timedelta(seconds=max(timeout_s, 0.001)))
            try:
                notes = self.store.multi_get(list(keys)) if keys else []
            except DistStoreError:
                missing = [key for key in keys if not self.store.check([key])]
                if missing:
                    raise _late(timeout_s, what, missing) from None
                notes = self.store.multi_get(list(keys))
            return [note[1:] for note in notes]

    def seen(self, key: str) -> bytes | None:
        """See Board."""
        with self._lost("looking for a note"):
            return self.store.get(key)[1:] if self.store.check([key]) else None

    def remove(self, keys: Sequence[str]) -> None:
        """See Board."""
        with self._lost("clearing notes"):
            for key in keys:
                self.store.delete_key(key)

    @contextlib.contextmanager
    def _lost(self, what: str) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(f"the other end of the weight link is gone ({what}): {error}") from error


class DirectoryBoard:
    """A board of small files, for ends that share nothing but a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def post(self, key: str, value: bytes = b"") -> None:
        """See Board. A note appears at once with its content."""
        path = self.directory / key.replace("/", ".")
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(value)
            unfinished.replace(path)
        except OSError as error:
            raise WeightSyncError(f"no note can be left in {self.directory}: {error}") from error

    def read(self, keys: Sequence[str], *, timeout_s: float, what: str) -> list[bytes]:
        """See Board."""
        paths = [self.directory / key.replace("/", ".") for key in keys]
        deadline, pause = time.monotonic() + timeout_s, _POLL_S[0]
        while missing := [key for key, path in zip(keys, paths, strict=True) if not path.exists()]:
            if time.monotonic() > deadline:
                raise _late(timeout_s, what, missing)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        try:
            return [path.read_bytes() for path in paths]
        except OSError as error:
            raise WeightSyncError(f"a note of the weight link vanished ({what}): {error}") from error

    def await_file(self, name: str, *, timeout_s: float, what: str, root: Path) -> None:
        """Block until a file of the directory is there; `root` vanishes when the sender closes."""
        deadline, pause = time.monotonic() + timeout_s, _POLL_S[0]
        while not (self.directory / name).exists():
            if not root.exists():
                raise WeightSyncError(f"the sender closed the weight link at {root} in the middle of a sync")
            if time.monotonic() > deadline:
                raise _late(timeout_s, what, [name])
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def seen(self, key: str) -> bytes | None:
        """See Board."""
        path = self.directory / key.replace("/", ".")
        return path.read_bytes() if path.exists() else None

    def remove(self, keys: Sequence[str]) -> None:
        """See Board."""
        for key in keys:
            (self.directory / key.replace("/", ".")).unlink(missing_ok=True)


def _late(timeout_s: float, what: str, missing: Sequence[str]) -> DeadlineExceeded:
    return DeadlineExceeded(f"waited {timeout_s:g} s for {what}; missing: {', '.join(missing)}")


def accept(board: Board, link: Any) -> None:
    """The sender's half of the meeting."""
    _answers(board, link, "receiver", f"{link.receivers} receiver(s) to join")
    board.post("accepted")


def ask(board: Board, link: Any, rank: int) -> None:
    """A receiver's half of the meeting."""
    board.post(f"receiver/{rank}")
    what = f"the sender of the {link.kind} weight link at {link.address} to accept receiver {rank}"
    board.read(["accepted"], timeout_s=link.timeout_s, what=what)


def await_receivers(board: Board, link: Any, note: str) -> None:
    """Block until every receiver has posted `note/<rank>`; then take the notes down.

    Raises:
        DeadlineExceeded: names the receivers that have not.
        WeightSyncError: one of them has left, or the sync was given up.
    """
    answers = _answers(board, link, note, "receivers to take the weights that come over")
    if gone := [rank for rank, answer in enumerate(answers) if answer == LEFT]:
        ranks = ", ".join(map(str, gone))
        raise WeightSyncError(f"receiver(s) {ranks} left the {link.kind} weight link in the middle of a sync")
    board.remove([f"{note}/{rank}" for rank in range(link.receivers)])


def _answers(board: Board, link: Any, note: str, what: str) -> list[bytes]:
    board.post(_AWAITED, note.encode())
    keys = [f"{note}/{rank}" for rank in range(link.receivers)]
    what = f"{what} the {link.kind} weight link at {link.address}"
    answers = board.read(keys, timeout_s=link.timeout_s, what=what)
    if GIVEN_UP in answers:
        raise WeightSyncError(f"waiting for {what} was given up, since not all of them live")
    return answers


def release_sender(board: Board, link: Any) -> None:
    """Answer in the receivers' place what the sender waits for (see `Transport`), and tell its guard."""
    board.post(_RELEASED)
    if (note := board.seen(_AWAITED)) is not None:
        for rank in range(link.receivers):
            board.post(f"{note.decode()}/{rank}", GIVEN_UP)


def released(board: Board) -> bool:
    """Whether somebody has called `release_sender`."""
    return board.seen(_RELEASED) is not None


def store_address(link: Any) -> tuple[str, int]:
    """Host and port of a link whose board is a store."""
    host, port = link.address.rsplit(":", 1)
    return host, int(port)


def reach(link: Any, rank: int) -> StoreBoard:
    """A receiver's board on the sender's store.

    Raises:
        DeadlineExceeded: nothing listens at the link's address.
    """
    return _reach(link, f"weight receiver {rank}", link.timeout_s)


def reach_to_release(link: Any) -> StoreBoard:
    """The board of whoever releases a sender, which may be gone by now.

    Raises:
        DeadlineExceeded: nothing listens at the link's address.
    """
    try:  # torch would go on knocking until its timeout where nothing listens any more
        socket.create_connection(store_address(link), timeout=min(_RELEASE_S, link.timeout_s)).close()
    except OSError as error:
        raise DeadlineExceeded(f"no sender listens at {link.address} any more: {error}") from error
    return _reach(link, "whoever releases the sender", min(_RELEASE_S, link.timeout_s))


def _reach(link: Any, who: str, timeout_s: float) -> StoreBoard:
    try:
        return StoreBoard(store_address(link), "", timeout_s=timeout_s)
    except (RuntimeError, OSError) as error:
        raise DeadlineExceeded(
            f"{who} found no sender at {link.address} within {timeout_s:g} s: {error}"
        ) from error
