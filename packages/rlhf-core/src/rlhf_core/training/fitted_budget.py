"""The budget of an engine's micro-batches, found by a trial where the configuration says `auto`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.data.batch import Batch
from rlhf_core.errors import ResourceError
from rlhf_core.interfaces.engine_config import EngineConfig
from rlhf_core.interfaces.loss import Loss, ModelOutputs
from rlhf_core.interfaces.training import FittedTokens, TokenPass
from rlhf_core.model.heads import text_config
from rlhf_core.model.log_probs import chunk_bytes, chunks_of, head_chunk
from rlhf_core.training.accumulation import Ranks
from rlhf_core.training.fitting import (
    LEAST_TOKENS,
    MARGINS,
    MOST_TOKENS,
    SHORTER,
    MemoryLine,
    RankMemory,
    agreed_tokens,
    mib,
    trial_rows,
    trial_sizes,
)
from rlhf_core.training.memory_meter import MemoryMeter
from rlhf_core.training.micro_batches import Counts, TokenBudget, counted_tokens

_TRIAL_CHUNK = 128
"""Tokens of the head's chunks in a trial on a GPU."""
_WARM_UP = 64
"""Tokens of the pass before the trials, at most."""
Forward = Callable[[Batch, Sequence[str]], ModelOutputs]
Backward = Callable[[Tensor, bool], None]


class FittedBudget:
    """The budget of an engine's micro-batches: a number of tokens, or `auto`, which finds one by a trial.

    The trial takes the rows and the loss of the first call: a short pass, so that gradients and workspaces are
    there, then two passes of the longest rows there can be, whose peaks are measured. All ranks take the number of
    the one on which the fewest fit.
    """

    def __init__(
        self, config: EngineConfig, ranks: Ranks, meter: MemoryMeter, *, to_come: Callable[[], int] = lambda: 0
    ) -> None:
        """Of one engine.

        Args:
            config: the engine's.
            ranks: all of the engine's ranks.
            meter: of this rank's device.
            to_come: bytes that this rank will need beside its passes and does not hold yet.
        """
        self._config, self._ranks, self._meter, self._to_come = config, ranks, meter, to_come
        self._found: dict[TokenPass, FittedTokens] = {}
        self._taken: dict[TokenPass, FittedTokens] = {}

    @property
    def found(self) -> dict[TokenPass, FittedTokens]:
        """What was found so far, or taken over; empty for a budget that is a number."""
        return {**self._taken, **self._found}

    def take(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """Use what another engine found, in place of trials, where it was found under the same conditions."""
        self._found, self._taken = {}, dict(found)

    def for_scores(self, model: Any, batch: Batch, fields: Sequence[str], forward: Forward) -> TokenBudget:
        """The budget of passes without gradients; all ranks together, the model in the mode for these.

        Raises:
            ResourceError: not even the longest rows fit.
        """

        def run(rows: Batch) -> None:
            with torch.no_grad():
                forward(rows, fields)

        return self._of("score", model, batch, run, nullcontext())

    def for_steps(
        self,
        model: Any,
        batch: Batch,
        loss: Loss,
        *,
        forward: Forward,
        backward: Backward,
        undo: AbstractContextManager[None],
    ) -> TokenBudget:
        """The budget of passes with gradients; all ranks together, the model in the mode for these.

        Args:
            model: the engine's.
            batch: rows of this rank.
            loss: that of the step.
            forward: as in `accumulate`.
            backward: as in `accumulate`.
            undo: entered for a trial; at its end there are no gradients, and random streams stand where they did.

        Raises:
            ResourceError: not even the longest rows fit.
        """

        def run(rows: Batch) -> None:
            total = loss(forward(rows, loss.outputs), rows).total
            backward(total * 0.0, False)

        return self._of("step", model, batch, run, undo)

    def _of(
        self,
        kind: TokenPass,
        model: Any,
        batch: Batch,
        run: Callable[[Batch], None],
        undo: AbstractContextManager[None],
    ) -> TokenBudget:
        setting = self._config.max_tokens_per_micro_batch
        if setting != "auto":
            return TokenBudget.of(model, setting)
        if kind not in self._found:
            length = max(self._config.longest_row or 0, self._ranks.max(int(batch.lengths.max())))
            conditions = self._conditions()
            known = self._taken.get(kind)
            if known is None or known.conditions != conditions:
                counts = TokenBudget.of(model, 1).counts
                with undo:
                    measured = self._measured(model, batch.to("cpu"), length, run, counts)
                known = replace(measured, conditions=conditions)
                self._meter.give_back()
            self._found[kind] = known
        return TokenBudget.of(model, self._found[kind].tokens)

    def _conditions(self) -> str:
        config, meter = self._config, self._meter
        place = f"{self._ranks.size} rank(s) on {meter.device.type} of {meter.size >> 30} GiB"
        rows = f"rows of {config.longest_row or 'unknown many'} tokens, packing {config.packing}, {config.dtype}"
        tiles = f", MLP tiles of {config.max_tokens_per_mlp_tile}" if config.max_tokens_per_mlp_tile else ""
        return f"{place}, {rows}, gradient checkpointing {config.gradient_checkpointing}{tiles}"

    def _measured(
        self, model: Any, batch: Batch, length: int, run: Callable[[Batch], None], counts: Counts
    ) -> FittedTokens:
        most = MOST_TOKENS * self._config.sequence_parallel_size
        longest = length * batch.rows_per_unit
        run(trial_rows(batch, length=min(length, _WARM_UP), units=1).to(self._meter.device))
        self._ranks.max(0)  # nobody counts as taken what another rank's pass holds for a moment
        free = max(0, self._meter.free() - self._to_come())
        self._ranks.max(0)
        passes, kind = [], self._meter.device.type
        small, more = _small_chunks(model, kind)
        with small:
            for share, units in trial_sizes(longest, least=LEAST_TOKENS[kind], most=most):
                rows = trial_rows(batch, length=max(2, int(share * length)), units=units)
                passes.append((counted_tokens(rows, counts), self._peak(run, rows, free)))
        line = MemoryLine.through(*passes)
        line = replace(line, fixed=line.fixed + more)
        own = RankMemory(place=self._meter.place, line=line, free=free)
        everyones: list[Any] = self._ranks.gather(own)
        return agreed_tokens(everyones, longest=longest, most=most, margin=MARGINS[kind])

    def _peak(self, run: Callable[[Batch], None], rows: Batch, free: float) -> int:
        here = rows.to(self._meter.device)
        try:
            return self._meter.peak(lambda: run(here))
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"a trial pass over {rows.rows} row(s) of {rows.token_ids.shape[1]} tokens needs more than the "
                f"{mib(free)} that are free; {SHORTER}"
            ) from error


def _small_chunks(model: Any, kind: str) -> tuple[AbstractContextManager[None], int]:
    """A context for the passes of a trial, and bytes that a chunk of the head takes beyond those in it.

    A GPU's chunks have as many tokens as the passes of a trial: their logits would count as growing for ever, and
    are the same for all larger passes. So the passes have small ones, and what full ones take is added.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if kind != "cuda" or head is None:
        return nullcontext(), 0
    vocabulary = text_config(model).vocab_size
    full = head_chunk(vocabulary, kind)
    small = min(_TRIAL_CHUNK, full)
    return chunks_of(small), chunk_bytes(vocabulary, full - small)
