"""Damaged files of models and checkpoints: which one it is, where a library only says that something is wrong."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_core.errors import CheckpointError

_PATTERNS = ("*.safetensors", "*.pt", "*.bin", "*.json")


def find_damage(files: Iterable[Path]) -> tuple[Path, str] | None:
    """The first of the files that is missing or damaged, with what is wrong with it; None if all can be opened.

    The end of a file tells whether it is complete, so a file that was cut off is found in a moment. Values are not
    read: a flipped bit in a weight is not damage that can be seen here.
    """
    for file in files:
        if problem := _problem(file):
            return file, problem
    return None


@contextlib.contextmanager
def naming_damage(what: str, *places: Path | str) -> Iterator[None]:
    """Where loading fails inside, look for a damaged file, and name it in place of the library's own error.

    Args:
        what: begins the message: "model 'runs/model'".
        places: files, and directories whose safetensors, torch and JSON files are looked at.

    Raises:
        CheckpointError: a file is damaged. Any other error goes on as it is.
    """
    try:
        yield
    except Exception as error:
        if (damage := find_damage(_files(places))) is None:
            raise
        raise damage_error(what, *damage) from error


def damage_error(what: str, file: Path, problem: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(
        f"{what} cannot be loaded: the file {str(file)!r} {problem}; restore it, copy the directory again, or take "
        "another checkpoint"
    )


def _files(places: Iterable[Path | str]) -> Iterator[Path]:
    for place in map(Path, places):
        if place.is_dir():
            for pattern in _PATTERNS:
                yield from sorted(place.glob(pattern))
        elif place.exists():
            yield place


def _problem(file: Path) -> str:
    """What is wrong with a file; empty if nothing is, or nothing that can be known."""
    if not file.exists():
        return "is missing"
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            _check_safetensors(file)
        elif file.suffix in (".pt", ".bin"):
            _check_torch_file(file)
    except (ValueError, zipfile.BadZipFile) as error:
        return f"is damaged ({error})"
    except OSError as error:
        return f"cannot be read ({error})"
    return ""


def _check_torch_file(file: Path) -> None:
    """Torch writes zip archives, whose list of contents is at the end; long ago it wrote plain pickles.

    Raises:
        BadZipFile: says what does not fit.
    """
    with file.open("rb") as stream:
        if stream.read(1) != b"\x80":
            zipfile.ZipFile(stream).close()


def _check_safetensors(file: Path) -> None:
    """The format is eight bytes of the header's length, the header as JSON, and as many bytes as it says.

    Raises:
        ValueError: says what does not fit.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its {size} bytes are fewer than its header says")
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError("its header is not that of a safetensors file") from None
    if size != (whole := 8 + length + max(ends, default=0)):
        raise ValueError(f"it has {size} bytes, its header says {whole}")
