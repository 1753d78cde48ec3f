"""`rlhf replay`: a kept step, taken again on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_launch.cli.errors import run_command


def replay(
    bundle: Annotated[Path, typer.Argument(help="A bundle, for instance runs/mine/bundles/step-000010.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings on top of the run's, as dotted.key=value (train.packing=false)."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A checkpoint or a model to start from, in place of the step's own.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="A number parts if it differs by more than this x max(1, |value|)."),
    ] = None,
) -> None:
    """Take the step in BUNDLE again, by the torch engine unless train.engine is given, and print where it parts.

    The exit code is 0 if all numbers are within the tolerance, 1 if one parts.
    """

    def work() -> None:
        from rlhf_launch.replay import rerun

        if rerun.replay_step(bundle, overrides or [], weights=weights, tolerance=tolerance).first is not None:
            raise SystemExit(1)

    run_command(work)
