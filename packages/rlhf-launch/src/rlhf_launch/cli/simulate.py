"""`rlhf simulate`: what other settings would give, by the lengths and timings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rlhf_core import ConfigError

from rlhf_launch.cli.errors import run_command

if TYPE_CHECKING:
    from rlhf_launch.simulation.forecast import Forecast

_MODES = {"rest": "alternate", "pause": "partial", "run": "async"}
_COLUMNS = ("mode", "engines", "prompts", "staleness", "in flight", "s/step", "steps/h", "prompts/h/GPU")


def simulate(
    run: Annotated[Path, typer.Argument(help="Output directory of a run of `rlhf train`.")],
    engines: Annotated[str, typer.Option(help="Numbers of rollout engines to try, as 1,2,4.")] = "",
    staleness: Annotated[str, typer.Option(help="Values of max_staleness to try; 0 alternates.")] = "0,1,2",
    in_flight: Annotated[str, typer.Option(help="Values of max_in_flight to try; 0: no limit.")] = "",
    prompts: Annotated[str, typer.Option(help="Values of train.prompts_per_step to try.")] = "",
    pause: Annotated[
        bool, typer.Option("--pause", help="Overlap as with pause_while_training: partial rollouts.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of each forecast.")] = 24,
) -> None:
    """Forecast the speed of RUN with other settings, from the lengths and timings that it has recorded."""

    def work() -> None:
        from rlhf_launch.simulation.forecast import Alternatives, forecast
        from rlhf_launch.simulation.records import read_run

        if steps < 1:
            raise ConfigError(f"simulate: --steps must be 1 or more, got {steps}")
        alternatives = Alternatives(
            engines=_numbers("--engines", engines),
            staleness=_numbers("--staleness", staleness),
            in_flight=_numbers("--in-flight", in_flight),
            per_step=_numbers("--prompts", prompts),
            pause=pause,
        )
        recorded = read_run(run)
        settings = alternatives.of(recorded.setting)
        same = forecast(recorded, recorded.setting, steps=steps)
        typer.echo(f"recorded: {recorded.step_s:.2f} s/step over {len(recorded.rows)} steps")
        typer.echo(f"the same, simulated: {same.step_s:.2f} s/step ({same.step_s / recorded.step_s - 1:+.1%})")
        if recorded.setting.during_training != "rest":
            typer.echo("the run overlaps, so its engines' tokens per second are taken as they were at its load")
        typer.echo("".join(f"{name:>14}" for name in (*_COLUMNS, "speed")))
        for found in (same, *(forecast(recorded, setting, steps=steps) for setting in settings)):
            typer.echo(_row(found, same))

    run_command(work)


def _row(found: Forecast, same: Forecast) -> str:
    setting = found.setting
    cells = (
        _MODES[setting.during_training],
        str(setting.engines),
        str(setting.per_step),
        f"{found.staleness:.2f} of {setting.max_staleness}",
        str(setting.max_in_flight or "-"),
        f"{found.step_s:.2f}",
        f"{found.steps_per_hour:.1f}",
        f"{found.prompts_per_device_hour:.0f}",
        f"{found.prompts_per_device_hour / same.prompts_per_device_hour:.2f}x",
    )
    return "".join(f"{cell:>14}" for cell in cells)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"simulate: {option}={text!r}; write whole numbers with commas, as 1,2,4") from None
