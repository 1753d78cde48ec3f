"""One reward model, asked by many at once: the calls that wait for it are joined into one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from rlhf_core import Batch, ModelOutputs
from torch import Tensor
from torch.nn.functional import pad


class Scorer(Protocol):
    """Whatever scores batches with a model: a training engine in the reward role, or a group of its ranks."""

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine."""
        ...


class JoinedScorer:
    """Calls a scorer from a thread of its own, one call at a time.

    While the model works on one batch, the groups that finish meanwhile gather; the next batch takes them all.
    So many small groups cost few forward passes, and several ranks never see the calls in different orders.
    """

    def __init__(self, scorer: Scorer, *, min_rows: int = 1, max_rows: int = 1024) -> None:
        """`min_rows` is what the scorer needs at least (its ranks): smaller batches are filled up with copies.

        `max_rows` bounds what is joined; a single larger call goes as it is.
        """
        self._scorer = scorer
        self._min_rows, self._max_rows = min_rows, max_rows
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
            batch = join([call.batch for call in calls])
            copies = max(0, self._min_rows - batch.rows)
            found = self._scorer.score(batch.select([*range(batch.rows), *[0] * copies]), calls[0].outputs)
            start = 0
            for call in calls:
                call.future.set_result(_rows(found, start, call.batch))
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


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches in one, padded to the longest; only tokens and masks, which is what a model reads.

    >>> short = Batch(token_ids=torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 2).bool(),
    ...               response_mask=torch.tensor([[0, 1]]).bool())
    >>> long = Batch(token_ids=torch.tensor([[5, 7, 8]]), attention_mask=torch.ones(1, 3).bool(),
    ...              response_mask=torch.tensor([[0, 1, 1]]).bool())
    >>> join([short, long]).token_ids.tolist(), join([short, long]).lengths.tolist()
    ([[5, 6, 0], [5, 7, 8]], [2, 3])
    """
    width = max(batch.token_ids.shape[1] for batch in batches)

    def stack(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])

    names = [batch.sample_ids for batch in batches]
    return replace(
        batches[0],
        token_ids=stack("token_ids"),
        attention_mask=stack("attention_mask"),
        response_mask=stack("response_mask"),
        columns={},
        sample_ids=tuple(name for part in names for name in part) if all(names) else (),
    )


def _rows(outputs: ModelOutputs, start: int, batch: Batch) -> ModelOutputs:
    """The part of `outputs` that belongs to `batch`, whose rows begin at `start`."""
    found = {}
    for name in (field.name for field in fields(outputs)):
        value = getattr(outputs, name)
        if isinstance(value, Tensor) and value.dim():
            value = value[start : start + batch.rows]
            value = value[:, : batch.token_ids.shape[1]] if value.dim() > 1 else value
        found[name] = value
    return ModelOutputs(**found)
