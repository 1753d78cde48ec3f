"""Agents that others wrote, trained by whole runs of `rlhf train`; prints the mean reward on the way.

    python learning_curves.py blackjack --seeds 0 1
    python learning_curves.py langgraph_agent --seeds 0 1

Each seed draws a model of its own and is a run of its own: Ray, a generation engine, a trainer. Further words are
settings on top of the YAML file, `train.steps=4`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
MAKERS = {
    "blackjack": ["blackjack.py", "{folder}", "--seed", "{seed}"],
    "langgraph_agent": ["calculator.py", "--write", "{folder}", "--seed", "{seed}"],
}
"""What writes `model` and `rows.jsonl` for the YAML file of this name."""
WINDOW = 5
"""Steps that a printed reward is the mean of."""


def rewards(name: str, folder: Path, *, seed: int, overrides: list[str]) -> list[float]:
    """Train one seed in a folder; returns the mean reward of each step."""
    paths = [os.fspath(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    maker = [word.format(folder=folder, seed=seed) for word in MAKERS[name]]
    settings = [f"model.path={folder}/model", f"data.train={folder}/rows.jsonl", f"output={folder}/run"]
    run = ["rlhf", "train", f"{name}.yaml", "--overwrite", *settings, f"seed={seed}", *overrides]
    with (folder / "log.txt").open("w") as log:
        for command in ([sys.executable, *maker], run):
            done = subprocess.run(command, cwd=HERE, env=environment, stdout=log, stderr=subprocess.STDOUT)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed; see {log.name}")
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["reward"] for row in rows if "reward" in row]


def main() -> None:
    """Train the seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=MAKERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    for seed in arguments.seeds:
        folder = (arguments.folder / f"{arguments.example}-{seed}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        curve = rewards(arguments.example, folder, seed=seed, overrides=arguments.overrides)
        seconds = time.perf_counter() - begin
        shown = sorted({round(part * max(0, len(curve) - WINDOW) / 4) for part in range(5)})
        for first in shown:
            part = curve[first : first + WINDOW]
            last = first + len(part)
            print(f"{arguments.example} seed {seed} steps {first + 1} to {last}: {sum(part) / len(part):.3f}")
        print(f"{arguments.example} seed {seed}: {len(curve)} steps in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
