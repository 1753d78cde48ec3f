"""What becomes of a run that cannot write: one message with the folder and the room that is left in it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_core import ResourceError, UserError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR})
_WORDS = ("no space left on device", "disk quota exceeded", "file too large", "os error 28")
# torch names neither the file nor the reason: a write that came out short is all that it says.
_TORCH_WORDS = ("pytorchstreamwriter failed", "unexpected pos")
_NEARLY_FULL = 16 << 20


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Where something inside cannot be written, say in which folder and how much room is left.

    Args:
        folder: what a run writes to.

    Raises:
        ResourceError: the disk or a quota is full, or the place refuses writers; any other error goes on as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (message := writing_problem(error, folder)) is None:
            raise
        found = ResourceError(message)
        # A file that cannot be closed either may have taken the place of the error that ended the run.
        for note in dict.fromkeys(note for cause in _causes(error) for note in getattr(cause, "__notes__", [])):
            found.add_note(note)
        raise found from error


def writing_problem(error: BaseException, folder: Path) -> str | None:
    """The message for an error that comes of a full disk or of a place that refuses writers; None for any other."""
    for cause in _causes(error):
        text = str(cause).lower()
        full = isinstance(cause, OSError) and cause.errno in _FULL
        if full or any(words in text for words in _WORDS + _TORCH_WORDS):
            return _full_message(cause, folder)
        if isinstance(cause, OSError) and _refuses(cause, folder):
            reason = os.strerror(cause.errno or 0)
            return (
                f"{str(cause.filename or folder)!r} cannot be written: {reason.lower()}; mend its permissions, or "
                "give another output"
            )
    return None


def _refuses(error: OSError, folder: Path) -> bool:
    """Whether the folder refuses writers; an open file does not say its name when its disk turns read-only."""
    if error.errno == errno.EROFS and error.filename is None:
        return True
    return error.errno in _REFUSED and _inside(error.filename, folder)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the newest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _full_message(cause: BaseException, folder: Path) -> str:
    named = getattr(cause, "filename", None)
    places = [Path(os.fsdecode(named)).parent] if isinstance(named, str | bytes) else [folder]
    # What is full may be another disk than the run's own: of temporary files, or of memory shared with workers.
    others = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    places += [place for place in others if place.is_dir() and _free(place) < _NEARLY_FULL]
    rooms = ", ".join(f"{str(place)!r} has {_readable(_free(place))} left" for place in dict.fromkeys(places))
    return (
        f"the disk is full: {rooms} ({type(cause).__name__}: {str(cause).splitlines()[0]}). What was complete "
        "before is as it was; make room (checkpoint.keep says how many checkpoints stay), then go on with --resume"
    )


def _inside(filename: object, folder: Path) -> bool:
    """Whether a file is of the folder, or is what keeps it from being made."""
    if not isinstance(filename, str | bytes):
        return False
    file, root = Path(os.fsdecode(filename)).absolute(), folder.absolute()
    return file.is_relative_to(root) or root.is_relative_to(file)


def _free(place: Path) -> int:
    """Bytes that are free for this user on the disk of a folder, or of the nearest folder above it that exists."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _readable(size: int) -> str:
    """
    >>> _readable(0), _readable(3 << 20)
    ('0 bytes', '3.0 MiB (3145728 bytes)')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name} ({size} bytes)"
    return f"{size} bytes"
