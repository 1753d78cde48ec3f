"""The options of `--print-plan`: hosts that are there, or that one imagines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

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
    from rlhf_launch.placement.layout import Host

    if hosts is None and gpus_per_host is None:
        return None
    gpus = 8 if gpus_per_host is None else gpus_per_host
    return [Host(name=f"host {number + 1}", gpus=gpus) for number in range(hosts or 1)]
