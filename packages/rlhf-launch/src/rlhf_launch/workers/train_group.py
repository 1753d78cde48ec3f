"""All ranks of one training role as one engine: batches are dealt to the ranks, results put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from rlhf_algos import Moments, Recipe, check_seen_here
from rlhf_core import (
    RUN_TOGETHER,
    Batch,
    DeadlineExceeded,
    FittedTokens,
    Link,
    Loss,
    Metric,
    ModelOutputs,
    RaggedBatch,
    RaggedColumn,
    StepReport,
    TokenPass,
    TokenRows,
    WeightManifest,
    deal_units,
    merge_metrics,
    units_together,
)

from rlhf_launch.workers.begun import Begun
from rlhf_launch.workers.devices import SharedDevices, Tenant, in_turn
from rlhf_launch.workers.handles import Handle, close_workers
from rlhf_launch.workers.load import IdleTime
from rlhf_launch.workers.prepare import (
    SCORED_COLUMNS,
    Prepared,
    blocks_of_groups,
    columns_of_rows,
    in_parts,
    rows_of_outputs,
)
from rlhf_launch.workers.probe import ProbedModel, Scores
from rlhf_launch.workers.waits import Waits

T = TypeVar("T")
RowColumns = Mapping[str, RaggedColumn | torch.Tensor]
"""Columns of a `RaggedBatch`."""
AnyBatch = TypeVar("AnyBatch", Batch, RaggedBatch)
_in_turn = in_turn(lambda group: group.devices.at_work(group.name))


class TrainGroup:
    """The ranks of one role, with the methods of TrainEngine over all of them."""

    def __init__(
        self,
        name: str,
        handles: Sequence[Handle],
        *,
        waits: Waits | None = None,
        devices: SharedDevices | None = None,
    ) -> None:
        self.name = name
        self.devices = devices or SharedDevices()
        """Where it takes turns with those that share its devices."""
        self._handles = list(handles)
        self._waits = waits or Waits()
        self._waits.watch(self._handles)
        self._idle = IdleTime(self._waits.clock.now)
        self._saving: Path | None = None

    @property
    def handles(self) -> Sequence[Handle]:
        """The workers, one a rank."""
        return tuple(self._handles)

    def check_answering(self, *, timeout_s: float = 30.0) -> None:
        """Find out whether all ranks are there and idle.

        Raises:
            DeadlineExceeded: one is still at something.
            EngineDiedError: one is gone.
        """
        calls = [handle.call("capabilities") for handle in self._handles]
        self._waits.settle(calls, at_most_s=timeout_s)
        if busy := [handle.name for handle, call in zip(self._handles, calls, strict=True) if not call.done()]:
            raise DeadlineExceeded(f"after {timeout_s:g} s, {', '.join(busy)} had not answered")
        self._waits.gather(calls, what=f"{self.name} to answer", workers=self._handles)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._handles)

    def start(self) -> float:
        """Build the engines of all ranks; returns the seconds of the slowest."""
        with self.devices.moving_in(self.name, Tenant(leave=self.offload, come=self.reload)):
            first = self._handles[0].call("address", self.ranks)
            (address,) = self._gather([first], "offer an address")
            calls = [handle.call("start", rank, self.ranks, address) for rank, handle in enumerate(self._handles)]
            return max(self._gather(calls, "build its engines"))

    @_in_turn
    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine; rows keep their order. The batch may have fewer units than there are ranks."""
        return self.begin_score(batch, outputs).result()

    def begin_score(
        self, batch: Batch, outputs: Sequence[str] = ("log_probs",), *, adapters: bool = True
    ) -> Begun[ModelOutputs]:
        """Start `score` on all ranks; without `adapters`, with these off."""
        enough = self._a_unit_for_every_rank(batch)
        dealt = self._deal(enough)
        method = "score" if adapters else "score_without_adapters"
        calls = self._call_each(method, [enough.select(rows) for rows in dealt], tuple(outputs))

        def conclude(parts: list[ModelOutputs]) -> ModelOutputs:
            return _first_rows(_reassemble(enough, dealt, parts), batch.rows)

        return self.begin(calls, "score a batch", conclude)

    def begin_score_rows(
        self, batch: RaggedBatch, outputs: Sequence[str] = ("log_probs",), *, adapters: bool = True
    ) -> Begun[RowColumns]:
        """Start to score rows on all ranks, which pad them; the outputs come back as columns, without padding.

        Of the batch's own columns the ranks get those that engines look at when they score (`SCORED_COLUMNS`).
        """
        enough = self._a_unit_for_every_rank(batch.only(SCORED_COLUMNS))
        dealt = self._deal(enough)
        lengths = [[enough.lengths[row] for row in rows] for rows in dealt]
        parts = [enough.select(rows) for rows in dealt]
        calls = self._call_each("score_rows", parts, tuple(outputs), adapters)

        def conclude(found: list[Mapping[str, NDArray[Any]]]) -> RowColumns:
            columns = [rows_of_outputs(*one) for one in zip(found, lengths, strict=True)]
            return columns_of_rows(columns, dealt, batch.rows)

        return self.begin(calls, "score a batch", conclude)

    def prepare(
        self, batch: RaggedBatch, recipe: Recipe, *, kl_coef: float
    ) -> tuple[RowColumns, dict[str, Metric]]:
        """Prepare whole groups of rows on the ranks; columns and metrics of the batch.

        No model is needed for it, and no turn on shared devices. Which rows are prepared together does not depend
        on the number of ranks, nor do the numbers. Where advantages are whitened over the batch, ranks keep theirs
        until the moments of all of them are known.

        Raises:
            ValueError: the recipe must see the whole batch (see `in_parts`).
        """
        parts = in_parts(recipe)
        if parts is None:
            raise ValueError(f"{type(recipe).__name__} looks at the whole batch, and cannot prepare it in parts")
        recipe, whitening = parts
        batch = batch.of_text()  # no model looks at it
        blocks = blocks_of_groups(batch, recipe)
        share = -(-len(blocks) // self.ranks)
        dealt = [blocks[start : start + share] for start in range(0, len(blocks), share)]
        workers = self._handles[: len(dealt)]
        method = "prepare" if whitening is None else "prepare_unwhitened"
        calls = [
            handle.call(
                method,
                batch.select(range(some[0].start, some[-1].stop)),
                *(recipe, kl_coef, [len(rows) for rows in some], batch.width),
            )
            for handle, some in zip(workers, dealt, strict=True)
        ]
        found: list[list[Any]] = self.begin(calls, "prepare a batch", list).result()
        if whitening is not None:
            moments = sum((one for some in found for one in some), Moments())
            calls = [handle.call("whiten", whitening, moments) for handle in workers]
            found = self.begin(calls, "whiten the advantages of a batch", list).result()
        prepared: list[Prepared] = [one for some in found for one in some]
        columns = columns_of_rows([one.columns for one in prepared], blocks, batch.rows)
        return columns, merge_metrics(one.metrics for one in prepared)

    def describe_model(self) -> ProbedModel:
        """What a probe of synced weights must know of the model."""
        call = self._handles[0].call("describe_model")
        return self._gather([call], "describe its model")[0]

    def score_tokens(self, rows: TokenRows) -> Scores:
        """Log-probs of the tokens of rows of one length, from the second on, with the weights of now."""
        tokens = torch.tensor(rows)
        answers = torch.ones_like(tokens).bool()
        answers[:, 0] = False
        batch = Batch(token_ids=tokens, attention_mask=torch.ones_like(answers), response_mask=answers)
        scores = self.score(batch).log_probs
        if scores is None:
            raise TypeError(f"{self.name}: the training engine gave no log_probs")
        return tuple(map(tuple, scores[:, 1:].tolist()))

    @_in_turn
    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """See TrainEngine. The batch may have fewer units than there are ranks."""
        return self.begin_step(batch, loss).result()

    def begin_step(self, batch: AnyBatch, loss: Loss) -> Begun[StepReport]:
        """Start `step` on all ranks, which pad rows that come without padding."""
        enough = self._a_unit_for_every_rank(batch)
        calls = self._call_each("step", [enough.select(rows) for rows in self._deal(enough)], loss)
        return self.begin(calls, "take a step", lambda reports: reports[0])

    def open_link(self, kind: str, receivers: int) -> Any:
        """Open a weight link on rank 0."""
        return self.open_links(kind, {0: receivers})[0]

    def open_links(self, kind: str, receivers: Mapping[int, int]) -> dict[int, Link]:
        """Open a weight link on each of these ranks, for so many receivers; the others have none from now on."""
        calls = [
            handle.call("open_link", kind, receivers[rank], self._waits.limit_s)
            if rank in receivers
            else handle.call("close_link")
            for rank, handle in enumerate(self._handles)
        ]
        links = self._gather(calls, "open a weight link")
        return {rank: links[rank] for rank in receivers}

    def accept_link(self, ranks: Sequence[int] = (0,)) -> list[Any]:
        """Let ranks start waiting for the receivers of their links; returns futures."""
        return [self._handles[rank].call("accept_link") for rank in ranks]

    def devices_of_ranks(self) -> list[str | None]:
        """The device of each rank (see `device_names`); None where there is none but the CPU."""
        return [names[0] if names else None for names in self._all("device_names", what="name its devices")]

    def shared_memory(self) -> Any:
        """Ask rank 0 which memory it can share; returns a future."""
        return self._handles[0].call("shared_memory")

    @_in_turn
    def manifest(self, version: int, *, bucket_bytes: int, adapters: bool = False) -> WeightManifest:
        """What a sync of all weights, or of the adapters alone, would move."""
        return self._all("manifest", version, bucket_bytes, adapters, what="describe its weights")[0]

    @_in_turn
    def changes(self, version: int, *, bucket_bytes: int, mode: str) -> WeightManifest:
        """What a partial sync would move; all weights if there is no confirmed version to start from."""
        return self._all("changes", version, bucket_bytes, mode, what="find the weights that changed")[0]

    def confirm(self, version: int) -> None:
        """Note that every engine has `version`; the next `changes` start from it."""
        self._all("confirm", version, what="note the version that all engines have")

    def send(self, manifest: WeightManifest) -> list[Any]:
        """Start sending on all ranks; returns futures of their SendReports."""
        calls = [handle.call("send", manifest) for handle in self._handles]
        self._idle.begin(calls)
        return calls

    def offload(self) -> None:
        """See TrainEngine."""
        self._all("offload", what="offload")

    def reload(self) -> None:
        """See TrainEngine."""
        self._all("reload", what="reload")

    @_in_turn
    def save(self, path: Path, *, background: bool = False) -> None:
        """See TrainEngine. What an engine writes in the background is complete after `finish_save`.

        Raises:
            ConfigError: a rank wrote where this process does not see it.
        """
        path.mkdir(parents=True, exist_ok=True)
        self._saving = path
        self._all("save", path, background, what="save a checkpoint")
        if not background:
            self.finish_save()

    def saved(self) -> bool:
        """Whether all ranks have written what `save` began."""
        return all(self._all("saved", what="say whether its checkpoint is written"))

    def finish_save(self) -> None:
        """Wait until what `save` began in the background is written, and see all of it here.

        Raises:
            ConfigError: a rank wrote where this process does not see it.
        """
        path, self._saving = self._saving, None
        if path is not None:
            self._all("finish_save", what="write a checkpoint")
            check_seen_here(path, self._all("files", path, what="list its checkpoint"))

    @_in_turn
    def load(self, path: Path) -> None:
        """See TrainEngine."""
        self._all("load", path, what="load a checkpoint")

    @_in_turn
    def export(self, path: Path) -> None:
        """See TrainEngine."""
        path.mkdir(parents=True, exist_ok=True)
        self._all("export", path, what="export the model")

    @_in_turn
    def export_average(self, path: Path) -> None:
        """See KeepsAverage."""
        path.mkdir(parents=True, exist_ok=True)
        self._all("export_average", path, what="export the average of its weights")

    def memory(self) -> dict[str, int]:
        """Bytes by purpose, of the rank with most of each; empty for an engine that reports none."""
        ranks = self._all("memory", what="report its memory")
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def fitted_tokens(self) -> Mapping[TokenPass, FittedTokens]:
        """See MeasuresMicroBatches; nothing for an engine that does not measure."""
        call = self._handles[0].call("fitted_tokens")
        return self._gather([call], "say how many tokens fit its memory")[0]

    def take_fitted_tokens(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """See MeasuresMicroBatches."""
        self._all("take_fitted_tokens", dict(found), what="take the size of its micro-batches")

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which the ranks had nothing to do."""
        return self._idle.take_idle_seconds()

    def close(self) -> None:
        """Close all ranks."""
        self._waits.leave(self._handles)
        close_workers(self._handles)

    def _call_each(self, method: str, batches: Sequence[Any], *args: Any) -> list[Future[Any]]:
        """Call every rank with a batch of its own."""
        return [handle.call(method, batch, *args) for handle, batch in zip(self._handles, batches, strict=True)]

    def _a_unit_for_every_rank(self, batch: AnyBatch) -> AnyBatch:
        """Repeat a batch of fewer units than ranks, until every rank has one.

        A loss is a sum divided by its weight over all ranks: a whole number of copies changes neither it nor its
        gradient, whatever it averages over.
        """
        if not batch.units:
            raise ValueError(f"{self.name}: a batch without rows was given to {self.ranks} rank(s)")
        copies = -(-self.ranks // len(units_together(batch)))
        if copies == 1:
            return batch
        enough = batch.select_units(list(range(batch.units)) * copies)
        if RUN_TOGETHER not in batch:
            return enough
        # Each copy keeps to itself, too.
        apart = int(batch[RUN_TOGETHER].max()) + 1
        shift = torch.arange(copies).repeat_interleave(batch.rows) * apart
        return enough.with_columns(**{RUN_TOGETHER: enough[RUN_TOGETHER] + shift})

    def _deal(self, batch: Batch | RaggedBatch) -> list[list[int]]:
        """Rows of each rank; units that run together go to one, those with one prompt where balance allows it."""
        size = batch.rows_per_unit
        return [[unit * size + i for unit in units for i in range(size)] for units in deal_units(batch, self.ranks)]

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        return self._gather([handle.call(method, *args) for handle in self._handles], what)

    def _gather(self, calls: Sequence[Future[Any]], what: str) -> list[Any]:
        """Results of calls of the ranks, from the first on."""
        return self.begin(calls, what, lambda results: results).result()

    def begin(self, calls: Sequence[Future[Any]], what: str, conclude: Callable[[list[Any]], T]) -> Begun[T]:
        """Work that the ranks, from the first on, have these calls of.

        Args:
            calls: one for each rank.
            what: what the ranks do, for messages.
            conclude: makes one result of those of the ranks.
        """
        self._idle.begin(calls)
        return Begun(
            what=f"{self.name} to {what}",
            calls=calls,
            workers=self._handles[: len(calls)],
            waits=self._waits,
            conclude=conclude,
        )


def _reassemble(batch: Batch, dealt: list[list[int]], parts: Sequence[ModelOutputs]) -> ModelOutputs:
    """The outputs of all ranks, with the rows in the order of the batch."""
    result: dict[str, torch.Tensor] = {}
    for name in (field.name for field in fields(ModelOutputs)):
        pieces = [getattr(part, name) for part in parts]
        if any(piece is None for piece in pieces):
            continue
        if pieces[0].dim() == 0:
            result[name] = torch.stack(pieces).mean()
            continue
        shape = (*(batch.rows, batch.token_ids.shape[1])[: pieces[0].dim()], *pieces[0].shape[2:])
        full = torch.zeros(shape, dtype=pieces[0].dtype)
        for rows, piece in zip(dealt, pieces, strict=True):
            if piece.dim() > 1:
                full[rows, : piece.shape[1]] = piece
            else:
                full[rows] = piece
        result[name] = full
    return ModelOutputs(**result)


def _first_rows(outputs: ModelOutputs, rows: int) -> ModelOutputs:
    """The outputs of the first rows; numbers for the whole batch stay."""
    values = {field.name: getattr(outputs, field.name) for field in fields(ModelOutputs)}
    return ModelOutputs(
        **{name: value[:rows] if value is not None and value.dim() else value for name, value in values.items()}
    )
