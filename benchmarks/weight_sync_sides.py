"""The two sides of benchmarks/weight_sync.py: a training rank and the generator, each in a process of its own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = 2000
MIB = 1 << 20


class Usage:
    """How far resident memory rises above its start, in MiB with shared pages, and CPU seconds of all threads."""

    def __enter__(self) -> Usage:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._field("VmRSS")
        self._cpu_before = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = time.process_time() - self._cpu_before
        self.mib = (self._field("VmHWM") - self._before) / 1024

    @property
    def found(self) -> tuple[float, float]:
        """MiB and CPU seconds."""
        return self.mib, self.cpu_s

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
        self._flat: Any = None
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
        """Full copies on all ranks, by DeepSpeed."""
        for bucket in manifest.buckets():
            for _ in self.source.gather(bucket):
                pass

    def collect(self, manifest: Any) -> None:
        """All buckets into one buffer of rank 0."""
        if self.rank == 0 and self._flat is None:
            import torch

            self._flat = torch.zeros(max(bucket.nbytes for bucket in manifest.buckets()), dtype=torch.uint8)
        for bucket in manifest.buckets():
            self.source.pack(bucket, None if self._flat is None else self._flat[: bucket.nbytes])

    def send(self, manifest: Any) -> tuple[float, float]:
        from rlhf_core import send_weights

        with Usage() as usage:
            send_weights(self.source, manifest, self.sender if self.rank == 0 else None)
        return usage.found

    def send_counted(self, manifest: Any) -> tuple[tuple[float, float], Any]:
        """MiB and CPU seconds of a sync, and its own report."""
        from rlhf_core import send_weights

        with Usage() as usage:
            report = send_weights(self.source, manifest, self.sender if self.rank == 0 else None)
        return usage.found, report

    def gathered_per_bucket(self, manifest: Any) -> tuple[float, int]:
        """Bytes gathered per byte sent if no parameter outlived its bucket; bytes of the largest parameter."""
        sizes = {
            name: getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
            for name, parameter in self.source._parameters.items()
        }
        sources = [{self.source._sources[spec.name] for spec in bucket.tensors} for bucket in manifest.buckets()]
        gathered = sum(sizes[name] for bucket in sources for name in bucket)
        return gathered / manifest.total_bytes, max(sizes.values())

    def hold_full(self, manifest: Any) -> None:
        """Keep full copies, so that moving can be timed without gathering."""
        import torch

        copies = {n: t.clone() for bucket in manifest.buckets() for n, t in self.source.gather(bucket)}
        flats = {f"b{b.index}": torch.zeros(b.nbytes, dtype=torch.uint8) for b in manifest.buckets()}
        self.full = Held(copies | flats)

    def move(self, manifest: Any, small: bool) -> float:
        """Seconds from the start of the first bucket to the acknowledgement of the last."""
        from rlhf_core import send_weights

        begin = time.perf_counter()
        send_weights(self.small if small else self.full, manifest, self.sender)
        return time.perf_counter() - begin

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
            from rlhf_rollout import VLLMBackend

            config = RolloutConfig(model=model, max_model_len=256, max_num_seqs=4)
            os.environ.update(VLLMBackend.env_vars(config))
            self.backend = VLLMBackend(config)

    def connect(self, link: Any) -> None:
        import asyncio

        from rlhf_core import join_link

        if self.backend is not None:
            asyncio.run(self.backend.connect(link, 0))
        else:
            self.receiver = join_link(link, 0)

    def join(self, link: Any) -> None:
        """Join beside the backend, to time moving alone."""
        from rlhf_core import join_link

        self.receiver = join_link(link, 0)

    def receive(self, manifest: Any) -> tuple[float, float]:
        import asyncio

        with Usage() as usage:
            if self.backend is not None:
                asyncio.run(self.backend.receive_weights(manifest))
            else:
                self._receive_plain(manifest)
        return usage.found

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

    def load(self, manifest: Any) -> tuple[float, float]:
        """The engine's own seconds to load and repack weights that it has in memory already; MiB for that."""
        import torch

        tensors = {s.name: torch.randn(s.shape) * 0.02 for s in manifest.tensors}
        if self.backend is None:
            self._copy(tensors.items())
        with Usage() as usage:
            begin = time.perf_counter()
            if self.backend is None:
                self._copy(tensors.items())
            else:
                self._on_model(lambda worker: _load_all(worker, tensors))
            seconds = time.perf_counter() - begin
        return seconds, usage.mib

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
    from rlhf_rollout.backends.vllm.worker.transfer import _repack_head
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.model_runner.model, worker.model_config)
    _repack_head(worker.model_runner.model)


def _load_all(worker: Any, tensors: dict[str, Any]) -> None:
    _begin(worker)
    worker.model_runner.model.load_weights(iter(tensors.items()))
    _end(worker)
