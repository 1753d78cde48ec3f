"""Weight sync of a 110M-parameter Qwen2 on CPU: ours per transport, the per-parameter way, and the raw bounds.

    python benchmarks/weight_sync.py [--ranks 2] [--repeats 5] [--no-vllm]

The trainer is DeepSpeed ZeRO-3 on `--ranks` processes, the generator one vLLM engine in a process of its own
(with --no-vllm a receiver that copies into plain tensors). `bound` is the same bytes by nothing but a broadcast, a
copy, or files written and read; `move` is a transport with buckets that are already flat, `pack+move` takes them
from the model's full tensors, `whole` is a sync with gathering and loading. Every number is the best of `--repeats`
after a warm-up, all in one run.

The per-parameter way is what existing frameworks do: for each parameter a gather, a call to the engine, a
broadcast, a wait. Its calls go over a pipe here, which is faster than their RPC. `vs load` compares with what the
engine takes to load and repack the same tensors from its own memory, which no sync can do without. `CPU/cores` is
the CPU time of a sync, all processes and threads together, over the number of cores: no order of the work can take
less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weight_sync_sides import MIB, SMALL, Engine, Small, TrainerRank

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
TRANSPORTS = ("gloo", "shm", "disk")


def save_model(path: str) -> None:
    """Random weights in the shapes of a small Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


# ---------------------------------------------------------------- processes


def serve(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Build an object in this process and carry out calls from the pipe."""
    try:
        served = make(*arguments)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            method, *rest = call
            pipe.send((True, getattr(served, method)(*rest)))
    except EOFError:
        pass  # the benchmark is over
    except Exception:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)


class Remote:
    """The other end of `serve`; counts its calls."""

    calls = 0

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, child = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(child, make, arguments), daemon=True
        )
        process.start()

    def start(self, method: str, *arguments: Any) -> None:
        Remote.calls += 1
        self._pipe.send((method, *arguments))

    def result(self) -> Any:
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.result()


def together(*calls: tuple[Any, ...]) -> list[Any]:
    """Start all, then wait for all."""
    for remote, *rest in calls:
        remote.start(*rest)
    return [remote.result() for remote, *_ in calls]


def best(repeats: int, function: Callable[[], Any]) -> float:
    """Seconds of the fastest of `repeats` runs after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


class Bench:
    """Trainer ranks and an engine, and what is timed on them."""

    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, arguments.ranks, True, wait_for_workers=False)
        ports = self._store.port
        self.ranks = [Remote(TrainerRank, model, r, arguments.ranks, ports) for r in range(arguments.ranks)]
        self.engine = Remote(Engine, model, not arguments.no_vllm)
        for remote in (*self.ranks, self.engine):
            remote.result()
        self.repeats = arguments.repeats
        self.manifest = together(*((rank, "manifest", arguments.bucket_mib * MIB) for rank in self.ranks))[0]
        self.sizes = [bucket.nbytes for bucket in self.manifest.buckets()]

    def link(self, kind: str, method: str) -> None:
        link = self.ranks[0].call("open", kind, False)
        together((self.ranks[0], "accept"), (self.engine, method, link))

    def whole(self, kind: str) -> dict[str, float]:
        self.link(kind, "connect")
        used: list[list[tuple[float, float]]] = []
        before = 0

        def once() -> None:
            nonlocal before
            before = Remote.calls
            sends = [(rank, "send", self.manifest) for rank in self.ranks]
            used.append(together((self.engine, "receive", self.manifest), *sends))

        seconds = best(self.repeats, once)
        return {
            "whole_s": seconds,
            "calls": Remote.calls - before,
            "engine_mib": max(run[0][0] for run in used),
            "sender_mib": max(run[1][0] for run in used),
            "cpu_s": min(sum(cpu for _, cpu in run) for run in used),
        }

    def move(self, kind: str, manifest: Any = None, *, small: bool = False) -> float:
        manifest = manifest or self.manifest
        self.link(kind, "join")
        drain, move = (self.engine, "drain", manifest), (self.ranks[0], "move", manifest, small)
        return min([together(drain, move)[1] for _ in range(self.repeats + 1)][1:])

    def flat_manifest(self) -> Any:
        """The same buckets, each of one tensor of bytes."""
        from rlhf_core import TensorSpec

        specs = [TensorSpec(name=f"b{i}", shape=(size,), dtype="uint8") for i, size in enumerate(self.sizes)]
        return replace(self.manifest, tensors=tuple(specs))

    def per_parameter(self, specs: Any, *, small: bool) -> dict[str, float]:
        self.link("gloo", "join")
        before = 0

        def once() -> None:
            nonlocal before
            before = Remote.calls
            if not small:
                self.engine.call("begin_parameters")
            ranks = self.ranks[:1] if small else self.ranks
            for spec in specs:
                one = [(rank, "one_parameter", spec.name, small) for rank in ranks]
                together((self.engine, "one_parameter", spec.name, spec.shape), *one)
            if not small:
                self.engine.call("end_parameters")

        return {"whole_s": best(self.repeats, once), "calls": Remote.calls - before}

    def raw_broadcast(self) -> float:
        self.link("gloo", "join")
        runs = [
            together((self.ranks[0], "raw_broadcast", self.sizes), (self.engine, "raw_broadcast", self.sizes))[0]
            for _ in range(self.repeats)
        ]
        return min(runs)


def measure(bench: Bench) -> dict[str, Any]:
    """All numbers, in seconds unless they say otherwise."""
    together(*((rank, "hold_full", bench.manifest) for rank in bench.ranks))
    gathers, collects = ([(rank, how, bench.manifest) for rank in bench.ranks] for how in ("gather", "collect"))
    repeat = range(bench.repeats + 1)
    bound_copy = min(bench.ranks[0].call("raw_copy", bench.sizes) for _ in repeat)
    loads = [bench.engine.call("load", bench.manifest) for _ in repeat]
    found: dict[str, Any] = {
        "parameters": sum(spec.nbytes // 4 for spec in bench.manifest.tensors),
        "tensors": len(bench.manifest.tensors),
        "megabytes": bench.manifest.total_bytes / 1e6,
        "largest_bucket_mib": max(bench.sizes) / MIB,
        "gather_s": best(bench.repeats, lambda: together(*gathers)),
        "collect_s": best(bench.repeats, lambda: together(*collects)),
        "load_s": min(seconds for seconds, _ in loads),
        "load_mib": max(mib for _, mib in loads),
        "cores": len(os.sched_getaffinity(0)),
        "bounds": {
            "gloo": bench.raw_broadcast(),
            "shm": bound_copy,
            "disk": min(bench.ranks[0].call("raw_file", bench.sizes) for _ in repeat),
        },
        "per_parameter": bench.per_parameter(bench.manifest.tensors, small=False),
        "transports": {},
    }
    for kind in TRANSPORTS:
        found["transports"][kind] = {
            "move_s": bench.move(kind, bench.flat_manifest()),
            "pack_and_move_s": bench.move(kind),
            **bench.whole(kind),
        }
    small = Small().manifest(1, bucket_bytes=64 * MIB)
    found["small"] = {
        "per_parameter": bench.per_parameter(small.tensors, small=True)["whole_s"],
        **{kind: bench.move(kind, replace(small), small=True) for kind in TRANSPORTS},
    }
    return found


def report(found: dict[str, Any]) -> None:
    """Print the numbers with their ratios."""
    slow, load, cores = found["per_parameter"], found["load_s"], found["cores"]
    print(
        f"{found['parameters'] / 1e6:.0f}M parameters in {found['tensors']} tensors, {found['megabytes']:.0f} MB, "
        f"largest bucket {found['largest_bucket_mib']:.0f} MiB, {cores} cores"
    )
    print(f"shards to rank 0: {found['collect_s']:.2f} s; full copies on all ranks: {found['gather_s']:.2f} s")
    print(f"engine's own load and repack: {load:.2f} s, {found['load_mib']:.0f} MiB")
    print(f"per-parameter way: {slow['whole_s']:.2f} s, {slow['calls']} calls\n")
    print(
        "      bound   move   (share) pack+move  whole  vs per-param  vs load  CPU/cores  calls  "
        "extra MiB: sender, engine"
    )
    for kind, row in found["transports"].items():
        bound = found["bounds"][kind]
        print(
            f"{kind:5} {bound * 1e3:4.0f}ms {row['move_s'] * 1e3:5.0f}ms {bound / row['move_s']:6.0%} "
            f"{row['pack_and_move_s'] * 1e3:8.0f}ms {row['whole_s']:6.2f}s "
            f"{slow['whole_s'] / row['whole_s']:11.2f}x {row['whole_s'] / load:8.2f}x "
            f"{row['cpu_s'] / cores:8.2f}s {row['calls']:6} {row['sender_mib']:11.0f}, {row['engine_mib']:.0f}"
        )
    small = found["small"]
    print(f"\n{SMALL} tensors of 1 KiB: per parameter {small['per_parameter'] * 1e3:.0f} ms", end="")
    for kind in TRANSPORTS:
        print(f"; {kind} {small[kind] * 1e3:.0f} ms ({small['per_parameter'] / small[kind]:.0f}x)", end="")
    print()


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as model:
        save_model(model)
        found = measure(Bench(model, arguments))
    report(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
