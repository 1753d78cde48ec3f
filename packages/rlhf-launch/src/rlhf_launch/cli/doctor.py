"""`rlhf doctor ...`: checks of a configuration that need its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_launch.cli.errors import run_command

doctor = typer.Typer(no_args_is_help=True, help="Checks that start the engines of a configuration.")


@doctor.callback()
def _doctor() -> None:
    """Checks that start the engines of a configuration."""


@doctor.command()
def mismatch(
    config: Annotated[Path, typer.Argument(help="Configuration of `rlhf train`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as dotted.key=value.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts, of rollout.samples_per_prompt samples each.")] = 8,
    sampler_model: Annotated[
        str | None, typer.Option(help="What the sampler loads, if it is not model.path.")
    ] = None,
) -> None:
    """Compare the log-probs of the sampler with those of the trainer and say where a difference comes from."""

    def work() -> None:
        from rlhf_algos import load_config

        from rlhf_launch.config.run import OnlineConfig
        from rlhf_launch.mismatch.run import check_mismatch

        run = load_config(OnlineConfig, config, overrides or [])
        check_mismatch(run, prompts=prompts, sampler_model=sampler_model)

    run_command(work)
