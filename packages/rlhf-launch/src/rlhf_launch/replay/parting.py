"""Where the numbers of two runs of one step part: stage by stage, the largest difference and its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rlhf_core import Batch, StepReport
from safetensors import safe_open
from torch import Tensor

Stage = Literal["model outputs", "advantages", "loss", "gradient", "weights"]

_OUTPUTS = ("old_log_probs", "ref_log_probs", "values")
_GIVEN = ("rollout_log_probs", "scores", "group_ids", "rewards", "greedy_scores", "truncated")
"""Columns that come with the samples: the same in both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """One quantity of a step, then and now."""

    stage: Stage
    name: str
    largest: float
    """The largest absolute difference; infinity where only one of two is a number."""
    mean: float
    """The mean absolute difference."""
    where: str
    """What the largest difference is at; empty if there is none."""
    parted: bool
    """Whether a difference is above `tolerance * max(1, |value then|)`."""

    @property
    def equal(self) -> bool:
        """Whether all bits are the same."""
        return self.largest == 0


def part_tensors(
    stage: Stage, name: str, then: Tensor, now: Tensor, mask: Tensor, batch: Batch, tolerance: float
) -> Parting:
    """Compare a column [rows] or [rows, length] where the mask is True."""
    then, now = then.double(), now.double()
    gap = torch.where(_alike(then, now), 0.0, (then - now).abs().nan_to_num(math.inf, math.inf))
    gap = gap.masked_fill(~mask, 0)
    worst = int(gap.argmax())
    place = "" if not float(gap.max()) else _place(batch, worst, per_row=then.dim() == 1)
    beyond = gap > tolerance * then.abs().nan_to_num(0).clamp(min=1)
    return Parting(
        stage=stage,
        name=name,
        largest=float(gap.max()),
        mean=float(gap.sum() / mask.sum().clamp(min=1)),
        where=place,
        parted=bool(beyond.any()),
    )


def _alike(then: Tensor, now: Tensor) -> Tensor:
    return (then == now) | (then.isnan() & now.isnan())


def _place(batch: Batch, flat: int, *, per_row: bool) -> str:
    row, token = (flat, None) if per_row else divmod(flat, batch.token_ids.shape[1])
    sample = batch.sample_ids[row] if batch.sample_ids else f"row {row}"
    if token is None:
        return f"sample {sample}"
    return f"sample {sample}, token {token} (id {int(batch.token_ids[row, token])})"


def part_batches(then: Batch, now: Batch, tolerance: float) -> Iterator[Parting]:
    """Compare the columns that both batches have, what models gave first, then what was made of it."""
    shared = [
        name
        for name, column in then.columns.items()
        if name in now and column.is_floating_point() and name not in _GIVEN and not name.startswith("score/")
    ]
    for name in sorted(shared, key=_order):
        before, after = then[name], now[name]
        if before.shape != after.shape or before.dim() > 2:
            continue
        mask = then.response_mask if before.dim() == 2 else torch.ones(then.rows, dtype=torch.bool)
        yield part_tensors(_stage(name), name, before, after, mask, then, tolerance)


def _stage(name: str) -> Stage:
    given = name in _OUTPUTS or (name.startswith("old_") and name != "old_values")
    return "model outputs" if given else "advantages"


def _order(name: str) -> tuple[int, int, str]:
    places = (*_OUTPUTS, "advantages")
    return (_stage(name) != "model outputs", places.index(name) if name in places else len(places), name)


def part_reports(
    then: Mapping[str, Sequence[StepReport]], now: Mapping[str, Sequence[StepReport]], tolerance: float
) -> Iterator[Parting]:
    """Compare the optimizer steps that both took: the losses and their terms first, then the gradients."""
    for stage in ("loss", "gradient"):
        for role in then:
            pairs = list(zip(then[role], now.get(role, ()), strict=False))
            if not pairs:
                continue
            names = ["grad_norm"] if stage == "gradient" else ["loss", *sorted(pairs[0][0].metrics)]
            for name in names:
                numbers = [(_number(a, name), _number(b, name)) for a, b in pairs]
                if all(value is not None for pair in numbers for value in pair):
                    yield _part_numbers(stage, f"{role}/{name}", numbers, tolerance)  # type: ignore[arg-type]


def _number(report: StepReport, name: str) -> float | None:
    return getattr(report, name) if name in ("loss", "grad_norm") else report.metrics.get(name)


def _part_numbers(stage: Stage, name: str, numbers: Sequence[tuple[float, float]], tolerance: float) -> Parting:
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in numbers]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    worst = max(range(len(gaps)), key=lambda place: gaps[place])
    then, now = numbers[worst]
    place = f"optimizer step {worst + 1}: {then:.6g} then, {now:.6g} now" if gaps[worst] else ""
    limits = [tolerance * max(1.0, abs(a) if math.isfinite(a) else 1.0) for a, _ in numbers]
    return Parting(
        stage=stage,
        name=name,
        largest=gaps[worst],
        mean=sum(gaps) / len(gaps),
        where=place,
        parted=any(gap > limit for gap, limit in zip(gaps, limits, strict=True)),
    )


def part_models(name: str, then: Path, now: Path, tolerance: float) -> Parting:
    """Compare the weights of two Transformers directories, a tensor at a time."""
    largest, total, count, place, parted = 0.0, 0.0, 0, "", False
    ours = dict(_tensors(now))
    for tensor, file in _tensors(then):
        if tensor not in ours:
            missing = f"{tensor} is missing"
            return Parting(stage="weights", name=name, largest=math.inf, mean=math.inf, where=missing, parted=True)
        before, after = _read(file, tensor), _read(ours[tensor], tensor)
        gap = torch.where(_alike(before, after), 0.0, (before - after).abs().nan_to_num(math.inf, math.inf))
        if (most := float(gap.max())) > largest:
            largest, place = most, tensor
        parted = parted or bool((gap > tolerance * before.abs().nan_to_num(0).clamp(min=1)).any())
        total, count = total + float(gap.sum()), count + gap.numel()
    return Parting(
        stage="weights", name=name, largest=largest, mean=total / max(1, count), where=place, parted=parted
    )


def _tensors(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            yield from ((name, file) for name in content.keys())  # noqa: SIM118


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as content:
        return content.get_tensor(name).double()


def first_parted(partings: Iterable[Parting]) -> Parting | None:
    """The first quantity that parts by more than the tolerance."""
    return next((parting for parting in partings if parting.parted), None)
