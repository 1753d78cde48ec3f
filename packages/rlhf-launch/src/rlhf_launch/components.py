"""Which parts a run uses, chosen by what is installed, with the reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from rlhf_core import ROLLOUT_BACKENDS, TRAIN_ENGINES, PluginError, ResourceError, load_plugin

from rlhf_launch.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The parts of a run. `reasons` holds one line for each."""

    executor: Literal["local", "ray"]
    engine: str
    backend: str
    device: Literal["cpu", "cuda"]
    reasons: tuple[str, ...]


def choose_components(config: RunConfig) -> Components:
    """Resolve every `auto`. Nothing heavy is imported.

    Raises:
        PluginError: a part is asked for by name and not installed.
        ResourceError: cuda is asked for and there is none, or several ranks without Ray.
    """
    reasons: list[str] = []
    executor = _pick("placement", config.placement.executor, "ray", "local", "all in one process", reasons)
    engine = _pick("training", config.train.engine, "deepspeed", "torch", "single-process torch", reasons)
    backend = _pick("rollout", config.rollout.backend, "vllm", "transformers", "readable, slower", reasons)
    load_plugin_checked(TRAIN_ENGINES, engine)
    load_plugin_checked(ROLLOUT_BACKENDS, backend)
    if executor == "local" and (config.train.ranks > 1 or config.rollout.engines > 1):
        raise ResourceError(
            f"the local executor runs one rank and one engine in this process; train.ranks={config.train.ranks} "
            f"and rollout.engines={config.rollout.engines} need placement.executor=ray"
        )
    if engine == "torch" and config.train.ranks > 1:
        raise ResourceError(
            f"train.ranks={config.train.ranks} needs train.engine=deepspeed; the torch engine has one rank here"
        )
    device = _device(config, reasons)
    return Components(
        executor=executor,  # type: ignore[arg-type]
        engine=engine,
        backend=backend,
        device=device,  # type: ignore[arg-type]
        reasons=tuple(reasons),
    )


def load_plugin_checked(group: str, name: str) -> None:
    """Refuse an unknown name now; a known one is imported only in the worker that uses it."""
    if ":" not in name:
        from rlhf_core import plugin_names

        if name in plugin_names(group):
            return
    load_plugin(group, name)


def _pick(part: str, asked: str, first: str, second: str, remark: str, reasons: list[str]) -> str:
    """The part that was asked for, or the first one if installed, else the second."""
    installed = find_spec(first) is not None
    if asked == "auto":
        chosen = first if installed else second
        why = "installed" if installed else f"{first} is not installed; {remark}"
    else:
        chosen, why = asked, "as configured"
        if asked == first and not installed:
            raise PluginError(f"{part}: {first!r} is configured but not installed; install it or say {second!r}")
    reasons.append(f"{part}: {chosen} ({why})")
    return chosen


def _device(config: RunConfig, reasons: list[str]) -> str:
    import torch

    asked = config.placement.device
    if asked == "cuda" and not torch.cuda.is_available() and config.placement.ray_address is None:
        raise ResourceError(
            "placement.device=cuda, but torch finds no GPU here; say cpu, or give a cluster's address"
        )
    device = asked if asked != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    reasons.append(f"device: {device}" + ("" if device == "cuda" else " (torch finds no GPU)" * (asked == "auto")))
    return device
