"""`rlhf score`: scores for answers that are there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def score(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML file (one for `rlhf generate` or `rlhf train` will do), settings as key=value, or both."
        ),
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="JSONL or Parquet file with `prompt` and `response` or `responses`, or of `rlhf generate`."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The policy the answers are from, for its tokenizer (model.path).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL file to write or complete.")] = None,
    reward: Annotated[str | None, typer.Option(help="module:function that scores answers.")] = None,
    reward_model: Annotated[
        str | None, typer.Option(help="Reward model that scores answers (reward.model).")
    ] = None,
) -> None:
    """Give answers scores by any reward; no generator is started.

    Run it again after an interruption: it goes on where it stopped.
    """
    from rlhf_algos import load_config

    from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
    from rlhf_launch.scoring.run import score as score_answers

    flags = {
        "model.path": model,
        "data.train": answers,
        "output": output and str(output),
        "reward.function": reward,
        "reward.model": reward_model,
    }
    arguments = list(config or [])
    path = Path(arguments.pop(0)) if arguments and "=" not in arguments[0] else None
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    loaded = load_config(
        GenerateConfig, path, [*arguments, *given], ignore=ignored_by_generation() | {"rollout", "lengths"}
    )
    report = score_answers(loaded, console=Console(highlight=False))
    mean = "" if report.mean_score is None else f", mean score {report.mean_score:.4f}"
    dropped = f", {report.dropped} without a score" if report.dropped else ""
    typer.echo(f"{report.written} rows written to {loaded.output}: {report.answers} answers{dropped}{mean}")
