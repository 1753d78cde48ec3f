"""What a run says: numbers of each step to the console, to JSONL and to TensorBoard, and a plot at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rlhf_algos import MetricsWriter
from rlhf_core import Batch, Score, StepReport, Trajectory

from rlhf_launch.online.evaluation import Evaluation


class PhaseClock:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase."""
        begin = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def add(self, seconds: Mapping[str, float]) -> None:
        """Seconds of phases that were timed elsewhere."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def metrics(self, batch: Batch, *, overlapping: bool = False) -> dict[str, float]:
        """Seconds per phase and step; tokens per second: sampled ones of generation, all of training.

        Where generation overlaps the other phases, its tokens are those of the whole step, and its seconds those
        that the trainer waited.
        """
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["seconds/step"] = time.perf_counter() - self._begin
        sampled, trained = int(batch.response_mask.sum()), batch.tokens
        for phase, tokens in (("rollout", sampled), ("score", trained), ("train", trained)):
            whole_step = phase == "rollout" and overlapping
            if seconds := metrics["seconds/step"] if whole_step else self.seconds.get(phase):
                metrics[f"tokens_per_second/{phase}"] = tokens / seconds
        return metrics


def sample_metrics(trajectories: Sequence[Trajectory], scores: Sequence[Score], batch: Batch) -> dict[str, float]:
    """Reward, its components, lengths and truncation of one step's samples.

    `mismatch/log_prob_max` is the largest difference between the sampler's and the trainer's log-prob of one
    token. It is computed only where both mean the same distribution.
    """
    values = [score.value for score in scores]
    mean = sum(values) / len(values)
    metrics = {
        "reward": mean,
        "reward_std": (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5,
        "response_length": sum(t.response_length for t in trajectories) / len(trajectories),
        "truncated": sum(t.truncated for t in trajectories) / len(trajectories),
    }
    for name in sorted({name for score in scores for name in score.components}):
        parts = [score.components[name] for score in scores if name in score.components]
        metrics[f"reward/{name}"] = sum(parts) / len(parts)
    if "old_log_probs" in batch and not any(t.meaning.truncated for t in trajectories):
        gap = (batch["old_log_probs"] - batch["rollout_log_probs"]).abs().masked_fill(~batch.response_mask, 0)
        metrics["mismatch/log_prob_max"] = float(gap.max())
    return metrics


def step_metrics(reports: Mapping[str, Sequence[StepReport]]) -> dict[str, float]:
    """Means over the optimizer steps of one batch of samples, by role; the policy's without a prefix."""
    metrics: dict[str, float] = {}
    for role, steps in reports.items():
        prefix = "" if role == "policy" else f"{role}/"
        applied = [step for step in steps if not step.skipped]
        metrics[f"{prefix}skipped_steps"] = float(len(steps) - len(applied))
        for name in ("loss", "grad_norm", "learning_rate"):
            metrics[f"{prefix}{name}"] = _mean([getattr(step, name) for step in applied])
        for name in sorted({name for step in applied for name in step.metrics}):
            metrics[f"{prefix}{name}"] = _mean([s.metrics[name] for s in applied if name in s.metrics])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


_SHOWN = ("reward", "response_length", "kl", "entropy", "clip_fraction", "grad_norm", "truncated")


class Reporter:
    """Console with a progress bar, JSONL and TensorBoard. A context manager."""

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
        self.latest: dict[str, float] = {}
        """The newest value of every metric."""
        self._writer = MetricsWriter(directory, resume_step=start if start else None, tensorboard=tensorboard)
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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one finished step."""
        self._writer.write(step, metrics)
        self.latest |= metrics
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
        self.evaluations.append(evaluation)
        self._writer.write(evaluation.step, evaluation.metrics())
        self.latest |= evaluation.metrics()
        self.say(f"step {evaluation.step:>5}  {evaluation.name} reward {evaluation.reward:.3f}")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, soft_wrap=True)

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._writer.close()


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
