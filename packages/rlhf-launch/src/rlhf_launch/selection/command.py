"""`rlhf select`: from scored answers to a file that `rlhf offline` trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rlhf_core import ConfigError


def select(
    kind: Annotated[str, typer.Argument(help="best_of_n, threshold, quantile, pairs, labels or conditional.")],
    samples: Annotated[str, typer.Argument(help="File that `rlhf generate` or `rlhf score` wrote.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Of the rule, as key=value: k=2, threshold=0.5, by=helpful.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSONL file to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
) -> None:
    """Choose among scored answers, for sft (best_of_n, threshold, quantile, conditional), dpo and rm (pairs), kto.

    Prompts that give nothing are counted, and named in OUTPUT.report.json.
    """
    from rlhf_algos import ConditionalConfig

    from rlhf_launch.selection.run import read_rule, select_answers

    rule = read_rule(kind, settings or [])
    if output is None:
        raise ConfigError("there is no file to write; give --output chosen.jsonl")
    if output.exists() and not overwrite:
        raise ConfigError(f"{str(output)!r} exists; give another name, or write --overwrite")
    report = select_answers(samples, output, rule, seed=seed)
    for line in report.lines():
        typer.echo(line)
    if isinstance(rule, ConditionalConfig):
        typer.echo(f"to ask for the highest level: data.prompt_template={rule.highest!r}")
    typer.echo(f"wrote {output}, for `rlhf offline {'|'.join(rule.methods)}`")
