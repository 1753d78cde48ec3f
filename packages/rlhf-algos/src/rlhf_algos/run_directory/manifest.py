"""The list of a checkpoint's files, by which it is known to be whole: names, sizes and digests."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError

MANIFEST = "manifest.json"

_WHOLE_BYTES = 64 << 20
_END_BYTES = 1 << 20


def files_below(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder by its name there, `policy/engine.json`; without the manifest itself."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    return {name: size for name, size in sorted(found.items()) if name != MANIFEST}


def write_manifest(folder: Path) -> None:
    """List the files below a folder, and bring them and the list to the disk itself, past the system's buffers."""
    entries: dict[str, Any] = {}
    for name, size in files_below(folder).items():
        _flush(folder / name)
        entries[name] = {"bytes": size, "sha256": digest(folder / name)}
    path = folder / MANIFEST
    path.write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")
    _flush(path)
    for directory in {path.parent for path in _files(folder)}:
        _flush(directory)


def manifest_problem(folder: Path) -> str | None:
    """What a folder lacks of what its manifest lists; None if it is whole.

    The digest of a file above 64 MiB is that of its size, its first and its last MiB: it tells a file that was cut
    off or whose end never reached the disk, not a flipped bit in its middle.
    """
    try:
        listed: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged ({type(error).__name__})"
    for name, entry in listed.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, {entry['bytes']} were written"
            if digest(file) != entry["sha256"]:
                return f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def digest(file: Path) -> str:
    """SHA-256 of a file; of a large one, of its size and its two ends."""
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(content, "sha256").hexdigest()
        hashed = hashlib.sha256(str(size).encode())
        hashed.update(content.read(_END_BYTES))
        content.seek(-_END_BYTES, os.SEEK_END)
        hashed.update(content.read())
        return hashed.hexdigest()


def check_seen_here(folder: Path, seen: Sequence[tuple[str, Mapping[str, int]]], *, wait_s: float = 60.0) -> None:
    """Make sure that what ranks have written is in the folder that this process sees.

    Args:
        folder: what the ranks wrote into.
        seen: each rank's host, and the files below the folder that it sees, with their bytes.
        wait_s: a network file system may show another host's files after a while.

    Raises:
        ConfigError: files of a rank are not here, so its host has another folder of that name.
    """
    ends = time.monotonic() + wait_s
    while True:
        here = files_below(folder)
        lost = [
            (rank, host, name)
            for rank, (host, files) in enumerate(seen)
            for name, size in files.items()
            if here.get(name) != size
        ]
        if not lost:
            return
        if time.monotonic() > ends:
            rank, host, name = lost[0]
            raise ConfigError(
                f"rank {rank} on {host} wrote {name!r} of the checkpoint in {str(folder)!r}, which this process on "
                f"{socket.gethostname()} does not see ({len(lost)} such files); output must be a folder that "
                "all hosts share"
            )
        time.sleep(0.5)


def flush_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: a renamed file survives a power failure only then."""
    _flush(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
