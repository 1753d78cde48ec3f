"""A progress bar of an offline run, for terminals."""

from __future__ import annotations

import math
from collections.abc import Mapping


class ProgressBar:
    """A progress bar on standard error; its `on_event` goes to `train`."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.quiet = quiet
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._task = self._progress.add_task("reading and scoring", total=None, note="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        self._progress.console.print(text, soft_wrap=True, highlight=False)

    def on_event(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Show an event; see `OfflineEvent`."""
        if kind == "plan":
            self._progress.console.print(
                f"{values['examples']} examples, {values['truncated']} truncated, {values['dropped']} dropped "
                "as too long"
            )
            self._progress.update(self._task, description="training", total=int(values["total"]), completed=step)
            return
        shown = [name for name in ("loss", "accuracy", "margin") if math.isfinite(values.get(name, math.nan))]
        note = " ".join(f"{name} {values[name]:.4f}" for name in shown)
        if kind == "eval":
            self._progress.console.print(f"step {step}: eval {note}")
        else:
            self._progress.update(self._task, completed=step, note=note)
