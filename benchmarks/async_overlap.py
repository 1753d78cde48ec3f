"""What it gains to overlap generation and training: the same number of steps in three modes, measured in one run.

    python benchmarks/async_overlap.py                  # three to five minutes on two cores
    python benchmarks/async_overlap.py --steps 8 --rounds 1

GRPO on a small random model whose responses have a long tail of lengths, by the real stack: Ray places a
DeepSpeed rank for the policy and a vLLM engine, weights travel by the run's own link. The modes share the workers:

- `alternate`: generation and training take turns (no `rollout.overlap`);
- `partial`: more prompts than a step needs are under way; unfinished samples stand still while the policy is
  trained, and go on under the new weights (`pause_while_training: true`);
- `async`: generation goes on during training (`pause_while_training: false`).

Wall time per step, without the first steps, which fill the pipeline. The table also says how long trainer and
engines were idle, and how stale the samples were. `bound` is what perfect overlap of the two phases of `alternate`
would give: their sum over the longer one. On two cores trainer and engine have one each.

`forecast` is what `rlhf simulate` says of each mode from the lengths and timings that `alternate` has recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rlhf_algos import CheckpointStore, from_mapping, read_metrics
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch import (
    OnlineConfig,
    OnlineRun,
    Overlap,
    RecordedSetting,
    Reporter,
    check_inputs,
    forecast,
    open_producer,
    open_run,
    recorded,
    run_steps,
    schedule_of,
)

FILL = 2
"""Steps that are not counted."""

MODES = {
    "alternate": None,
    "partial": {"max_staleness": 1, "pause_while_training": True},
    "async": {"max_staleness": 1},
}


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """A reward that costs nothing."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def configuration(folder: Path, *, prompts: int, samples: int) -> OnlineConfig:
    """GRPO on random prompts. A few percent of the vocabulary end a response, so lengths fall off geometrically."""
    model = save_tiny_model(folder / "policy", hidden_size=256, layers=6)
    rows = [{"prompt": f"{number:04d} plus {number * 7 % 1000:04d} equals "} for number in range(512)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": str(model)},
        "data": {"train": str(folder / "prompts.jsonl")},
        "lengths": {"max_prompt_tokens": 32},
        "reward": {"function": "async_overlap:share_of_digits"},
        "rollout": {
            "samples_per_prompt": samples,
            "max_num_seqs": 256,
            "sampling": {"max_tokens": 384, "stop_token_ids": list(range(100, 106))},
        },
        "train": {"prompts_per_step": prompts, "steps": 1, "optimizer": {"learning_rate": 1e-5}},
        "placement": {"executor": "ray", "device": "cpu"},
        "output": str(folder / "run"),
    }
    return from_mapping(OnlineConfig, settings, source="benchmark")


def with_steps(config: OnlineConfig, steps: int) -> OnlineConfig:
    """The same run with another number of steps."""
    return replace(config, train=replace(config.train, steps=steps))


def measure(run: OnlineRun, config: OnlineConfig, mode: str, *, steps: int) -> dict[str, float]:
    """Seconds per step and the means of what the steps report."""
    overlap = None if MODES[mode] is None else Overlap(**MODES[mode])
    version = run.sync.version or 0
    # As many further steps stand in for the run's continuation: without them there is less and less to overlap.
    config = replace(config, rollout=replace(config.rollout, overlap=overlap))
    config = with_steps(config, version + steps + 99)
    producer = open_producer(config, run.prompts, run.make_groups, run.pool)
    producer.ledger.step = producer.ledger.version = run.state.step = version
    schedule = replace(schedule_of(config), steps=version + FILL + steps)
    trainer = replace(run.trainer, recipe=config.recipe)
    before = len(rows_of(run))
    run_steps(replace(run, schedule=schedule, trainer=trainer, producer=producer))
    producer.close()
    run.sync(version + FILL + steps)
    found = rows_of(run)[before + FILL :]
    wanted = ("step", "rollout", "reward", "score", "train", "sync")
    means = {name: sum(row[f"seconds/{name}"] for row in found) / len(found) for name in wanted}
    means["engines_idle"] = sum(row["idle_seconds/rollout"] for row in found) / len(found)
    return means | {
        "first": version,
        "steps": steps,
        "staleness": sum(row["staleness/mean"] for row in found) / len(found),
        "staleness_max": max(row["staleness/max"] for row in found),
        "tokens": sum(row["response_length"] for row in found) / len(found),
    }


def rows_of(run: OnlineRun) -> list[dict[str, float]]:
    lines = (run.reporter.directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


def print_forecast(best: dict[str, dict[str, float]], run: OnlineRun, config: OnlineConfig, first: int) -> None:
    """Forecast each mode from the steps of `alternate` that begin after `first`."""
    prompts = read_metrics(run.reporter.directory / "samples.jsonl")
    setting = RecordedSetting(
        engines=config.rollout.engines,
        per_step=config.train.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        during_training="rest",
        max_num_seqs=config.rollout.max_num_seqs,
    )
    last = first + FILL + int(best["alternate"]["steps"])
    rows = [row for row in rows_of(run) if first < row["step"] <= last]
    run_records = recorded(setting, rows, prompts, source="alternate")
    print(f"{'mode':<10} {'measured s/step':>16} {'forecast s/step':>16} {'off by':>8}")
    for mode, found in best.items():
        overlap = MODES[mode] or {}
        during = "rest" if not overlap else ("pause" if overlap.get("pause_while_training") else "run")
        other = replace(setting, during_training=during, max_staleness=overlap.get("max_staleness", 0))
        seconds = found["forecast"] = forecast(run_records, other).step_s
        print(f"{mode:<10} {found['step']:>16.2f} {seconds:>16.2f} {seconds / found['step'] - 1:>+8.1%}")


def print_table(best: dict[str, dict[str, float]]) -> None:
    base = best["alternate"]
    phases = base["rollout"] + base["reward"], base["score"] + base["train"] + base["sync"]
    print(f"{'mode':<10} {'s/step':>7} {'gain':>6} {'trainer idle':>13} {'engine idle':>12} {'staleness':>15}")
    for mode, found in best.items():
        print(
            f"{mode:<10} {found['step']:>7.2f} {base['step'] / found['step']:>5.2f}x "
            f"{found['rollout'] + found['reward']:>11.2f} s {found['engines_idle']:>10.2f} s "
            f"{found['staleness']:>6.2f}, max {found['staleness_max']:.0f}"
        )
    generation, training = phases
    print(f"bound: {sum(phases) / max(phases):.2f}x (generation {generation:.2f} s, training {training:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="turns of all modes; the fastest of each counts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(folder, prompts=options.prompts, samples=options.samples)
        store = CheckpointStore(folder / "checkpoints", keep=1)
        with (
            Reporter(folder / "run", steps=1, tensorboard=False) as reporter,
            open_run(config, check_inputs(config), store, reporter) as run,
        ):
            for turn in range(options.rounds):
                for mode in MODES:
                    found = measure(run, config, mode, steps=options.steps)
                    print(f"turn {turn} {mode}: {found['step']:.2f} s per step", flush=True)
                    if mode not in best or found["step"] < best[mode]["step"]:
                        best[mode] = found
            print_table(best)
            print_forecast(best, run, config, int(best["alternate"]["first"]))
    if options.json:
        options.json.write_text(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
