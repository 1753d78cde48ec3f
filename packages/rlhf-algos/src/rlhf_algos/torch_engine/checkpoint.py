"""Checkpoints of the torch engine: weights as safetensors, optimizer and random state read with weights_only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rlhf_core import CheckpointError, naming_damage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS = "weights.safetensors"
STATE = "engine.pt"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once; tied parameters under their first name."""
    persistent = model.state_dict().keys()
    named = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in persistent}
    return {name: tensor.detach() for name, tensor in named.items()}


def save_weights(model: nn.Module, path: Path) -> None:
    """Write all parameters and persistent buffers, bit for bit."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in _tensors(model).items()}, path / WEIGHTS)


def load_weights(model: nn.Module, path: Path) -> None:
    """Inverse of `save_weights`.

    Raises:
        CheckpointError: the file is missing, damaged, or of another model.
    """
    if not (path / WEIGHTS).exists():
        raise CheckpointError(f"no checkpoint in {str(path)!r}: {WEIGHTS} is missing")
    with naming_damage(f"the checkpoint in {str(path)!r}", path / WEIGHTS):
        saved = load_file(path / WEIGHTS)
    own = _tensors(model)
    different = sorted(
        name
        for name in saved.keys() | own.keys()
        if name not in saved or name not in own or saved[name].shape != own[name].shape
    )
    if different:
        raise CheckpointError(
            f"the checkpoint in {str(path)!r} is of another model: {len(different)} weights differ in name or "
            f"shape, among them {', '.join(different[:3])}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def save_state(state: dict[str, Any], path: Path, *, rank: int = 0) -> None:
    """Write tensors and plain values; one file per rank."""
    torch.save(state, path / (STATE if rank == 0 else f"engine-{rank}.pt"))


def load_state(path: Path, *, rank: int = 0) -> dict[str, Any]:
    """Inverse of `save_state`. Nothing but tensors and plain values is ever unpickled.

    Raises:
        CheckpointError: the file is damaged, or missing, for instance because fewer ranks wrote the checkpoint.
    """
    file = path / (STATE if rank == 0 else f"engine-{rank}.pt")
    if not file.exists():
        raise CheckpointError(f"{str(file)!r} is missing; resume with as many processes as wrote the checkpoint")
    with naming_damage(f"the checkpoint in {str(path)!r}", file):
        return torch.load(file, map_location="cpu", weights_only=True)
