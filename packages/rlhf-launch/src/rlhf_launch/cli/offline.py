"""`rlhf offline`: the methods of rlhf-algos on many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_launch.cli.errors import run_command
from rlhf_launch.cli.plan import PlanGPUs, PlanHosts, PrintPlan, imagined


def offline(
    method: Annotated[str, typer.Argument(help="sft, rm, prm, dpo, simpo, cpo, orpo, kto, distill, module:METHOD")],
    config: Annotated[Path, typer.Argument(help="YAML file, the same as for `rlhf-algos`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings on top of the file, as dotted.key=value (train.ranks=8).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the run in the output directory aside, and begin anew.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete configuration and stop.")
    ] = False,
    print_plan: PrintPlan = False,
    hosts: PlanHosts = None,
    gpus_per_host: PlanGPUs = None,
) -> None:
    """Train on a data set (SFT, DPO, reward models, ...) with ZeRO-3 ranks placed by Ray."""

    def work() -> None:
        from rlhf_algos import OfflineConfig, load_config

        settings = load_config(OfflineConfig, config, [*(overrides or []), f"algorithm.name={method}"])
        if print_config:
            from rlhf_launch.config.printing import printed

            typer.echo(printed(settings), nl=False)
            return
        if print_plan:
            from rlhf_launch.offline.run import offline_plan

            typer.echo(offline_plan(settings, imagined(hosts, gpus_per_host)))
            return
        from rlhf_algos import ProgressBar

        from rlhf_launch.offline.run import train_offline

        with ProgressBar(quiet=False) as bar:
            result = train_offline(settings, resume=resume, overwrite=overwrite, on_event=bar.on_event, say=bar.say)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        typer.echo(f"{result.steps} steps; {numbers}")
        typer.echo(f"model: {result.model}" + (f"; best: {result.best}" if result.best else ""))

    run_command(work)
