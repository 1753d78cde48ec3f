"""Rounds: generate, score, select, train, and again with the model that came of it.

Every part is a command of its own and goes on by itself where it was broken off; a round is complete when its
manifest is there, which is written last.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rlhf_algos import (
    CheckpointStore,
    ProgressBar,
    Start,
    naming_full_disk,
    open_run_directory,
    run_fingerprint,
)
from rlhf_core import ConfigError, DataError, StopRequest

from rlhf_launch.config.paths import absolute
from rlhf_launch.evaluation.run import evaluate_models
from rlhf_launch.evaluation.summary import as_plain
from rlhf_launch.generation.run import check_generation, generate
from rlhf_launch.named_models import find_model, merged_into
from rlhf_launch.offline.run import train_offline
from rlhf_launch.rounds.config import RoundsConfig
from rlhf_launch.rounds.parts import (
    RoundFolder,
    evaluation_config,
    generation_config,
    scoring_config,
    training_config,
)
from rlhf_launch.samples.prompts import policy_tokenizer
from rlhf_launch.scoring.run import score
from rlhf_launch.seeds import request_seed
from rlhf_launch.selection.run import as_json, select_answers, write_whole

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What a round left behind."""

    number: int
    """Counted from 1; 0 is the first model, evaluated before all rounds."""
    model: str
    """Directory of the model that came of it."""
    metrics: Mapping[str, float]
    """`score/mean` of the samples, `select/...`, `train/...`, and `eval/...` of the model that came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsResult:
    """What all rounds left behind."""

    rounds: tuple[RoundResult, ...]

    @property
    def model(self) -> str:
        """Directory of the last round's model."""
        return self.rounds[-1].model


def iterate(
    config: RoundsConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> RoundsResult:
    """Run the rounds that are not complete yet.

    Args:
        config: of all rounds.
        resume: go on with the rounds in the output, within the round that was broken off.
        overwrite: move what is in the output aside, and begin anew.
        console: is told what is up.
        stop: by which another thread may ask a training to end in good order; see `rlhf_algos.train`.

    Raises:
        UserError: an input is at fault; nothing heavy was started.
        RunStopped: training was asked to end, and did so with a checkpoint.
        RLHFError: something failed while running; `resume` goes on from there.
    """
    config, console = absolute(config), console or Console(highlight=False)
    start = Start(resume=resume, overwrite=overwrite)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    with naming_full_disk(config.output):
        start.check(config.output)
        fingerprint = _checked(config)
        store = CheckpointStore(config.output / "checkpoints")
        done = 0 if not resume else _complete(config.output)
        words = f"after {done} complete round(s)"
        with open_run_directory(config, fingerprint, store, start, say=say, done=words):
            run = _Run(config=config, console=console, say=say, stop=stop)
            try:
                return run.all()
            except Exception as error:
                error.add_note("complete rounds and finished parts are kept; --resume goes on from there")
                raise


def _checked(config: RoundsConfig) -> Mapping[str, Any]:
    """Check what all rounds will need, as far as it is there already; returns the fingerprint.

    Raises:
        UserError: an input is at fault.
    """
    tokenizer = policy_tokenizer(config.model)
    folder = RoundFolder.of(config.output, 1)
    sources = {}
    # Rounds that are given by their number are all alike.
    last = 1 if isinstance(config.rounds, int) else config.count
    for number in range(1, last + 1):
        own = config.of_round(number)
        generation = generation_config(config, number, model=config.model.path, folder=folder)
        loaded = check_generation(replace(generation, reward=own.reward))
        if (rule := config.asking(number)) is not None and any(prompt.messages for prompt in loaded.prompts):
            plain = all(prompt.source is None or isinstance(prompt.source, str) for prompt in loaded.prompts)
            if not plain:
                raise ConfigError(
                    f"select.kind={rule.kind}: {own.data.description} has prompts that are lists of messages, and "
                    "the next round could not ask in them for a level; give prompts as text, with data.chat: true"
                )
        training_config(config, number, model=config.model.path, first=config.model.path, folder=folder)
        sources |= {source.path: source for source in own.data.train}
    if config.evaluation.data:
        wanted = evaluation_config(config, 0, model=config.model.path, folder=folder)
        check_generation(wanted.generation)
    return run_fingerprint(
        data=list(sources.values()), tokenizer=tokenizer, models={"model.path": config.model.path}, seed=config.seed
    )


def _complete(output: Path) -> int:
    number = 0
    while RoundFolder.of(output, number + 1).manifest.exists():
        number += 1
    return number


@dataclass(kw_only=True, slots=True)
class _Run:
    config: RoundsConfig
    console: Console
    say: Callable[[str], None]
    stop: StopRequest | None
    results: list[RoundResult] = field(default_factory=list)

    def all(self) -> RoundsResult:
        """Every round, those that are complete read from their manifests."""
        config = self.config
        model = config.model.path
        if config.evaluation.data:
            self._add(self._round(0, model))
        for number in range(1, config.count + 1):
            self._add(self._round(number, model))
            model = self.results[-1].model
        return RoundsResult(rounds=tuple(self.results))

    def _add(self, result: RoundResult) -> None:
        """Write the metrics anew: a line for each round, whatever was there before."""
        self.results.append(result)
        lines = [json.dumps({"round": each.number, **each.metrics}) + "\n" for each in self.results]
        write_whole(self.config.output / METRICS, "".join(lines))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        self.say(f"round {result.number}: {shown}")

    def _round(self, number: int, model: str) -> RoundResult:
        folder = RoundFolder.of(self.config.output, number)
        if folder.manifest.exists():
            return _read(folder, number, model)
        folder.path.mkdir(parents=True, exist_ok=True)
        begin, metrics = time.perf_counter(), {}
        made = model
        if number:
            metrics = self._choose(number, model, folder)
            made, trained = self._train(number, model, folder)
            metrics |= trained
        metrics |= self._evaluate(number, made, folder)
        content = {
            "round": number,
            "begun_from": model,
            # Within the folder by its place in it, so that the whole run can be moved.
            "model": str(Path(made).relative_to(folder.path)) if number else None,
            "metrics": metrics,
            "seconds": round(time.perf_counter() - begin, 1),
        }
        write_whole(folder.manifest, as_json(content))
        return RoundResult(number=number, model=made, metrics=metrics)

    def _choose(self, number: int, model: str, folder: RoundFolder) -> dict[str, float]:
        """Samples with scores, and what is trained on among them."""
        config, own = self.config, self.config.of_round(number)
        self.say(f"round {number} of {config.count}: samples of {model}")
        generate(generation_config(config, number, model=model, folder=folder), console=self.console)
        samples = folder.samples
        if own.scoring == "after":
            score(scoring_config(config, number, model=model, folder=folder), console=self.console)
            samples = folder.scored
        seed = request_seed(config.seed, f"round {number} select")
        report = select_answers(str(samples), folder.chosen, own.select, seed=seed)
        for line in report.lines():
            self.say(f"  {line}")
        return {
            "score/mean": math.nan if report.mean_score is None else report.mean_score,
            "select/rows": float(report.rows),
            "select/unscored": float(report.unscored),
            "select/prompts_left_out": float(sum(map(len, report.left_out.values()))),
        }

    def _train(self, number: int, model: str, folder: RoundFolder) -> tuple[str, dict[str, float]]:
        """The model that a round makes, and the last metrics of its training."""
        config = self.config
        exported = folder.training / "model"
        # The model is put in its place whole, as the last act of a training.
        if not exported.exists():
            wanted = training_config(config, number, model=model, first=config.model.path, folder=folder)
            begun = (folder.training / "run.json").exists()
            with ProgressBar(quiet=self.console.quiet) as bar:
                train_offline(wanted, resume=begun, on_event=bar.on_event, say=self.say, stop=self.stop)
        trusted = config.model.trust_remote_code
        made = merged_into(find_model(str(exported)), folder.merged, trust_remote_code=trusted)
        return made, {f"train/{name}": value for name, value in _last_metrics(folder.training).items()}

    def _evaluate(self, number: int, model: str, folder: RoundFolder) -> dict[str, float]:
        if not self.config.evaluation.data:
            return {}
        wanted = evaluation_config(self.config, number, model=model, folder=folder)
        found: dict[str, float] = {}
        summaries = evaluate_models(wanted, console=self.console)
        for summary in summaries:
            place = "eval" if len(summaries) == 1 else f"eval/{summary.data}"
            plain = as_plain(summary)
            numbers = {name: plain[name] for name in plain if name in _REPORTED or name.startswith("pass@")}
            found |= {f"{place}/{name}": float(value) for name, value in numbers.items() if value is not None}
        return found


_REPORTED = ("reward", "standard_error", "truncated", "response_length")


def _read(folder: RoundFolder, number: int, begun_from: str) -> RoundResult:
    try:
        content = json.loads(folder.manifest.read_text(encoding="utf-8"))
        model = str(folder.path / content["model"]) if number else begun_from
        metrics = {name: float(value) for name, value in content["metrics"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(folder.manifest)!r} is not the manifest of a round ({type(error).__name__}: {error}); "
            "remove the folders from this round on, and --resume makes them anew"
        ) from None
    if not Path(model).exists() and number:
        raise DataError(
            f"round {number} is complete, but its model {model!r} is not there; restore it, or remove the folders "
            "from this round on, and --resume makes them anew"
        )
    return RoundResult(number=number, model=model, metrics=metrics)


def _last_metrics(folder: Path) -> dict[str, float]:
    """Numbers of the last step of a training."""
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1]) if lines else {}
    return {name: float(value) for name, value in last.items() if isinstance(value, int | float)}
