"""Peak memory of a training step as it was planned without memory, against that of the real engine, in one run.

    python benchmarks/plan_memory.py                       # three models in four layouts, on CPUs
    python benchmarks/plan_memory.py --tokens 8192

Planned is what `rlhf plan` says: the step's own code under fake tensors, with what DeepSpeed shards, gathers and
keeps in buckets. Measured is the highest resident memory of a process during its steps (the kernel's high-water
mark), above what it was before the engine, after a small engine has loaded all libraries; of several ranks the
highest. Freed memory goes back to the system at once (`MALLOC_MMAP_THRESHOLD_`), so that resident is living. The
exit code is 1 if any is off by more than `--target`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, wide": (
        "llama",
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8},
    ),
    "llama, deep, grouped heads": (
        "llama",
        {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    ),
    "qwen2, large vocabulary": (
        "qwen2",
        {
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 32_000,
            "tie_word_embeddings": True,
        },
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank, nothing sharded": {"ranks": 1, "options": {"stage": 0}},
    "two ranks, ZeRO-3": {"ranks": 2, "options": {"stage": 3}},
    "one rank, checkpointing": {"ranks": 1, "options": {"stage": 3}, "gradient_checkpointing": True},
    "4-bit weights": {"ranks": 1, "options": {"stage": 2}, "lora": 16, "quantize": "nf4"},
    "adapters + a reference": {"ranks": 1, "options": {"stage": 2}, "lora": 16, "reference": True},
}


def save_model(path: Path, family: str, settings: dict[str, Any]) -> None:
    """Random weights in a directory."""
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    config = kinds[family](**{"vocab_size": 8_000, "max_position_embeddings": 8192, **settings})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def engine_configs(layout: dict[str, Any], model: str) -> list[Any]:
    """What the process of a layout holds: the policy, and the reference if it has one."""
    from rlhf_core import EngineConfig, LoraConfig, OptimizerConfig

    policy = EngineConfig(
        model=model,
        optimizer=OptimizerConfig(learning_rate=1e-5),
        gradient_checkpointing=layout.get("gradient_checkpointing", False),
        lora=LoraConfig(rank=layout["lora"], quantize=layout.get("quantize")) if "lora" in layout else None,
        max_tokens_per_micro_batch=layout["tokens"],
        options=layout["options"],
    )
    frozen = replace(policy, role="reference", optimizer=None, lora=None, gradient_checkpointing=False)
    return [policy, *([frozen] if layout.get("reference") else [])]


def measure(layout: dict[str, Any], model: str, small: str) -> int:
    """Bytes of this rank at the most during two steps of two micro-batches, above those before its engines."""
    from rlhf_launch.planning.trial_batch import planned_loss, planned_rows
    from rlhf_train import DeepSpeedEngine

    def steps(path: str, rows: int) -> tuple[int, list[Any]]:
        engines = [DeepSpeedEngine(config) for config in engine_configs(layout, path)]
        batch = planned_rows(rows=rows, prompt=layout["row"] // 2, response=layout["row"] // 2)
        for _ in range(2):
            for other in engines[1:]:
                other.score(batch)
            engines[0].step(batch, planned_loss("policy"))
        return max(
            engine.memory_report().peaks[name] for engine, name in zip(engines, ("step", "score"), strict=False)
        ), engines

    _, engines = steps(small, 2)
    for engine in engines:
        engine.close()
    del engines, engine
    import gc

    gc.collect()
    before = int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line).split()[1]
    )
    peak, _ = steps(model, 2 * layout["tokens"] // layout["row"])
    return peak - before * 1024


def measured(layout: dict[str, Any], model: str, small: str) -> int:
    """The same, in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = layout["ranks"]
    settings = {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        own = {**os.environ, **settings, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, __file__, "--measure", json.dumps([layout, model, small])]
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    found = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a measured process ended with {process.returncode}")
        found.append(int(output.strip().splitlines()[-1].removeprefix("peak ")))
    return max(found)


def planned(layout: dict[str, Any], model: str) -> int:
    """What the plan says of the process."""
    from rlhf_launch.planning.memory import EnginePlanner
    from rlhf_launch.planning.trial_batch import RowShape

    half = layout["row"] // 2
    planners = [
        EnginePlanner(config, ranks=layout["ranks"], rows=RowShape(prompt=half, response=half))
        for config in engine_configs(layout, model)
    ]
    plans = [planner.plan(layout["tokens"]) for planner in planners]
    held = [plan.resident for plan in plans]
    tops = [plan.step or plan.score for plan in plans]
    return max(top + sum(held) - own for top, own in zip(tops, held, strict=True))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--row", type=int, default=512, help="tokens of a row")
    parser.add_argument("--only", default="", help="models and layouts whose name has this")
    parser.add_argument("--target", type=float, default=0.10)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("peak", measure(*json.loads(args.measure)))
        return 0
    worst = 0.0
    print(f"{'model':28}{'layout':28}{'planned MiB':>12}{'measured MiB':>14}{'off by':>8}")
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        save_model(
            small,
            "llama",
            {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        )
        for model, (family, settings) in MODELS.items():
            path = Path(folder) / model.replace(" ", "_")
            save_model(path, family, settings)
            for name, layout in LAYOUTS.items():
                if args.only not in f"{model} / {name}":
                    continue
                layout = {**layout, "tokens": args.tokens, "row": args.row}
                expected, found = planned(layout, str(path)), measured(layout, str(path), str(small))
                off = expected / found - 1
                worst = max(worst, abs(off))
                print(f"{model:28}{name:28}{expected / 2**20:12,.0f}{found / 2**20:14,.0f}{off:+8.1%}", flush=True)
    print(f"the largest difference is {worst:.1%}")
    return int(worst > args.target)


if __name__ == "__main__":
    sys.exit(main())
