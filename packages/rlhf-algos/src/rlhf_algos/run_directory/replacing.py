"""A folder that is there whole or not at all: written beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_folder(final: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `final` when the block ends well.

    A process that is killed in the block leaves `final` as it was, and the new folder under another name, which the
    next one to write there removes.
    """
    beside = begin_beside(final)
    yield beside
    put_in_place(beside, final)


def begin_beside(final: Path) -> Path:
    """A new, empty folder next to `final`."""
    beside = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def put_in_place(beside: Path, final: Path) -> None:
    """Give a written folder its name; what had that name is removed after that."""
    old = final.with_name(f"{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(beside, final)
    shutil.rmtree(old, ignore_errors=True)
