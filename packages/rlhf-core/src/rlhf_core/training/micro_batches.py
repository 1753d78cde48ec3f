"""How a batch is cut into micro-batches: as few as the budget of tokens allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlhf_core.data.batch import RUN_TOGETHER, Batch
from rlhf_core.data.packed import length_of, whole_of
from rlhf_core.data.ragged import RaggedBatch
from rlhf_core.model.attention.packed import has_dropout, is_packing
from rlhf_core.model.vision import sees_in_every_pass

Counts = Literal["padded", "packed", "shared"]
"""`padded`: rows times the longest one. `packed`: those of the rows. `shared`: a prompt that rows of the
micro-batch share counts once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """How many tokens a micro-batch may have, and which count."""

    tokens: int
    counts: Counts = "padded"

    @classmethod
    def of(cls, model: Any, tokens: int) -> TokenBudget:
        """The budget that counts the tokens which `model_outputs` runs with the model in its present mode."""
        if not is_packing(model) or sees_in_every_pass(model):
            return cls(tokens=tokens)
        return cls(tokens=tokens, counts="packed" if has_dropout(model) else "shared")


def counted_tokens(batch: Batch, counts: Counts) -> int:
    """Tokens of a batch that is one micro-batch, as a budget counts them.

    >>> ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    >>> batch = Batch(token_ids=ids, attention_mask=ids > 0, response_mask=torch.tensor([[0, 0, 1], [0, 1, 0]]) > 0)
    >>> [counted_tokens(batch, counts) for counts in ("padded", "packed", "shared")]
    [6, 5, 5]
    """
    lengths = batch.lengths.tolist()
    if counts == "padded":
        return len(lengths) * max(lengths)
    return _cost(lengths, prompts_of(batch), None if counts == "packed" else set())


def cut_micro_batches(
    lengths: Sequence[int], *, rows_per_unit: int, max_tokens: int, groups: Sequence[Hashable] = ()
) -> list[list[int]]:
    """Units of rows in micro-batches of at most `max_tokens` padded tokens, longest first.

    Units of equal `groups` entries (one per unit; rows of the same prompt, say) stay together where they fit, so
    that what they share is computed once. Returns lists of unit indices. A unit longer than the budget gets a
    micro-batch of its own.

    >>> cut_micro_batches([3, 9, 4, 8], rows_per_unit=1, max_tokens=18)
    [[1, 3], [2, 0]]
    >>> cut_micro_batches([3, 9, 4, 8], rows_per_unit=1, max_tokens=18, groups=["a", "a", "b", "b"])
    [[1, 0], [3, 2]]
    """
    units = [max(lengths[start : start + rows_per_unit]) for start in range(0, len(lengths), rows_per_unit)]
    names = groups or range(len(units))
    longest: dict[Hashable, int] = {}
    for name, unit in zip(names, units, strict=True):
        longest[name] = max(unit, longest.get(name, 0))
    place = {name: index for index, name in enumerate(longest)}
    cut: list[list[int]] = []
    width = 0
    for unit in sorted(range(len(units)), key=lambda u: (-longest[names[u]], place[names[u]], -units[u])):
        width = max(width, units[unit])
        if cut and (len(cut[-1]) + 1) * rows_per_unit * width <= max_tokens:
            cut[-1].append(unit)
        else:
            cut.append([unit])
            width = units[unit]
    return cut


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPrompt:
    """What stands before the first counted token of a row; all of a row without one."""

    tokens: bytes
    """Equal for rows with the same prompt."""
    length: int


def cut_batch(batch: Batch, budget: int | TokenBudget) -> list[list[int]]:
    """Units of a batch in micro-batches, longest first, rows with the same prompt side by side.

    With the column `RUN_TOGETHER` a micro-batch holds units of one number alone. How these are cut and in which
    order they run depends on their tokens and on nothing else.

    Args:
        batch: the rows.
        budget: a plain number counts padded tokens.
    """
    if isinstance(budget, int):
        budget = TokenBudget(tokens=budget)
    if RUN_TOGETHER not in batch:
        return _cut(batch, budget)
    return [
        [units[unit] for unit in part]
        for units in units_together(batch)
        for part in _cut(batch.select_units(units), budget)
    ]


def units_together(batch: Batch | RaggedBatch) -> list[list[int]]:
    """Units by the number in the column `RUN_TOGETHER`, in the order of their tokens; without it each alone.

    Raises:
        ValueError: rows of one unit have different numbers.
    """
    if RUN_TOGETHER not in batch:
        return [[unit] for unit in range(batch.units)]
    batch = batch.padded() if isinstance(batch, RaggedBatch) else batch
    numbers = batch[RUN_TOGETHER].view(batch.units, -1)
    if bool((numbers != numbers[:, :1]).any()):
        raise ValueError(f"rows of one unit have different numbers in the column {RUN_TOGETHER!r}")
    found: dict[int, list[int]] = defaultdict(list)
    for unit, number in enumerate(numbers[:, 0].tolist()):
        found[number].append(unit)
    tokens, counted = batch.token_ids.cpu().view(batch.units, -1), batch.response_mask.cpu().view(batch.units, -1)
    lengths = batch.lengths.view(batch.units, -1).tolist()

    def content(unit: int) -> tuple[list[int], list[int], list[bool]]:
        return lengths[unit], tokens[unit].tolist(), counted[unit].tolist()

    # In one order whatever the batch's; the longest first, as a model's memory is best asked for.
    parts = [sorted(units, key=content) for units in found.values()]
    return sorted(parts, key=lambda units: -max(max(lengths[unit]) for unit in units))


def _cut(batch: Batch, budget: TokenBudget) -> list[list[int]]:
    lengths, prompts, size = batch.lengths.tolist(), prompts_of(batch), batch.rows_per_unit
    groups = [prompts[start].tokens for start in range(0, batch.rows, size)]
    if budget.counts == "padded" or batch.images:  # rows with images run padded
        return cut_micro_batches(lengths, rows_per_unit=size, max_tokens=budget.tokens, groups=groups)
    units = [slice(start, start + size) for start in range(0, batch.rows, size)]
    cut: list[list[int]] = []
    used, seen = 0, set[bytes]()
    # One micro-batch after the other, in the order that padded ones have.
    (order,) = cut_micro_batches(lengths, rows_per_unit=size, max_tokens=1 << 62, groups=groups) or [[]]
    for unit in order:
        its, rows, share = prompts[units[unit]], lengths[units[unit]], budget.counts == "shared"
        cost = _cost(rows, its, seen if share else None)
        if not cut or used + cost > budget.tokens:
            cut.append([])
            used, seen = 0, set()
            cost = _cost(rows, its, seen if share else None)
        cut[-1].append(unit)
        used += cost
        seen |= {prompt.tokens for prompt in its}
    return cut


def prompts_of(batch: Batch | RaggedBatch) -> list[RowPrompt]:
    """The prompt of every row."""
    if isinstance(batch, RaggedBatch):
        return _ragged_prompts(batch)
    tokens, counts = batch.token_ids.cpu().numpy(), batch.response_mask.cpu().numpy()
    lengths = np.where(counts.any(axis=1), counts.argmax(axis=1), batch.lengths.cpu().numpy()).tolist()
    return [
        RowPrompt(tokens=row[:length].tobytes(), length=length) for row, length in zip(tokens, lengths, strict=True)
    ]


def _ragged_prompts(batch: RaggedBatch) -> list[RowPrompt]:
    prompts: list[RowPrompt] = []
    # Samples of one prompt share its array.
    known: dict[int, RowPrompt] = {}
    for length, tokens in batch.prompt_parts():
        first = tokens[0] if tokens else None
        prompt = known.get(id(first))
        if prompt is None or prompt.length != length:
            whole = whole_of(tokens, np.dtype(np.int64))
            prompt = RowPrompt(tokens=whole[:length].tobytes(), length=length)
            if first is not None and length_of(first) == length:
                known[id(first)] = prompt
        prompts.append(prompt)
    return prompts


def _cost(lengths: Sequence[int], prompts: Sequence[RowPrompt], seen: set[bytes] | None) -> int:
    """Tokens that a unit's rows add to a micro-batch that has run the prompts in `seen`; None shares nothing."""
    if seen is None:
        return sum(lengths)
    fresh = {prompt.tokens: prompt.length for prompt in prompts if prompt.tokens not in seen}
    return sum(lengths) - sum(prompt.length for prompt in prompts) + sum(fresh.values())
