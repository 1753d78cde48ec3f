"""Checkpoints of an offline run: complete or absent, never half."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError, Ranks, TrainEngine

from rlhf_algos.torch_engine.ranks import rank_of

STATE = "run.json"


@dataclass(kw_only=True, slots=True)
class OfflineState:
    """Where a run stands, apart from the engine."""

    step: int = 0
    """Optimizer steps taken."""
    best: float | None = None
    """Best value of the chosen eval metric."""
    best_step: int = 0
    evaluations_without_gain: int = 0
    stopped_early: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    """What fixes the order and number of steps; a run can only be continued under the same plan."""


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in directory.iterdir()]
    return sorted(int(match[1]) for match in found if match and (directory / match[0] / STATE).exists())


def save_checkpoint(directory: Path, engine: TrainEngine, state: OfflineState, *, keep: int, ranks: Ranks) -> Path:
    """Write `step-N` beside and rename it; older ones go only when it is complete."""
    final = directory / f"step-{state.step}"

    def write(path: Path) -> None:
        engine.save(path)
        if rank_of(ranks) == 0:
            (path / STATE).write_text(json.dumps(asdict(state)) + "\n")

    replace_directory(final, write, ranks=ranks)
    if rank_of(ranks) == 0:
        for step in checkpoint_steps(directory)[: -keep or None]:
            shutil.rmtree(directory / f"step-{step}")
    return final


def load_checkpoint(directory: Path, engine: TrainEngine, plan: dict[str, Any]) -> OfflineState | None:
    """Continue from the last complete checkpoint; None if there is none.

    Raises:
        ConfigError: it was written under another plan, or is unreadable.
    """
    steps = checkpoint_steps(directory)
    if not steps:
        return None
    last = directory / f"step-{steps[-1]}"
    try:
        state = OfflineState(**json.loads((last / STATE).read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{last / STATE} is not the state of a run: {error}") from None
    changed = [
        f"{key} was {state.plan.get(key)!r}, is {plan[key]!r}" for key in plan if state.plan.get(key) != plan[key]
    ]
    if changed:
        raise ConfigError(
            f"{str(last)!r} cannot be continued: {'; '.join(changed)}. Restore these, or write another output"
        )
    engine.load(last)
    return state


def replace_directory(final: Path, write: Callable[[Path], None], *, ranks: Ranks) -> None:
    """Let all ranks `write` into a new directory, then put it in the place of `final`."""
    beside = final.with_name(final.name + ".tmp")
    if rank_of(ranks) == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    ranks.max(0)
    write(beside)
    ranks.max(0)
    if rank_of(ranks) == 0:
        old = final.with_name(final.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.rename(final, old)
        os.rename(beside, final)
        shutil.rmtree(old, ignore_errors=True)
    ranks.max(0)
