"""Weight sync of a 110M-parameter Qwen2 on CPU: ours per transport, the per-parameter way, and the raw bounds.

    python benchmarks/weight_sync.py [--ranks 2] [--repeats 3] [--no-vllm]

The trainer is DeepSpeed ZeRO-3 on `--ranks` processes, the generator one vLLM engine in a process of its own
(with --no-vllm a receiver that copies into plain tensors). `move` is a transport with buckets that are already
flat, `pack+move` takes them from the model's full tensors, `whole` is a sync with gathering and loading. Every
number is the best of `--repeats` after a warm-up, all in one run. The per-parameter way is what existing frameworks
do: for each parameter a gather, a call to the engine, a broadcast, a wait. Its calls go over a pipe here, which is
faster than their RPC.
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

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
TRANSPORTS = ("gloo", "shm", "disk")
SMALL = 2000
MIB = 1 << 20


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


class PeakMemory:
    """How far resident memory rises above its start, in MiB, shared pages included."""

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._field("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = (self._field("VmHWM") - self._before) / 1024

    @staticmethod
    def _field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])


class Small:
    """A source of many small tensors."""

    def __init__(self) -> None:
        import torch

        self.tensors = {f"w{i}": torch.full((256,), float(i)) for i in range(SMALL)}

    def manifest(self, version: int, *, bucket_bytes: int) -> Any:
        from rlhf_core import TensorSpec, WeightManifest

        specs = tuple(TensorSpec(name=name, shape=(256,), dtype="float32") for name in self.tensors)
        return WeightManifest(version=version, bucket_bytes=bucket_bytes, tensors=specs)

    def gather(self, bucket: Any) -> Any:
        return [(spec.name, self.tensors[spec.name]) for spec in bucket.tensors]


class Held:
    """A source of tensors in memory."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def gather(self, bucket: Any) -> Any:
        return [(spec.name, self._tensors[spec.name]) for spec in bucket.tensors]


class TrainerRank:
    """One ZeRO-3 rank; rank 0 sends."""

    def __init__(self, model: str, rank: int, ranks: int, port: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        from rlhf_core import EngineConfig, OptimizerConfig
        from rlhf_train import DeepSpeedEngine

        options = {"stage": 3, "param_persistence_threshold": 0}
        self.rank = rank
        self.engine = DeepSpeedEngine(
            EngineConfig(model=model, role="policy", optimizer=OptimizerConfig(), options=options)
        )
        self.source: Any = self.engine.weights()
        self.full: Any = None
        self.small = Small()

    def manifest(self, bucket_bytes: int) -> Any:
        return self.source.manifest(1, bucket_bytes=bucket_bytes)

    def open(self, kind: str, small: bool) -> Any:
        from rlhf_core import open_sender

        self.sender = open_sender(kind, receivers=1, timeout_s=120)
        return self.sender.link

    def accept(self) -> None:
        self.sender.accept()

    def gather(self, manifest: Any) -> None:
        for bucket in manifest.buckets():
            for _ in self.source.gather(bucket):
                pass

    def send(self, manifest: Any) -> float:
        from rlhf_core import send_weights

        with PeakMemory() as peak:
            send_weights(self.source, manifest, self.sender if self.rank == 0 else None)
        return peak.mib

    def hold_full(self, manifest: Any) -> None:
        """Keep full copies, so that moving can be timed without gathering."""
        import torch

        copies = {n: t.clone() for bucket in manifest.buckets() for n, t in self.source.gather(bucket)}
        flats = {f"b{b.index}": torch.zeros(b.nbytes, dtype=torch.uint8) for b in manifest.buckets()}
        self.full = Held(copies | flats)

    def move(self, manifest: Any, small: bool) -> None:
        from rlhf_core import send_weights

        send_weights(self.small if small else self.full, manifest, self.sender)

    def raw_broadcast(self, sizes: list[int]) -> float:
        import torch

        flat = torch.zeros(max(sizes), dtype=torch.uint8)
        begin = 0.0
        for _ in range(2):  # touched before it is timed
            begin = time.perf_counter()
            for size in sizes:
                self.sender._group.broadcast(flat[:size], 0).wait()
        return time.perf_counter() - begin

    def raw_copy(self, sizes: list[int]) -> float:
        import torch

        sources = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        target = torch.zeros(max(sizes), dtype=torch.uint8)
        begin = time.perf_counter()
        for source in sources:
            target[: source.numel()].copy_(source)
        return time.perf_counter() - begin

    def raw_file(self, sizes: list[int]) -> float:
        import torch

        source, target = torch.ones(max(sizes), dtype=torch.uint8), torch.zeros(max(sizes), dtype=torch.uint8)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            for index, size in enumerate(sizes):
                path = Path(folder) / str(index)
                path.write_bytes(memoryview(source.numpy())[:size])
                with path.open("rb") as file:
                    file.readinto(memoryview(target.numpy())[:size])
            return time.perf_counter() - begin

    def one_parameter(self, name: str, small: bool) -> None:
        """Gather and broadcast one; the caller waits for every step."""
        if small:
            tensor = self.small.tensors[name]
        else:
            from rlhf_core import Bucket

            spec = next(spec for spec in self.source._specs if spec.name == name)
            bucket = Bucket(tensors=(spec,), offsets=(0,), nbytes=spec.nbytes)
            ((_, tensor),) = self.source.gather(bucket)
        if self.rank == 0:
            self.sender._group.broadcast(tensor.contiguous(), 0).wait()


class Engine:
    """The generator's side: a vLLM engine, or plain tensors."""

    def __init__(self, model: str, vllm: bool) -> None:
        import torch

        self.backend: Any = None
        self.plain: dict[str, torch.Tensor] = {}
        if vllm:
            from rlhf_core import RolloutConfig
            from rlhf_rollout.vllm_backend import VLLMBackend

            config = RolloutConfig(model=model, max_model_len=256, max_num_seqs=4)
            os.environ.update(VLLMBackend.process_environment(config))
            self.backend = VLLMBackend(config)

    def connect(self, link: Any) -> None:
        import asyncio

        from rlhf_core import join

        if self.backend is not None:
            asyncio.run(self.backend.connect(link, 0))
        else:
            self.receiver = join(link, 0)

    def join(self, link: Any) -> None:
        """Join beside the backend, to time moving alone."""
        from rlhf_core import join

        self.receiver = join(link, 0)

    def receive(self, manifest: Any) -> float:
        import asyncio

        with PeakMemory() as peak:
            if self.backend is not None:
                asyncio.run(self.backend.receive_weights(manifest))
            else:
                self._receive_plain(manifest)
        return peak.mib

    def _receive_plain(self, manifest: Any) -> None:
        from rlhf_core import receive_weights

        receive_weights(manifest, self.receiver, self._copy)

    def _copy(self, pairs: Any) -> None:
        for name, tensor in pairs:
            if name in self.plain:
                self.plain[name].copy_(tensor)
            else:
                self.plain[name] = tensor.clone()

    def drain(self, manifest: Any) -> None:
        """Receive and drop."""
        from rlhf_core import receive_weights

        receive_weights(manifest, self.receiver, lambda pairs: [None for _ in pairs] and None)

    def raw_broadcast(self, sizes: list[int]) -> None:
        import torch

        flat = torch.zeros(max(sizes), dtype=torch.uint8)
        for _ in range(2):
            for size in sizes:
                self.receiver._group.broadcast(flat[:size], 0).wait()

    def load(self, manifest: Any) -> float:
        """The engine's own time to load and repack weights that it has in memory already."""
        import torch

        tensors = {s.name: torch.randn(s.shape) * 0.02 for s in manifest.tensors}
        if self.backend is None:
            self._copy(tensors.items())
            begin = time.perf_counter()
            self._copy(tensors.items())
            return time.perf_counter() - begin
        return self._on_model(lambda worker: _load_all(worker, tensors))

    def begin_parameters(self) -> None:
        if self.backend is not None:
            self._on_model(_begin)

    def one_parameter(self, name: str, shape: tuple[int, ...]) -> None:
        import torch

        tensor = torch.empty(shape)
        self.receiver._group.broadcast(tensor, 0).wait()
        if self.backend is not None and not name.startswith("w"):
            self._on_model(lambda worker: worker.model_runner.model.load_weights([(name, tensor)]) and None)
        else:
            self._copy([(name, tensor)])

    def end_parameters(self) -> None:
        if self.backend is not None:
            self._on_model(_end)

    def _on_model(self, function: Callable[[Any], Any]) -> Any:
        return self.backend._loop.call(lambda engine: engine.collective_rpc(function)[0]).result()


def _begin(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(worker.model_runner.model)


def _end(worker: Any) -> None:
    from rlhf_rollout.vllm_weights import _repack_head
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.model_runner.model, worker.model_config)
    _repack_head(worker.model_runner.model)


def _load_all(worker: Any, tensors: dict[str, Any]) -> float:
    begin = time.perf_counter()
    _begin(worker)
    worker.model_runner.model.load_weights(iter(tensors.items()))
    _end(worker)
    return time.perf_counter() - begin


# ---------------------------------------------------------------- processes


def serve(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Build an object in this process and carry out calls from the pipe."""
    try:
        served = make(*arguments)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            method, *rest = call
            pipe.send((True, getattr(served, method)(*rest)))
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
        memory: list[list[float]] = []
        before = 0

        def once() -> None:
            nonlocal before
            before = Remote.calls
            sends = [(rank, "send", self.manifest) for rank in self.ranks]
            memory.append(together((self.engine, "receive", self.manifest), *sends))

        seconds = best(self.repeats, once)
        return {
            "whole_s": seconds,
            "calls": Remote.calls - before,
            "engine_mib": max(m[0] for m in memory),
            "sender_mib": max(m[1] for m in memory),
        }

    def move(self, kind: str, manifest: Any = None, *, small: bool = False) -> float:
        manifest = manifest or self.manifest
        self.link(kind, "join")
        return best(
            self.repeats,
            lambda: together((self.engine, "drain", manifest), (self.ranks[0], "move", manifest, small)),
        )

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
    gathers = [(rank, "gather", bench.manifest) for rank in bench.ranks]
    repeat = range(bench.repeats + 1)
    bound_copy = min(bench.ranks[0].call("raw_copy", bench.sizes) for _ in repeat)
    found: dict[str, Any] = {
        "parameters": sum(spec.nbytes // 4 for spec in bench.manifest.tensors),
        "tensors": len(bench.manifest.tensors),
        "megabytes": bench.manifest.total_bytes / 1e6,
        "largest_bucket_mib": max(bench.sizes) / MIB,
        "gather_s": best(bench.repeats, lambda: together(*gathers)),
        "load_s": min(bench.engine.call("load", bench.manifest) for _ in repeat),
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
    slow, load = found["per_parameter"], found["load_s"]
    print(
        f"{found['parameters'] / 1e6:.0f}M parameters in {found['tensors']} tensors, {found['megabytes']:.0f} MB, "
        f"largest bucket {found['largest_bucket_mib']:.0f} MiB"
    )
    print(f"gather alone {found['gather_s']:.2f} s, engine's own load and repack {load:.2f} s")
    print(f"per-parameter way: {slow['whole_s']:.2f} s, {slow['calls']} calls\n")
    print("       bound  move (share)   pack+move  whole  vs per-param  vs load  calls  extra MiB sender, engine")
    for kind, row in found["transports"].items():
        bound = found["bounds"][kind]
        print(
            f"{kind:5} {bound:5.2f}s {row['move_s']:5.2f}s {bound / row['move_s']:5.0%} "
            f"{row['pack_and_move_s']:10.2f}s {row['whole_s']:5.2f}s {slow['whole_s'] / row['whole_s']:10.2f}x "
            f"{row['whole_s'] / load:8.2f}x {row['calls']:5} {row['sender_mib']:12.0f}, {row['engine_mib']:.0f}"
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
    parser.add_argument("--repeats", type=int, default=3)
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
