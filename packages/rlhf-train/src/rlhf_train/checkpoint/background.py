"""Checkpoint files written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class PendingFiles:
    """A checkpoint writer for DeepSpeed that copies what it is to save, and writes the files later.

    The copy takes host memory of the size of this rank's checkpoint until the files are written.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._files: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a copy of the state for `write`."""
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state_dict)
        self._files.append((copied, path))

    def write(self) -> None:
        """Write all files, dropping each copy when it is written."""
        while self._files:
            state, path = self._files.pop(0)
            self._writer.save(state, path)
            del state


class SaveThread:
    """A PendingSave whose files are written by a thread of this process."""

    def __init__(self, path: Path, write: Callable[[], None], finish: Callable[[str | None], None]) -> None:
        self.path = path
        self._write, self._finish = write, finish
        self._error: str | None = None
        self._finished = False
        self._thread = threading.Thread(target=self._run, name=f"save {path}", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"

    @property
    def written(self) -> bool:
        """Whether this rank's files are on disk; `wait` then returns as soon as the other ranks' are."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the checkpoint is complete; all ranks together, any number of times.

        Raises:
            RLHFError: a file could not be written on some rank; the directory is then no checkpoint.
        """
        self._thread.join()
        if not self._finished:
            self._finished = True
            self._finish(self._error)
