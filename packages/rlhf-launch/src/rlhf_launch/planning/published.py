"""The eight runs of the OpenRLHF paper: PPO of LLaMA2 on A800s, by OpenRLHF and by DeepSpeed-Chat.

The paper says no lengths of prompts and responses; both are taken as 1,024 tokens, so what is fitted to these runs
holds the difference to the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

System = Literal["openrlhf", "deepspeed-chat"]
Phase = Literal["generation", "weight sync", "scoring", "training"]
PHASES: tuple[Phase, ...] = ("generation", "weight sync", "scoring", "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the time of a step depends on."""

    name: str
    parameters: float
    layers: int
    hidden: int
    cache_bytes: int
    """Keys and values of a token, 16 bits."""

    @property
    def bytes(self) -> float:
        """Of the weights, 16 bits."""
        return 2 * self.parameters


LLAMA2 = {
    "7B": ModelShape(name="7B", parameters=6.738e9, layers=32, hidden=4096, cache_bytes=2 * 32 * 4096 * 2),
    "13B": ModelShape(name="13B", parameters=13.016e9, layers=40, hidden=5120, cache_bytes=2 * 40 * 5120 * 2),
    "34B": ModelShape(name="34B", parameters=33.744e9, layers=48, hidden=8192, cache_bytes=2 * 48 * 1024 * 2),
    "70B": ModelShape(name="70B", parameters=68.977e9, layers=80, hidden=8192, cache_bytes=2 * 80 * 1024 * 2),
}
"""Sizes as published; 34B (of which no weights were) and 70B with 8 heads of keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One row of the paper's tables."""

    system: System
    size: str
    actor: int
    """GPUs of each role; all of them where roles share."""
    critic: int
    reference: int
    reward: int
    engines: int
    tensor_parallel: int
    micro_batch: int
    seconds: tuple[float, float, float, float]
    """Of the four phases, in the order of `PHASES`."""

    @property
    def shared(self) -> bool:
        """Whether all roles sit on all GPUs, in turns."""
        return self.system == "deepspeed-chat"

    @property
    def name(self) -> str:
        """System and size."""
        return f"{self.system} {self.size}"


def _separate(size: str, gpus: tuple[int, ...], seconds: tuple[float, float, float, float]) -> PublishedRun:
    actor, critic, reference, reward, engines, ways, micro = gpus
    return PublishedRun(
        system="openrlhf",
        size=size,
        actor=actor,
        critic=critic,
        reference=reference,
        reward=reward,
        engines=engines,
        tensor_parallel=ways,
        micro_batch=micro,
        seconds=seconds,
    )


def _together(size: str, shape: tuple[int, int, int], seconds: tuple[float, float, float, float]) -> PublishedRun:
    parallel, ways, micro = shape
    gpus = parallel * ways
    return PublishedRun(
        system="deepspeed-chat",
        size=size,
        actor=gpus,
        critic=gpus,
        reference=gpus,
        reward=gpus,
        engines=parallel,
        tensor_parallel=ways,
        micro_batch=micro,
        seconds=seconds,
    )


RUNS = (
    _separate("7B", (4, 4, 2, 2, 4, 1, 16), (262.96, 4.32, 32.7, 171.13)),
    _separate("13B", (8, 8, 4, 4, 8, 1, 8), (372.14, 10.03, 29.58, 197.18)),
    _separate("34B", (8, 8, 4, 4, 4, 2, 8), (720.50, 35.47, 326.00, 444.43)),
    _separate("70B", (4, 4, 4, 4, 4, 4, 4), (2252.79, 111.65, 323.38, 1800.71)),
    _together("7B", (16, 1, 8), (590.16, 65.57, 73.68, 125.68)),
    _together("13B", (32, 1, 4), (1146.61, 156.36, 87.28, 138.68)),
    _together("34B", (4, 8, 4), (1736.02, 434.01, 443.12, 1021.83)),
    _together("70B", (4, 8, 2), (3472.68, 1157.56, 2013.44, 3763.32)),
)
"""GPUs and seconds of both tables."""
SAMPLES, PROMPT, RESPONSE = 1024, 1024, 1024
"""Of a step, and the tokens that are taken for each."""
EFFICIENCY_DEVICE = "a800"
