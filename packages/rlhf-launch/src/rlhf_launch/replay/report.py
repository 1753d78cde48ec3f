"""A replay as a table: quantity by quantity in the order of a step, and where the numbers part."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.replay.result import Replay

_WIDTH = 160
"""Names and places are printed whole, also where the output is no terminal."""


def print_replay(replay: Replay, console: Console) -> None:
    """Print what a step gave then and now, and the first quantity that parts."""
    bundle = replay.bundle
    console.print(
        f"step {bundle.step} of {bundle.origin.output}, from {replay.weights}; then {_how(bundle.config())}, now "
        f"{_how(replay.config)}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "quantity", "largest", "mean", "", "at"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("largest", "mean") else "left")
    stage = ""
    for parting in replay.partings:
        mark = "equal" if parting.equal else "PARTS" if parting.parted else "within"
        first = "" if parting.stage == stage else parting.stage
        stage = parting.stage
        table.add_row(first, parting.name, _number(parting.largest), _number(parting.mean), mark, parting.where)
    if replay.partings:
        console.print(table, width=max(console.width, _WIDTH), crop=False)
    for note in replay.notes:
        console.print(f"  {note}", soft_wrap=True)
    if bundle.error is not None:
        console.print(f"  then it ended in {bundle.error}; now in {replay.error or 'no error'}", soft_wrap=True)
    console.print(summary(replay), soft_wrap=True)


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
