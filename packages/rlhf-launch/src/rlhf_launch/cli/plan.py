"""`rlhf plan`, and the options of `--print-plan`: hosts that are there, or that one imagines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_launch.cli.errors import run_command

if TYPE_CHECKING:
    from rlhf_launch.placement.layout import Host

PrintPlan = Annotated[
    bool, typer.Option("--print-plan", help="Print which worker would sit on which host and GPUs, and stop.")
]
PlanHosts = Annotated[
    int | None,
    typer.Option("--hosts", min=1, help="With --print-plan: so many hosts, rather than those that there are."),
]
PlanGPUs = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-host", min=0, help="With --print-plan: so many GPUs on each (8 if only --hosts is given)."
    ),
]


def imagined(hosts: int | None, gpus_per_host: int | None) -> list[Host] | None:
    """Hosts to plan for; None for those that there are."""
    from rlhf_launch.planning.command import imagined_hosts

    if hosts is None and gpus_per_host is None:
        return None
    gpus = 8 if gpus_per_host is None else gpus_per_host
    return imagined_hosts(hosts or 1, gpus)


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of `rlhf train`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings on top of the file, as dotted.key=value.")
    ] = None,
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="Hosts, rather than those there are.")] = None,
    gpus_per_host: Annotated[int | None, typer.Option("--gpus-per-host", min=0, help="GPUs on each.")] = None,
    device: Annotated[str, typer.Option(help="a100, a800, h100, h200, ...; this host's if not given.")] = "",
    metrics: Annotated[
        Path | None, typer.Option(help="metrics.jsonl of an earlier run of CONFIG, to calibrate seconds on.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Look for faster layouts on these GPUs, and print what to paste.")
    ] = False,
) -> None:
    """Say before a run what fits where and how long a step takes; nothing is started and no weights are read."""

    def work() -> None:
        from rlhf_algos import load_config

        from rlhf_launch.config.run import OnlineConfig
        from rlhf_launch.planning.command import planned, searched

        run_config = load_config(OnlineConfig, config, overrides or [])
        if search:
            typer.echo(searched(run_config, imagined(hosts, gpus_per_host), device=device, metrics=metrics))
            return
        found = planned(run_config, imagined(hosts, gpus_per_host), device=device, metrics=metrics)
        typer.echo(found.text())

    run_command(work)
