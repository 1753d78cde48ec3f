"""The true reward over a chain for several seeds: what SFT has learnt, and each step of PPO on top of it.

    python examples/chain/curve.py runs/chain-curve 0 1 2 [stages.ppo.train.steps=10 ...]

The true reward is known to `task.py` alone: neither SFT nor the reward model nor the policy is ever given it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rlhf_launch import read_chain, run_chain

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from task import write_task  # noqa: E402


def curve(folder: Path, seed: int, overrides: list[str]) -> dict[str, list[tuple[int, float]]]:
    """Run one chain; true reward by step of answers to training prompts, and to held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_task(Path("runs/chain-data"), seed=seed)
    config = read_chain(HERE / "chain.yaml", [f"seed={seed}", *overrides])
    begin = time.perf_counter()
    result = run_chain(config, overwrite=True, console=Console(file=io.StringIO()))
    accuracy = result.stages["rm"].metrics["eval/accuracy"]
    print(
        f"seed {seed}: {time.perf_counter() - begin:.0f} s, reward model right on {accuracy:.0%} of held-out pairs"
    )
    rows = [json.loads(line) for line in (result.folder / "ppo" / "metrics.jsonl").read_text().splitlines()]
    names = {"training": "reward/true", "held out": "eval/unseen/reward/true"}
    return {what: [(row["step"], row[name]) for row in rows if name in row] for what, name in names.items()}


def main(folder: Path, seeds: list[int], overrides: list[str]) -> None:
    """Run all seeds and print their curves, the held-out ones first."""
    found = [curve(folder / f"seed-{seed}", seed, overrides) for seed in seeds]
    for what in ("held out", "training"):
        print(
            f"\ntrue reward of sampled answers, {what} prompts\nstep "
            + "".join(f"{f'seed {seed}':>9}" for seed in seeds)
        )
        for rows in zip(*(one[what] for one in found), strict=True):
            step = rows[0][0]
            name = "SFT" if step == 0 else str(step)
            print(f"{name:>4} " + "".join(f"{value:9.3f}" for _, value in rows))


if __name__ == "__main__":
    words = sys.argv[1:]
    numbers = [int(word) for word in words[1:] if word.isdigit()]
    main(
        Path(words[0] if words else "runs/chain-curve").absolute(),
        numbers or [0, 1, 2],
        [w for w in words if "=" in w],
    )
