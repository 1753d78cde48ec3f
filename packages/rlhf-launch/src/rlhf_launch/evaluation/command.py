"""`rlhf eval`: models on data sets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rlhf_core import ConfigError

if TYPE_CHECKING:
    from rlhf_launch.config.reward import RewardSection


def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model directories, hub names, directories of runs, or adapters over their base."),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL or Parquet file, or hub dataset; may be given several times.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration of `rlhf train` or `rlhf generate` whose reward and settings count."),
    ] = None,
    reward_function: Annotated[str | None, typer.Option(help="module:function that scores samples.")] = None,
    math: Annotated[bool, typer.Option("--math", help="Score by math verification against `answer`.")] = False,
    samples: Annotated[int, typer.Option(help="Samples per prompt.")] = 8,
    k: Annotated[str, typer.Option("--k", help="The k of pass@k, as 1,4,8.")] = "1",
    pass_score: Annotated[float, typer.Option(help="A sample passes with a score above this.")] = 0.5,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens per sample.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    backend: Annotated[str | None, typer.Option(help="vllm, transformers, openai, ...")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step.")] = None,
    samples_file: Annotated[
        list[Path] | None,
        typer.Option(help="Sum up these samples instead of generating; may be given several times."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting on top, as dotted.key=value; may be given several times."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for results.json and samples/.")] = Path(
        "eval"
    ),
) -> None:
    """Evaluate MODELS on data sets: mean reward, pass@k, share truncated, length.

    Run it again after an interruption: it goes on where it stopped.
    """
    from rlhf_algos import load_config

    from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
    from rlhf_launch.evaluation.run import RESULTS, EvalConfig, evaluate_files, evaluate_models
    from rlhf_launch.evaluation.summary import as_table
    from rlhf_launch.named_models import find_model

    ks = _numbers(k)
    if samples_file:
        generating = {
            "the models": models,
            "--data": data,
            "--config": config,
            "--reward-function": reward_function,
        }
        if clash := [name for name, value in generating.items() if value] + ["--math"] * math:
            raise ConfigError(f"--samples-file has samples and scores already; leave out {', '.join(clash)}")
        found = evaluate_files(samples_file, ks, output, pass_score=pass_score)
    else:
        flags = {
            "data.train": data or None,
            "rollout.samples_per_prompt": samples,
            "rollout.sampling.max_tokens": max_tokens,
            "rollout.sampling.temperature": temperature,
            "rollout.backend": backend,
            "seed": seed,
            "output": str(output / "samples.jsonl"),
        }
        given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
        found_models = [find_model(name, step=step) for name in models or []]
        if not found_models:
            raise ConfigError("there is no model to evaluate; name at least one, or give --samples-file")
        given.append(f"model.path={json.dumps(found_models[0].path)}")
        if config is None:
            given.insert(0, "placement.executor=local")
        # Settings of the user's come last and win.
        generation = load_config(
            GenerateConfig, config, [*given, *(settings or [])], ignore=ignored_by_generation()
        )
        own = _reward(reward_function, math=math)
        wanted = EvalConfig(
            models=found_models,
            generation=generation if own is None else replace(generation, reward=own),
            output=output,
            ks=ks,
            pass_score=pass_score,
        )
        found = evaluate_models(wanted, console=Console(highlight=False))
    typer.echo(as_table(found, ks))
    typer.echo(f"wrote {output / RESULTS}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--k is {text!r}; write whole numbers with commas between them, as 1,4,8") from None


def _reward(function: str | None, *, math: bool) -> RewardSection | None:
    from rlhf_rollout import MathRewardConfig

    from rlhf_launch.config.reward import RewardSection

    if function is not None and math:
        raise ConfigError("--reward-function and --math are two rewards; give one, or a sum of them in --config")
    if math:
        return RewardSection(parts={"math": MathRewardConfig()})
    return None if function is None else RewardSection(function=function)
