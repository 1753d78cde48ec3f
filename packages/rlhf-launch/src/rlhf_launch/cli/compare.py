"""`rlhf compare`: a run beside others, for one's own CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rlhf_core import ConfigError

from rlhf_launch.cli.errors import run_command


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Output directories, metrics.jsonl files or stored histories; the last is compared."),
    ],
    store: Annotated[
        Path | None, typer.Option(help="Write the history of all RUNS into this file, and compare nothing.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Look at this metric alone; may be given several times.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Probability of a false alarm, over all metrics.")] = 0.01,
    exact: Annotated[bool, typer.Option("--exact", help="Take any difference for a change.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every metric that differs.")] = False,
) -> None:
    """Find the first step at which the last of RUNS differs from the others, and whether that is noise or a change.

    The exit code is 0 for equal runs and for noise, 1 for a change.
    """

    def work() -> None:
        from rlhf_launch.comparison.compare import compare_runs
        from rlhf_launch.comparison.history import read_histories, store_histories
        from rlhf_launch.comparison.report import print_comparison

        if store is not None:
            histories = [history for path in runs for history in read_histories(path)]
            store_histories(store, histories)
            typer.echo(f"wrote {store}: {len(histories)} run(s)")
            return
        if len(runs) < 2:
            raise ConfigError("compare needs two runs: rlhf compare BASELINE... RUN")
        found = compare_runs(runs[:-1], runs[-1], metrics=metric or (), alpha=alpha)
        print_comparison(found, Console(highlight=False), every=every)
        if found.verdict == "change" or (exact and found.verdict != "equal"):
            raise SystemExit(1)

    run_command(work)
