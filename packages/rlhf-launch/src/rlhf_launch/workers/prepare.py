"""What ranks do with rows that come without padding, and what comes back: columns of the rows, likewise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rlhf_algos import (
    EPISODE_SHARE,
    Moments,
    PreparesInParts,
    Recipe,
    WhitenConfig,
    advantage_metrics,
    whiten_by,
)
from rlhf_core import RUN_TOGETHER, Batch, Largest, Metric, ModelOutputs, RaggedBatch, RaggedColumn
from torch import Tensor

from rlhf_launch.workers.episodes import EPISODES, episode_rows, episode_shares, joined_episodes

Columns = Mapping[str, RaggedColumn | NDArray[Any]]
"""Columns of some rows: per token, or [rows]; a number of the whole batch is an array without dimensions."""
SCORED_COLUMNS = frozenset({RUN_TOGETHER, "candidate_ids", "routed_experts"})
"""Columns that engines look at when they score."""
_BLOCK = 1 << 18
"""Numbers of a column that are worked on at a time: what a processor's cache holds."""
_BLOCK_BY_TOKEN = 1 << 22
"""The same for algorithms that go from token to token: a thousand rows of 4,096 take no longer than ten."""


def joined_outputs(outputs: ModelOutputs, batch: Batch) -> dict[str, NDArray[Any]]:
    """Outputs as they travel: [tokens, ...] of all rows one after the other, [rows], or a single number."""
    found = {item.name: getattr(outputs, item.name) for item in fields(outputs)}
    return {
        name: (value if value.dim() < 2 else value[batch.attention_mask]).detach().numpy()
        for name, value in found.items()
        if value is not None
    }


def rows_of_outputs(joined: Mapping[str, NDArray[Any]], lengths: Sequence[int]) -> Columns:
    """Inverse of `joined_outputs`, in the same memory."""
    per_row = {"scores", "aux_loss"}
    return {
        name: values if name in per_row else RaggedColumn.split(values, lengths) for name, values in joined.items()
    }


def columns_of_rows(
    parts: Sequence[Columns], dealt: Sequence[Sequence[int]], rows: int
) -> dict[str, RaggedColumn | Tensor]:
    """Columns of all rows, of columns of some each.

    Args:
        parts: of each part, its columns.
        dealt: of each part, its rows; of one that is in several parts the last counts.
        rows: how many there are; further ones are left out. Numbers of the whole batch are averaged.
    """
    found: dict[str, RaggedColumn | Tensor] = {}
    for name, first in parts[0].items():
        pieces: list[Any] = [part[name] for part in parts]
        if isinstance(first, RaggedColumn):
            placed: list[Any] = [None] * rows
            for piece, places in zip(pieces, dealt, strict=True):
                for row, place in zip(piece.rows, places, strict=True):
                    if place < rows:
                        placed[place] = row
            found[name] = RaggedColumn(placed, first.kind, first.tail)
        elif first.ndim:
            whole = np.empty(1 + max(max(places) for places in dealt), dtype=first.dtype)
            for piece, places in zip(pieces, dealt, strict=True):
                whole[list(places)] = piece
            found[name] = torch.from_numpy(whole[:rows])
        else:
            found[name] = torch.tensor(np.stack(pieces)).mean()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What an algorithm made of some rows."""

    columns: Columns
    """Those that it added or replaced."""
    metrics: Mapping[str, Metric]


def prepare_rows(batch: RaggedBatch, recipe: Recipe, kl_coef: float, width: int | None = None) -> Prepared:
    """Let an algorithm prepare rows, with padding up to `width`; the rows of an episode are one row to it.

    `mismatch/log_prob_max` is the largest difference between the sampler's and the trainer's log-prob of one token.
    """
    if EPISODES not in batch.per_row:
        return _prepare_rows(batch, recipe, kl_coef, width)
    episodes = episode_rows(batch)
    joined = joined_episodes(batch, episodes)
    prepared = _prepare_rows(joined, recipe, kl_coef, max(width or 0, joined.width))
    columns = {name: _of_rows(column, batch.lengths, episodes) for name, column in prepared.columns.items()}
    mask = columns.get("response_mask")
    counted = mask if isinstance(mask, RaggedColumn) else batch.per_token["response_mask"]
    return replace(prepared, columns={**columns, EPISODE_SHARE: episode_shares(counted, episodes)})


def _of_rows(
    column: RaggedColumn | NDArray[Any], lengths: Sequence[int], episodes: Sequence[range]
) -> RaggedColumn | NDArray[Any]:
    """A column of episodes as one of their rows; a number of the whole batch stays what it is."""
    if isinstance(column, RaggedColumn):
        return RaggedColumn.split(column.joined(), lengths)
    return np.repeat(column, [len(rows) for rows in episodes]) if column.ndim else column


def _prepare_rows(batch: RaggedBatch, recipe: Recipe, kl_coef: float, width: int | None) -> Prepared:
    padded = batch.padded(width)
    done, means = recipe.prepare(padded, padded["scores"], padded["group_ids"], kl_coef=kl_coef)
    metrics: dict[str, Metric] = dict(means)
    if "old_log_probs" in done:
        gap = (done["old_log_probs"] - done["rollout_log_probs"]).abs().masked_fill(~done.response_mask, 0)
        metrics["mismatch/log_prob_max"] = Largest(value=float(gap.max()))
    known = {**padded.columns, "response_mask": padded.response_mask}
    columns: dict[str, RaggedColumn | NDArray[Any]] = {}
    for name, column in {**done.columns, "response_mask": done.response_mask}.items():
        if column is known.get(name):
            continue
        same = next((other for other, tensor in padded.columns.items() if column is tensor), name)
        if same != name and same in batch.per_token:
            columns[name] = batch.per_token[same]
        else:
            ragged = column.dim() > 1
            columns[name] = RaggedColumn.cut(column, batch.lengths).compressed() if ragged else column.numpy()
    return Prepared(columns=columns, metrics=metrics)


def prepare_blocks(
    batch: RaggedBatch, recipe: Recipe, kl_coef: float, blocks: Sequence[int], width: int
) -> list[Prepared]:
    """Let an algorithm prepare blocks of rows, one after the other.

    Args:
        batch: the rows of all blocks.
        recipe: must look at each group of rows alone (`prepares_by_group`).
        kl_coef: the coefficient of the KL penalty.
        blocks: rows of each block.
        width: tokens of the longest row of the step: what is summed over a padded row has the bits that it has in
            the whole batch.
    """
    prepared: list[Prepared] = []
    begin = 0
    for count in blocks:
        rows = range(begin, begin + count)
        prepared.append(prepare_rows(batch.select(rows), recipe, kl_coef, width))
        begin += count
    return prepared


@dataclass(frozen=True, slots=True)
class Unwhitened:
    """Blocks of rows that are prepared but for the whitening of their advantages."""

    batch: RaggedBatch
    """The rows of all blocks."""
    prepared: Sequence[Prepared]
    """Of each block."""
    blocks: Sequence[int]
    """Rows of each."""

    def moments(self) -> list[Moments]:
        """Those of each block's advantages over its counted tokens."""
        return [Moments.of(advantages, mask) for _, _, advantages, mask in self._parts()]

    def whitened(self, config: WhitenConfig, moments: Moments) -> list[Prepared]:
        """The blocks with advantages whitened by the moments of the whole batch, and their metrics."""
        found: list[Prepared] = []
        for one, lengths, advantages, mask in self._parts():
            values = whiten_by(advantages, mask, config, moments)
            column = RaggedColumn.split(values.numpy(), lengths).compressed()
            metrics = {**one.metrics, **advantage_metrics(values, mask)}
            found.append(replace(one, columns={**one.columns, "advantages": column}, metrics=metrics))
        return found

    def _parts(self) -> Iterator[tuple[Prepared, Sequence[int], Tensor, Tensor]]:
        """Of each block: what is prepared, lengths, and advantages and mask [tokens] of its rows."""
        begin = 0
        for one, count in zip(self.prepared, self.blocks, strict=True):
            rows = range(begin, begin + count)
            mask = one.columns.get("response_mask")
            if mask is None:
                mask = self.batch.per_token["response_mask"].select(rows)
            advantages = one.columns["advantages"]
            if not (isinstance(mask, RaggedColumn) and isinstance(advantages, RaggedColumn)):
                raise TypeError("advantages and response_mask are columns of numbers for each token")
            lengths = [self.batch.lengths[row] for row in rows]
            yield one, lengths, torch.tensor(advantages.joined()), torch.tensor(mask.joined())
            begin += count


def in_parts(recipe: Recipe) -> tuple[Recipe, WhitenConfig | None] | None:
    """The recipe that prepares groups of rows apart, and how the advantages of all are whitened after it.

    None if it looks at the whole batch in another way.
    """
    if recipe.prepares_by_group:
        return recipe, None
    if isinstance(recipe, PreparesInParts) and recipe.whitening is not None:
        apart = recipe.unwhitened()
        if apart.prepares_by_group:
            return apart, recipe.whitening
    return None


def blocks_of_groups(batch: RaggedBatch, recipe: Recipe) -> list[range]:
    """The rows in blocks of whole groups, which follow each other in the batch; as many as suit the recipe."""
    groups = batch.per_row["group_ids"].numpy()
    starts = [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), batch.rows]
    by_token = isinstance(recipe, PreparesInParts) and recipe.goes_by_token
    most = max(1, (_BLOCK_BY_TOKEN if by_token else _BLOCK) // max(1, batch.width))
    blocks: list[range] = []
    begin = 0
    for start, stop in pairwise(starts):
        if stop - begin > most and start > begin:
            blocks.append(range(begin, start))
            begin = start
    return [*blocks, range(begin, batch.rows)]
