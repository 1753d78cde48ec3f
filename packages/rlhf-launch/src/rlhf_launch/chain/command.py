"""`rlhf chain`: supervised training, a reward model and reinforcement learning in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def chain(
    config: Annotated[Path, typer.Argument(help="YAML file with `stages`; examples/chain has one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings on top of the file, as dotted.key=value (stages.ppo.train.steps=50)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip the stages that are done, continue the one that is not.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the chain in the output directory aside, and begin anew.")
    ] = False,
) -> None:
    """Run stages one after the other (SFT, reward model, PPO), each with the models that earlier ones left."""
    from rlhf_launch.chain.run import read_chain, run_chain

    result = run_chain(read_chain(config, overrides or []), resume=resume, overwrite=overwrite)
    console = Console(highlight=False)
    for stage in result.stages.values():
        done = "done before" if stage.name in result.skipped else f"{stage.seconds:.0f} s"
        console.print(f"{stage.name}: {stage.model} ({done})", soft_wrap=True)
