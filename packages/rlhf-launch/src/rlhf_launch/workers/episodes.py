"""Episodes of several rows, the branches of a conversation: one row for an algorithm, several for the model.

An algorithm is shown the rows of an episode as one row, one after the other, with the one score that they share. So
a baseline counts an episode once, a return runs through all its turns, and what is found for a token goes back to
the row that has it. Every sampled token of an episode is in the mask of one row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from rlhf_core import RaggedBatch, RaggedColumn

EPISODES = "episode_ids"
"""Column [rows] of numbers that rows of one episode share; they follow each other. Absent where each row is one."""


def episode_rows(batch: RaggedBatch) -> list[range]:
    """The rows of each episode."""
    if EPISODES not in batch.per_row:
        return [range(row, row + 1) for row in range(batch.rows)]
    numbers = batch.per_row[EPISODES].numpy()
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), batch.rows]
    return [range(start, stop) for start, stop in pairwise(starts)]


def joined_episodes(batch: RaggedBatch, episodes: Sequence[range]) -> RaggedBatch:
    """The batch with one row for each episode: its rows joined, and the columns per row of the last of them."""
    last = [rows[-1] for rows in episodes]
    index = torch.tensor(last, dtype=torch.long)
    return replace(
        batch,
        lengths=tuple(sum(batch.lengths[row] for row in rows) for rows in episodes),
        per_token={
            name: RaggedColumn(
                [tuple(part for row in rows for part in column.rows[row]) for rows in episodes],
                column.kind,
                column.tail,
            )
            for name, column in batch.per_token.items()
        },
        per_row={name: column.index_select(0, index) for name, column in batch.per_row.items() if name != EPISODES},
        sample_ids=tuple(batch.sample_ids[row] for row in last) if batch.sample_ids else (),
    )


def episode_shares(mask: RaggedColumn, episodes: Sequence[range]) -> NDArray[np.float32]:
    """[rows] The share of each row in the counted tokens of its episode; equal shares where no token counts.

    The shares of an episode sum up to 1: by them, a mean over responses counts an episode once.
    """
    counts = [int(RaggedColumn([parts], mask.kind).joined().sum()) for parts in mask.rows]
    shares = np.empty(len(counts), dtype=np.float32)
    for rows in episodes:
        total = sum(counts[row] for row in rows)
        for row in rows:
            shares[row] = counts[row] / total if total else 1 / len(rows)
    return shares
