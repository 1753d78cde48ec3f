"""Engines and backends that break at a named point, once: what the tests of faults train and sample with.

The variable FAULTS holds a list of `Fault` as JSON. Whoever comes to the point of one first takes its flag, a file,
writes the time and the process into it, and does to itself what the fault says; later ones, replacements and
restarts among them, find the flag taken. A fault waits for those before it in the list.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

from rlhf_algos import TorchEngine
from rlhf_core import EngineDiedError, StepReport
from rlhf_rollout.backends.transformers.backend import TransformersBackend
from rlhf_rollout.backends.vllm.backend import VLLMBackend
from rlhf_train import DeepSpeedEngine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What breaks, when and how."""

    flag: str
    """A file that is not there yet."""
    worker: str
    """`rollout`, or a role and a rank: `policy-1`."""
    point: str
    """The method in which it happens."""
    call: int = 1
    """The number of the call."""
    after_s: float = 0.0
    """How long after the call began, while it goes on."""
    act: str = "SIGKILL"
    """A signal, or `raise` for an EngineDiedError."""


def happens(worker: str, point: str, call: int) -> None:
    """Break here, if this is the point of the next fault."""
    faults = [Fault(**fields) for fields in json.loads(os.environ.get("FAULTS", "[]"))]
    fault = next((fault for fault in faults if not os.path.exists(fault.flag)), None)
    if fault is None or (worker, point) != (fault.worker, fault.point) or call < fault.call:
        return
    try:
        flag = os.open(fault.flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    if fault.act == "raise":
        os.close(flag)
        raise EngineDiedError(f"{worker} died in {point}")

    def strike() -> None:
        time.sleep(fault.after_s)
        os.write(flag, json.dumps({"time": time.time(), "pid": os.getpid()}).encode())
        os.fsync(flag)
        os.kill(os.getpid(), getattr(signal, fault.act))

    if fault.after_s:
        threading.Thread(target=strike, daemon=True).start()
    else:
        strike()


class Counting:
    """Calls are counted by method; what is to break travels from the process of the command to the worker's."""

    @classmethod
    def env_vars(cls, config):
        inherited = getattr(super(), "env_vars", None)
        return {**(inherited(config) if inherited else {}), "FAULTS": os.environ.get("FAULTS", "[]")}

    def reach(self, worker: str, point: str) -> None:
        calls = self.__dict__.setdefault("_calls", {})
        calls[point] = calls.get(point, 0) + 1
        happens(worker, point, calls[point])


class FaultyEngine(Counting):
    """In front of a training engine."""

    def _reach(self, point: str) -> None:
        self.reach(f"{self._role}-{os.environ.get('RANK', '0')}", point)

    def __init__(self, config):
        self._role = config.role
        super().__init__(config)

    def score(self, *args):
        self._reach("score")
        return super().score(*args)

    def step(self, *args) -> StepReport:
        self._reach("step")
        return super().step(*args)

    def save(self, path: Path) -> None:
        self._reach("save")
        super().save(path)
        self._reach("saved")


class FaultyWeights:
    """In front of the weights of a DeepSpeed engine: they break when the second bucket is gathered."""

    def __init__(self, inner, reach):
        self._inner, self._reach = inner, reach
        self._buckets = 0

    def manifest(self, *args, **kwargs):
        return self._inner.manifest(*args, **kwargs)

    def gather(self, bucket):
        self._next()
        return self._inner.gather(bucket)

    def packs(self, bucket):
        return self._inner.packs(bucket)

    def pack(self, bucket, flat):
        self._next()
        self._inner.pack(bucket, flat)

    def _next(self):
        self._buckets += 1
        if self._buckets == 2:
            self._reach("sync")


class FaultyBackend(Counting):
    """In front of a rollout backend."""

    async def generate(self, request):
        self.reach("rollout", "generate")
        return await super().generate(request)

    async def receive_weights(self, manifest):
        self.reach("rollout", "sync")
        await super().receive_weights(manifest)


class Torch(FaultyEngine, TorchEngine):
    pass


class DeepSpeed(FaultyEngine, DeepSpeedEngine):
    def weights(self):
        return FaultyWeights(super().weights(), self._reach)


class Transformers(FaultyBackend, TransformersBackend):
    pass


class VLLM(FaultyBackend, VLLMBackend):
    pass
