"""`rlhf iterate`: rounds of generation, scores, selection and offline training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def iterate(
    config: Annotated[Path, typer.Argument(help="YAML file; docs/rounds.md and examples/rounds/ have some.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings on top of the file, as dotted.key=value (rounds=5).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the round that was broken off.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the rounds in the output directory aside, and begin anew.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete configuration and stop.")
    ] = False,
) -> None:
    """Generate, score, select, train, and again: best of n (RAFT), iterative DPO, conditional SFT."""
    from rlhf_algos import load_config

    from rlhf_launch.rounds.config import RoundsConfig

    settings = load_config(RoundsConfig, config, overrides or [])
    if print_config:
        from rlhf_launch.config.printing import printed

        typer.echo(printed(settings), nl=False)
        return
    from rlhf_launch.rounds.run import iterate as run_rounds

    result = run_rounds(settings, resume=resume, overwrite=overwrite, console=Console(highlight=False))
    typer.echo(f"model: {result.model}")
