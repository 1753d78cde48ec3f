"""Evaluation of models on data sets: each model generates its samples for all sets, then they are summed up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rlhf_algos import naming_full_disk
from rlhf_core import ConfigError

from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.evaluation.labels import labels
from rlhf_launch.evaluation.summary import Summary, as_plain, check_counts, check_ks, read_samples, summarise_rows
from rlhf_launch.generation.run import check_generation, generate
from rlhf_launch.named_models import FoundModel, merged_into
from rlhf_launch.samples.prompts import PromptSets

RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """What `rlhf eval` measures."""

    models: Sequence[FoundModel]
    generation: GenerateConfig
    """How samples are made and scored. `model.path` is replaced by each model's, `output` by a file in the folder;
    `data.train` are the data sets, each by itself."""
    output: Path
    """Directory for `results.json` and `samples/`."""
    ks: Sequence[int] = (1,)
    pass_score: float = 0.5
    """A sample passes with a score above this."""

    def __post_init__(self) -> None:
        check_ks(self.ks, self.generation.rollout.samples_per_prompt)
        if self.generation.reward is None:
            raise ConfigError(
                "there is no reward to evaluate by; give --reward-function module:function, --math, or --config "
                "with a configuration that has one"
            )
        if not self.models:
            raise ConfigError("there is no model to evaluate; name at least one")
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"{str(self.output)!r} is a file; give a directory for the results")


def evaluate_models(config: EvalConfig, *, console: Console | None = None) -> list[Summary]:
    """Evaluate every model on every data set, and write `results.json`; goes on after an interruption.

    Everything is read and checked for all models before the first is loaded.

    Raises:
        UserError: an input is at fault.
        RewardError: the reward function failed; finished rows are there, the next call goes on from them.
    """
    console = console or Console(highlight=False)
    sources = config.generation.data.train
    sets = labels([source.path for source in sources])
    names = labels([model.name for model in config.models])
    with naming_full_disk(config.output):
        planned: list[tuple[str, GenerateConfig, PromptSets]] = []
        for name, model in zip(names, config.models, strict=True):
            trusted = config.generation.model.trust_remote_code
            path = merged_into(model, config.output / "merged", trust_remote_code=trusted)
            own = replace(
                config.generation,
                model=replace(config.generation.model, path=path),
                output=config.output / "samples" / f"{name}.jsonl",
            )
            planned.append((name, own, check_generation(own)))
        summaries = []
        for name, own, prompts in planned:
            own.output.parent.mkdir(parents=True, exist_ok=True)
            generate(own, console=console)
            by_set = _by_set(list(read_samples(own.output)), prompts)
            for data, rows in zip(sets, by_set, strict=True):
                summaries.append(
                    summarise_rows(rows, config.ks, model=name, data=data, pass_score=config.pass_score)
                )
        about = {"models": {name: own.settings() for name, own, _ in planned}, "pass_score": config.pass_score}
        write_results(config.output, summaries, about)
    return summaries


def evaluate_files(files: Sequence[Path], ks: Sequence[int], output: Path, *, pass_score: float) -> list[Summary]:
    """Sum up samples that are there already, a summary for each file, and write `results.json`.

    Raises:
        DataError: a file without scores, with too few samples, or of something else.
    """
    check_ks(ks, max(ks))
    names = labels([str(file) for file in files])
    read = [list(read_samples(file)) for file in files]
    for file, rows in zip(files, read, strict=True):
        check_counts(file, rows, ks)
    summaries = [
        summarise_rows(rows, ks, model="-", data=name, pass_score=pass_score)
        for name, rows in zip(names, read, strict=True)
    ]
    about = {"samples_files": [str(file.absolute()) for file in files], "pass_score": pass_score}
    with naming_full_disk(output):
        write_results(output, summaries, about)
    return summaries


def write_results(output: Path, summaries: Sequence[Summary], settings: Mapping[str, Any]) -> None:
    """Write `results.json`, whole or not at all."""
    output.mkdir(parents=True, exist_ok=True)
    content = {"results": [as_plain(summary) for summary in summaries], "settings": settings}
    beside = output / f".{RESULTS}.tmp"
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(beside, output / RESULTS)


def _by_set(rows: Sequence[Mapping[str, Any]], prompts: PromptSets) -> Iterator[list[Mapping[str, Any]]]:
    """The rows of each data set, in the order of the data. Rows come in the order in which they were finished."""
    by_prompt = {row["prompt_id"]: row for row in rows}
    place = 0
    for size in prompts.sizes:
        yield [by_prompt[prompt.prompt_id] for prompt in prompts.prompts[place : place + size]]
        place += size
