"""The reports of a run: the numbers of each step on the console, in JSONL and TensorBoard files, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rlhf_algos import MetricsWriter, StepFile

from rlhf_launch.online.evaluation import Evaluation

_SHOWN = (
    *(
        "reward",
        "teacher/reverse_kl",
        "response_length",
        "kl",
        "entropy",
        "clip_fraction",
        "grad_norm",
        "truncated",
    ),
)


class Reporter:
    """Shows a run on the console and writes JSONL and TensorBoard files; a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        start: int = 0,
        tensorboard: bool = True,
        console: Console | None = None,
    ) -> None:
        self.directory = directory
        self.console = console or Console(highlight=False)
        self.totals: dict[str, float] = {}
        """Seconds of each phase so far."""
        self.evaluations: list[Evaluation] = []
        """In the order in which they were made; only the newest of each set has its examples."""
        self.latest: dict[str, float] = {}
        """The newest value of every metric."""
        self._measured_at: dict[str, int] = {}
        resume_step = start if start else None
        self._writer = MetricsWriter(directory, resume_step=resume_step, tensorboard=tensorboard)
        self._samples = StepFile(directory / "samples.jsonl", resume_step=resume_step)
        self._pending: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("[bold]step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("step", total=steps, completed=start, shown="")
        self._every = max(1, steps // 10)

    def step(
        self, step: int, metrics: Mapping[str, float], prompts: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Record one finished step, and what became of the prompts that it settled (see `PromptAccount`)."""
        if prompts is not None:
            self._samples.write(step, {"prompts": prompts})
        self._record(step, metrics)
        for name, value in metrics.items():
            if name.startswith("seconds/"):
                self.totals[name.removeprefix("seconds/")] = (
                    self.totals.get(name.removeprefix("seconds/"), 0) + value
                )
        shown = "  ".join(f"{name} {metrics[name]:.3g}" for name in _SHOWN if name in metrics)
        self._progress.update(self._task, completed=step, shown=shown)
        if not self.console.is_terminal and (step % self._every == 0 or step == 1):
            self.console.print(f"step {step:>5}  {shown}  {metrics.get('seconds/step', 0):.1f} s", soft_wrap=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record the evaluation of one set."""
        kept = [replace(old, examples=()) if old.name == evaluation.name else old for old in self.evaluations]
        self.evaluations = [*kept, evaluation]
        self._record(evaluation.step, evaluation.named_metrics)
        dropped = int(evaluation.metrics["dropped_samples"])
        without = f", {dropped} sample(s) without a score" if dropped else ""
        self.say(f"step {evaluation.step:>5}  {evaluation.name} reward {evaluation.reward:.3f}{without}")

    def measured(self, name: str, step: int) -> float | None:
        """A metric's value at this very step; None if it was not measured then."""
        return self.latest[name] if self._measured_at.get(name) == step else None

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.write(step, metrics)
        self.latest |= metrics
        self._measured_at |= dict.fromkeys(metrics, step)

    def flush_to_disk(self) -> None:
        """Bring what was recorded to the disk itself; a checkpoint must not outlive the rows of its steps."""
        self._samples.flush_to_disk()
        self._writer.flush_to_disk()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, soft_wrap=True)

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # a full disk must not keep one of them open
            stack.callback(self._samples.close)
            stack.callback(self._writer.close)
            stack.callback(self._progress.stop)


def plot_run(metrics_path: Path, image_path: Path) -> None:
    """Line plots of a run's metrics as a PNG: reward, length, KL, entropy, gradient norm, seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from rlhf_algos import read_metrics

    rows = read_metrics(metrics_path)
    panels = [
        ("reward", ("reward", *_evaluated(rows))),
        ("response length (tokens)", ("response_length",)),
        ("KL to the reference (nats)", ("kl", "reference_kl")),
        ("entropy (nats)", ("entropy",)),
        ("gradient norm", ("grad_norm",)),
        (
            "seconds per step",
            ("seconds/rollout", "seconds/reward", "seconds/score", "seconds/train", "seconds/sync"),
        ),
    ]
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 8 else None)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if len(names) > 1 and axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(image_path, dpi=110)
    pyplot.close(figure)


def _evaluated(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the evaluation rewards in the rows."""
    return sorted({name for row in rows for name in row if name.startswith("eval/") and name.endswith("/reward")})
