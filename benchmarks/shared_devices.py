"""PPO with all roles on the same devices, in turns, against each role on devices of its own.

    python benchmarks/shared_devices.py [--hidden 256 --layers 8] [--steps 3]

On a machine without GPUs the devices are its cores. For each turn (who is there at the same time) it prints the
largest memory of all workers together (proportional set size: shared pages count once), and for both layouts the
seconds of a step and the largest memory of all; their ratio in one run. The metrics of both are compared, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_algos import CheckpointStore, from_mapping
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch import OnlineConfig, Reporter, check_inputs, open_run, run_steps

_EVERY_S = 0.1
_TIMES = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "memory/", "sync/probe_seconds")


def main() -> None:
    """Run both layouts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = {kind: _measure(Path(folder), kind, arguments) for kind in ("together", "apart")}
    turns, together = measured["together"]["turns"], measured["together"]
    rows = [[turn, f"{size / 2**20:,.0f}"] for turn, size in turns.items()]
    _print([["who is there", "MiB of all workers"], *rows])
    rows = [[kind, f"{found['seconds']:.2f}", f"{found['most'] / 2**20:,.0f}"] for kind, found in measured.items()]
    _print([["devices", "seconds of a step", "MiB at most"], *rows])
    apart = measured["apart"]
    print(f"together / apart: seconds {together['seconds'] / apart['seconds']:.2f}, ", end="")
    print(f"memory {together['most'] / apart['most']:.2f}; the same metrics: {together['rows'] == apart['rows']}")


def _print(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        print("  ".join(cells))
    print()


def _measure(folder: Path, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config = from_mapping(OnlineConfig, _settings(folder, kind, arguments), source="benchmark")
    inputs = check_inputs(config)
    with (
        Reporter(config.output, steps=config.train.steps, tensorboard=False) as reporter,
        open_run(config, inputs, CheckpointStore(config.output / "checkpoints"), reporter) as run,
    ):
        pids = [handle.place.pid for handle in [*run.pool.handles, *_ranks(run)]]
        with _sampled(pids, lambda: run.pool.devices.present) as sizes:
            run_steps(run)
    rows = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(v for name, v in row.items() if name.startswith("seconds/")) for row in rows[1:]]
    turns = {" + ".join(sorted(there)): max(found) for there, found in sizes.items()}
    return {
        "turns": turns,
        "most": max(turns.values()),
        "seconds": sum(seconds) / len(seconds),
        "rows": [{name: v for name, v in row.items() if not name.startswith(_TIMES)} for row in rows],
    }


def _ranks(run: Any) -> list[Any]:
    trainer = run.trainer
    groups = [trainer.policy, trainer.critic, trainer.reference, *trainer.rewards]
    return [handle for group in groups for handle in group.handles]


@contextlib.contextmanager
def _sampled(pids: list[int], present: Any) -> Iterator[dict[frozenset[str], list[int]]]:
    """Memory of the processes together, by who is there, every tenth of a second."""
    sizes: dict[frozenset[str], list[int]] = defaultdict(list)
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_EVERY_S):
            there = present()
            size = sum(map(_proportional, pids))
            if there == present():
                sizes[there].append(size)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        time.sleep(2 * _EVERY_S)
        ended.set()
        thread.join()


def _proportional(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _settings(folder: Path, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    policy, reward, prompts = folder / "policy", folder / "reward", folder / "prompts.jsonl"
    if not prompts.exists():
        save_tiny_model(policy, hidden_size=arguments.hidden, layers=arguments.layers)
        save_tiny_model(reward, head="scalar", hidden_size=arguments.hidden, layers=arguments.layers, seed=1)
        prompts.write_text("".join(json.dumps({"prompt": f"{number} + {number} ="}) + "\n" for number in range(64)))
    together = {"colocate_with": "policy"} if kind == "together" else {}
    return {
        "model": {"path": str(policy)},
        "data": {"train": str(prompts)},
        "lengths": {"max_prompt_tokens": 16},
        "reward": {"model": str(reward)},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "rollout": {"samples_per_prompt": 4, "sampling": {"max_tokens": 64}},
        "train": {"prompts_per_step": 16, "minibatches": 2, "steps": arguments.steps},
        "placement": {
            "executor": "ray",
            **dict.fromkeys(("critic", "reference", "rollout"), together),
            "reward": {"model": together},
        },
        "checkpoint": {"every": 0, "minutes": 0},
        "output": str(folder / kind),
    }


if __name__ == "__main__":
    main()
