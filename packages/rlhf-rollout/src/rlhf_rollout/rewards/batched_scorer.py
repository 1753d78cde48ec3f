"""One reward model, asked by many at once: the calls that wait for it are joined into one batch.

Each call keeps to itself all the same: its rows run together and with no others, so that its numbers are the same
bits whatever else was waiting, on a busy machine as on a quiet one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from rlhf_core import RUN_TOGETHER, Batch, ModelOutputs, concatenate


class Scorer(Protocol):
    """Whatever scores batches with a model: a training engine in the reward role, or a group of its ranks."""

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine."""
        ...


class JoinedScorer:
    """Calls a scorer from a thread of its own, one call at a time.

    While the model works on one batch, the groups that finish meanwhile gather; the next batch takes them all.
    So several ranks work on several groups, and never see the calls in different orders.
    """

    def __init__(self, scorer: Scorer, *, max_rows: int = 1024) -> None:
        """`max_rows` bounds what is joined; a single larger call goes as it is."""
        self._scorer = scorer
        self._max_rows = max_rows
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")

    async def score(self, batch: Batch, outputs: Sequence[str]) -> ModelOutputs:
        """The outputs for these rows, as if they had been alone."""
        call = _Call(batch=batch, outputs=tuple(outputs), future=Future())
        with self._lock:
            self._waiting.append(call)
        self._thread.submit(self._serve)
        return await asyncio.wrap_future(call.future)

    def close(self) -> None:
        """End the thread; calls that wait are cancelled."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for call in waiting:
            call.future.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        calls = [call for call in self._take() if call.future.set_running_or_notify_cancel()]
        if not calls:
            return
        try:
            # Only tokens and masks, which is what a model reads.
            batch = concatenate([replace(call.batch, columns={}) for call in calls])
            numbers = torch.arange(len(calls)).repeat_interleave(torch.tensor([call.batch.rows for call in calls]))
            found = self._scorer.score(batch.with_columns(**{RUN_TOGETHER: numbers}), calls[0].outputs)
            start = 0
            for call in calls:
                width = call.batch.token_ids.shape[1]
                call.future.set_result(found.of_rows(slice(start, start + call.batch.rows), width=width))
                start += call.batch.rows
        except BaseException as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)

    def _take(self) -> list[_Call]:
        """Calls for the same outputs, the oldest first; an earlier turn may have left none."""
        taken: list[_Call] = []
        with self._lock:
            while self._waiting and (
                not taken
                or (
                    self._waiting[0].outputs == taken[0].outputs
                    and sum(call.batch.rows for call in taken) + self._waiting[0].batch.rows <= self._max_rows
                )
            ):
                taken.append(self._waiting.popleft())
        return taken


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    batch: Batch
    outputs: tuple[str, ...]
    future: Future[ModelOutputs]
