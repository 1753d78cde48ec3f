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


def judge_rows(
    config: Annotated[
        list[str],
        typer.Argument(help="YAML file of the run that the judge is for, settings (key=value), or both."),
    ],
    pairs: Annotated[
        str, typer.Option(help="Rows of prompt, chosen and rejected, or prompt, completion and label.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write.")],
    part: Annotated[
        str | None, typer.Option(help="Name of the judge among reward.parts, where there are several.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
) -> None:
    """Write rows for `rlhf offline sft` that make a judge (reward of the kind generative or pairwise).

    What the judge is asked in them is what the run will ask it.
    """
    from rlhf_algos import load_config
    from rlhf_core import ConfigError

    from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
    from rlhf_launch.scoring.judge_rows import judge_rows as write_rows

    if output.exists() and not overwrite:
        raise ConfigError(f"{str(output)!r} exists; give another name, or write --overwrite")
    arguments = list(config)
    path = Path(arguments.pop(0)) if arguments and "=" not in arguments[0] else None
    given = [f"data.train={json.dumps(pairs)}", f"output={json.dumps(str(output))}"]
    loaded = load_config(
        GenerateConfig, path, [*arguments, *given], ignore=ignored_by_generation() | {"rollout", "lengths"}
    )
    written = write_rows(loaded, output, part=part)
    typer.echo(f"wrote {written} rows to {output}; train the judge with `rlhf offline sft`, data.train={output}")
