"""The engine's own stream of random numbers (dropout), apart from the process's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomState:
    """A context in which torch draws from this stream; outside it, torch's own stream goes on undisturbed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=self._cuda):
            torch.manual_seed(seed)
            self.state = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    def _write(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, saved in zip(self._cuda, state[1:], strict=True):
            torch.cuda.set_rng_state(saved, device)

    def __enter__(self) -> None:
        self._outside = self._read()
        self._write(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = self._read()
        self._write(self._outside)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which torch draws from this stream, too, but which leaves the stream where it stood."""
        before = list(self.state)
        try:
            with self:
                yield
        finally:
            self.state = before
