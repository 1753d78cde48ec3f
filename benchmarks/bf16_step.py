"""One optimizer step in bfloat16 on two ranks against the same step in float32: gradients and updated weights.

    python benchmarks/bf16_step.py

A random Qwen2 of 1.4 M parameters, whose weights bfloat16 holds exactly, takes one AdamW step on 48 rows of random
tokens, dealt to two DeepSpeed ranks on the CPU (Gloo), in 1, 4 or 24 micro-batches a rank. Compared with float32 on
the same ranks:

- `gradient`: of the step, as the optimizer sees it; the norm of the difference over all weights, relative.
- `reduction`: the same against bfloat16 with `reduce_dtype: float32`, the default: what the setting adds.
- `master`: what AdamW at a rate of 1e-3 changed in the float32 master weights. Its first step is the sign of the
  gradient, so that every gradient whose sign rounding turns counts twice.
- `weights`: the same of the bfloat16 weights, which hold 8 bits of each.

The model's own arithmetic in bfloat16 is in all numbers but `reduction`. The exit code is 1 if the default's
gradient is off by more than `--target`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rlhf_core import EngineConfig, Loss, OptimizerConfig
from rlhf_core.testing.engine_ground import rows, supervised_loss
from rlhf_core.testing.tiny import save_tiny_model

RANKS, ROWS, TOKENS = 2, 48, 64
MICRO_BATCHES = {1: 100_000, 4: 6 * TOKENS, 24: TOKENS}
"""Micro-batches of a rank, and the tokens of one that make so many."""
SMOOTH = OptimizerConfig(learning_rate=0.3, eps=1.0, max_grad_norm=0.0, weight_decay=0.0)
ADAMW = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.0, weight_decay=0.0)
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "default": {"dtype": "bfloat16"},
    "reduce bfloat16": {"dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "reduce and accumulate bfloat16": {
        "dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
        "accumulate_dtype": "bfloat16",
    },
}


def rounded_model(path: Path) -> str:
    """A random model whose weights are numbers of bfloat16."""
    from transformers import AutoModelForCausalLM

    save_tiny_model(path, tied=False, hidden_size=192, layers=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(path)
    return str(path)


def one_step(
    model: str, rank: int, stage: int, micro_batches: int, case: dict[str, Any], optimizer: OptimizerConfig
) -> dict[str, torch.Tensor]:
    """Master weights and the engine's own weights after a step, each as one flat float32 tensor."""
    from deepspeed.utils import safe_get_full_fp32_param
    from rlhf_train import DeepSpeedEngine

    options = {"stage": stage, "param_persistence_threshold": 0}
    options |= {name: value for name, value in case.items() if name != "dtype"}
    engine = DeepSpeedEngine(
        EngineConfig(
            model=model,
            dtype=case["dtype"],
            device="cpu",
            optimizer=optimizer,
            max_tokens_per_micro_batch=MICRO_BATCHES[micro_batches],
            options=options,
        )
    )
    batch = rows(7, lengths=[TOKENS] * ROWS)
    engine.step(batch.select(list(range(rank, ROWS, RANKS))), Loss(function=supervised_loss))
    master = [safe_get_full_fp32_param(parameter).flatten() for parameter in engine._module.parameters()]
    source = engine.weights()
    weights = {
        name: t.float().flatten() for bucket in source.manifest(0).buckets() for name, t in source.gather(bucket)
    }
    engine.close()
    return {
        "master": torch.cat(master).float().clone(),
        "weights": torch.cat([weights[name] for name in sorted(weights)]),
    }


def changes(model: str, rank: int, stage: int, micro_batches: int, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradient of the step, and what AdamW made of it."""
    start = start_weights(model)
    smooth = one_step(model, rank, stage, micro_batches, case, SMOOTH)
    # The first step of Adam with eps = 1 is rate * g / (|g| + 1), from which g comes back.
    moved = (start["master"] - smooth["master"]).double() / SMOOTH.learning_rate
    usual = one_step(model, rank, stage, micro_batches, case, ADAMW)
    return {"gradient": moved / (1 - moved.abs()), **{name: usual[name] - start[name] for name in usual}}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def measure(work: Path, model: str) -> None:
    """Run by each rank; the first one writes the rows of the table."""
    rank, table = int(os.environ["RANK"]), []
    for stage in (2, 3):
        for micro_batches in MICRO_BATCHES:
            found = {name: changes(model, rank, stage, micro_batches, case) for name, case in CASES.items()}
            exact = found.pop("float32")
            for name, changed in found.items():
                errors = {kind: error(changed[kind], exact[kind]) for kind in ("gradient", "master", "weights")}
                reduction = error(changed["gradient"], found["default"]["gradient"])
                table.append(
                    {"stage": stage, "micro_batches": micro_batches, "case": name, "reduction": reduction, **errors}
                )
    if rank == 0:
        (work / "table.json").write_text(json.dumps(table))


def start_weights(model: str) -> dict[str, torch.Tensor]:
    """The weights before the step in both orders: of the module, and by name."""
    from transformers import AutoModelForCausalLM

    loaded = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    flat = {name: parameter.detach().flatten() for name, parameter in loaded.items()}
    return {"master": torch.cat(list(flat.values())), "weights": torch.cat([flat[name] for name in sorted(flat)])}


def run_ranks(work: Path) -> list[dict[str, Any]]:
    """Start the ranks and wait for their table."""
    from torch.distributed import TCPStore

    model = rounded_model(work / "model")
    store = TCPStore("127.0.0.1", 0, RANKS, True, timedelta(seconds=300), wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--work", str(work), "--model", model]
    processes = []
    for rank in range(RANKS):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (work / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    if any(process.wait() for process in processes):
        logs = [path.read_text()[-3000:] for path in sorted(work.glob("rank-*.log"))]
        raise RuntimeError("a rank failed:\n" + "\n".join(logs))
    return json.loads((work / "table.json").read_text())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.06)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        measure(given.work, given.model)
        return
    with tempfile.TemporaryDirectory() as work:
        table = run_ranks(Path(work))
    print("| stage | micro-batches | setting | gradient | reduction | master | weights |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        numbers = " | ".join(f"{row[name]:.2%}" for name in ("gradient", "reduction", "master", "weights"))
        print(f"| {row['stage']} | {row['micro_batches']} | {row['case']} | {numbers} |")
    worst = max(row["gradient"] for row in table if row["case"] == "default")
    sys.exit(worst > given.target)


if __name__ == "__main__":
    main()
