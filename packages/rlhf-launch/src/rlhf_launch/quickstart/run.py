"""The main job on one machine, from nothing: a small model, a supervised warm-up, then GRPO on the full stack."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rlhf_algos import SFTConfig, TorchEngine, load_config, sft
from rlhf_core import Batch, ConfigError, EngineConfig, Loss, OptimizerConfig

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.evaluation import Evaluation
from rlhf_launch.online.run import train
from rlhf_launch.quickstart.arithmetic import (
    Problem,
    character_tokenizer,
    make_model,
    make_problems,
    supervised_batch,
    write_problems,
)

CONFIG = "quickstart.yaml"
WARM_UP_BATCH = 128
WARM_UP_TARGET = 0.25
WARM_UP_MAX_STEPS = 900
HELD_OUT = 500
SETTINGS: dict[str, Any] = {
    "reward": {"function": "rlhf_launch.quickstart.arithmetic:exact_sum"},
    "rollout": {
        "samples_per_prompt": 16,
        "max_num_seqs": 512,
        "sampling": {"max_tokens": 5},
    },
    "train": {
        "steps": 80,
        "ranks": 2,
        "prompts_per_step": 32,
        "minibatches": 4,
        "optimizer": {"learning_rate": 2e-5},
    },
}


def run_quickstart(
    folder: Path, *, seed: int = 0, overrides: Sequence[str] = (), console: Console | None = None
) -> dict[str, float]:
    """Run the quickstart in `folder` (emptied first, if a quickstart wrote it).

    Returns held-out accuracy `before` and `after` GRPO, and the `seconds` that everything took.
    """
    begin = time.perf_counter()
    console = console or Console(highlight=False)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).exists():
        raise ConfigError(
            f"{str(folder)!r} holds files that no quickstart wrote, and would be emptied; give another --output-dir"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    problems, held_out = make_problems(digits=2, held_out=HELD_OUT, seed=seed)
    config = write_config(folder, problems, held_out, seed=seed, overrides=overrides)
    parameters = make_model(folder / "random", seed=seed)
    console.print(f"[bold]1[/] supervised warm-up of a {parameters / 1e6:.2f} M parameter Qwen2 on two-digit sums")
    steps = warm_up(folder / "random", folder / "warmed-up", problems, seed=seed, console=console)
    warm_up_seconds = time.perf_counter() - begin
    console.print(f"  {steps} steps of {WARM_UP_BATCH} rows, {warm_up_seconds:.0f} s")
    console.print("[bold]2[/] GRPO with a verifiable reward; the parts:")
    run = train(config, console=console)
    before, after = run.evaluations[0], run.evaluations[-1]
    seconds = time.perf_counter() - begin
    show_samples(console, after)
    show_seconds(console, {"warm-up": warm_up_seconds, **run.seconds}, seconds)
    accuracy = {"before": before.reward, "after": after.reward}
    console.print(
        f"[bold]held-out accuracy {accuracy['before']:.1%} -> {accuracy['after']:.1%}[/] "
        f"({len(held_out)} sums, greedy) in {seconds:.0f} s"
    )
    console.print(f"model, metrics.jsonl, TensorBoard files and plot.png are in {config.output}", soft_wrap=True)
    return accuracy | {"seconds": seconds}


def write_config(
    folder: Path, problems: Sequence[Problem], held_out: Sequence[Problem], *, seed: int, overrides: Sequence[str]
) -> OnlineConfig:
    """Write data and `quickstart.yaml` (an ordinary configuration for `rlhf train`), and read it back."""
    paths = {
        "model": {"path": str(folder / "warmed-up")},
        "data": {"train": str(write_problems(problems, folder / "train.jsonl"))},
        "lengths": {"max_prompt_tokens": 8},
        "evaluation": {"data": str(write_problems(held_out, folder / "held-out.jsonl"))},
        "output": str(folder / "run"),
        "seed": seed,
    }
    path = folder / CONFIG
    settings = SETTINGS | paths
    if find_spec("ray") is None or find_spec("deepspeed") is None:
        settings["train"] = {**SETTINGS["train"], "ranks": 1}  # several ranks need both
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return load_config(OnlineConfig, path, overrides)


def warm_up(start: Path, target: Path, problems: Sequence[Problem], *, seed: int, console: Console) -> int:
    """Supervised steps until the model solves a quarter of the sums when it samples; returns how many.

    Stopping there leaves something to improve, whatever the seed. The rate is held: no decay.
    """
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=30)
    engine = TorchEngine(EngineConfig(model=str(start), optimizer=optimizer, seed=seed))
    tokenizer = character_tokenizer()
    draw = random.Random(seed)
    probe = supervised_batch(draw.sample(list(problems), 256), tokenizer)
    loss = Loss(function=sft, config=SFTConfig())
    steps = 0
    for steps in track(range(1, WARM_UP_MAX_STEPS + 1), description="  warm-up", console=console, transient=True):
        engine.step(supervised_batch(draw.sample(list(problems), WARM_UP_BATCH), tokenizer), loss)
        if steps % 10 == 0 and chance_of_right_answer(engine, probe) >= WARM_UP_TARGET:
            break
    target.mkdir()
    engine.export(target)
    tokenizer.save_pretrained(target)
    engine.close()
    return steps


def chance_of_right_answer(engine: TorchEngine, batch: Batch) -> float:
    """Mean probability that a sampled answer is the right one: the expected reward, without sampling."""
    log_probs = engine.score(batch, ("log_probs",)).log_probs
    return float(log_probs.sum(dim=1).exp().mean()) if log_probs is not None else 0.0


def show_samples(console: Console, evaluation: Evaluation, *, count: int = 5) -> None:
    """The first few held-out prompts with the trained policy's answers."""
    tokenizer = character_tokenizer()
    table = Table(title="held-out sums after training", title_justify="left", box=None)
    for column in ("prompt", "answer", "right", ""):
        table.add_column(column)
    for group in evaluation.examples[:count]:
        trajectory, score = group.trajectories[0], group.scores[0]
        given = tokenizer.decode(trajectory.response_token_ids.tolist(), skip_special_tokens=True)
        right = str(trajectory.metadata["answer"])
        table.add_row(trajectory.metadata["prompt"], given, right, "yes" if score.value == 1 else "no")
    console.print(table)


def show_seconds(console: Console, seconds: Mapping[str, float], total: float) -> None:
    """Where the time went."""
    phases = {name: value for name, value in seconds.items() if name != "step"}
    phases["start-up and the rest"] = total - sum(phases.values())
    table = Table(title="where the time went", title_justify="left", box=None)
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for name, value in phases.items():
        table.add_row(name, f"{value:.1f}")
    console.print(table)
