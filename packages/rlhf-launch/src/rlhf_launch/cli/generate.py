"""`rlhf generate`: samples for a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_launch.cli.errors import run_command


def generate(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML file (one for `rlhf train` will do), settings as dotted.key=value, or both.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to sample from (model.path).")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL or Parquet file, or hub dataset (data.train).")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL file to write or complete.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per prompt (rollout.samples_per_prompt).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens per sample (rollout.sampling.max_tokens).")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (rollout.sampling.temperature).")] = None,
    backend: Annotated[str | None, typer.Option(help="vllm, transformers, openai, ... (rollout.backend).")] = None,
    reward: Annotated[str | None, typer.Option(help="module:function that scores samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
) -> None:
    """Write samples with token ids, log-probs and scores for every prompt of a file.

    Run it again after an interruption: it goes on where it stopped.
    """
    flags: dict[str, Any] = {
        "model.path": model,
        "data.train": prompts,
        "output": output and str(output),
        "rollout.samples_per_prompt": samples,
        "rollout.sampling.max_tokens": max_tokens,
        "rollout.sampling.temperature": temperature,
        "rollout.backend": backend,
        "reward.function": reward,
        "seed": seed,
    }
    arguments = list(config or [])
    path = Path(arguments.pop(0)) if arguments and "=" not in arguments[0] else None
    # JSON is YAML.
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]

    def work() -> None:
        from rlhf_algos import load_config

        from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
        from rlhf_launch.generation.run import generate as generate_samples

        defaults = [] if path else ["rollout.samples_per_prompt=1", "placement.executor=local"]
        loaded = load_config(GenerateConfig, path, [*defaults, *arguments, *given], ignore=ignored_by_generation())
        report = generate_samples(loaded)
        score = "" if report.mean_score is None else f", mean score {report.mean_score:.4f}"
        typer.echo(f"{report.written} rows written to {loaded.output}: {report.tokens} tokens{score}")

    run_command(work)
