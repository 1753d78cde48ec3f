"""A replay as a table: quantity by quantity in the order of a step, and where the numbers part."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.replay.parting import Parting
from rlhf_launch.replay.result import Replay
from rlhf_launch.tables import aligned


def print_replay(replay: Replay, console: Console) -> None:
    """Print what a step gave then and now, and the first quantity that parts."""
    bundle = replay.bundle
    console.print(
        f"step {bundle.step} of {bundle.origin.output}, from {replay.weights}; then {_how(bundle.config())}, now "
        f"{_how(replay.config)}",
        soft_wrap=True,
        markup=False,
    )
    if replay.partings:
        console.print(_table(replay.partings), soft_wrap=True, markup=False)
    for note in replay.notes:
        console.print(f"  {note}", soft_wrap=True, markup=False)
    if bundle.error is not None:
        console.print(
            f"  then it ended in {bundle.error}; now in {replay.error or 'no error'}", soft_wrap=True, markup=False
        )
    console.print(summary(replay), soft_wrap=True, markup=False)


def _table(partings: Sequence[Parting]) -> str:
    rows = [("stage", "quantity", "largest", "mean", "", "at")]
    stage = ""
    for parting in partings:
        mark = "equal" if parting.equal else "PARTS" if parting.parted else "within"
        first, stage = "" if parting.stage == stage else parting.stage, parting.stage
        rows.append((first, parting.name, _number(parting.largest), _number(parting.mean), mark, parting.where))
    return aligned(rows, right=[2, 3])


def summary(replay: Replay) -> str:
    """The result as one line."""
    limit = f"tolerance {replay.tolerance:g} x max(1, |value|)"
    if not replay.partings:
        return "nothing could be compared"
    if replay.first is not None:
        return f"the numbers part first in {replay.first.stage}: {replay.first.name} ({limit})"
    return f"bit-equal: {len(replay.partings)} quantities" if replay.equal else f"no number parts ({limit})"


def _how(config: OnlineConfig) -> str:
    train, packed = config.train, "packed" if config.train.packing else "padded"
    return f"{config.algorithm.name} on {train.engine} in {config.model.dtype}, {packed}, {train.ranks} rank(s)"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"
