"""Where an export goes: written beside, then renamed, and never over what nobody gave up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from rlhf_core import ConfigError

_OF_A_RUN = ("run.json", "checkpoints")


def check_output(output: Path, *, overwrite: bool, sources: Sequence[Path]) -> None:
    """Refuse an output whose content would be lost without being asked for, or that is a source.

    Args:
        output: directory to write.
        overwrite: it may be replaced.
        sources: directories that the export is made from.

    Raises:
        ConfigError: see above.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{str(output)!r} is a file; give a directory to write")
    full = output.resolve()
    kept = [Path.cwd().resolve(), Path.home().resolve(), *(source.resolve() for source in sources)]
    if any(full == place or full in place.parents for place in kept):
        raise ConfigError(f"{str(output)!r} holds what is exported, or this very directory; give another output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if any((output / name).exists() for name in _OF_A_RUN):
        raise ConfigError(f"{str(output)!r} is the directory of a run, which is never overwritten; give another")
    if not overwrite:
        raise ConfigError(f"{str(output)!r} is not empty; give another directory, or write --overwrite")


@contextmanager
def written_beside(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which gets its name when the block ends well, else is removed."""
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    folder, old = beside / "new", beside / "old"
    try:
        folder.mkdir()
        yield folder
        there = output.exists()
        if there:
            os.rename(output, old)
        try:
            os.rename(folder, output)
        except OSError:
            if there:
                os.rename(old, output)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
