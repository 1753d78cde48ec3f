"""Write the frozen vectors from the formulas written out in float64.

python packages/rlhf-algos/tests/vectors/write_vectors.py packages/rlhf-algos/src/rlhf_algos/testing/vectors
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from advantage_vectors import advantage_cases, returns_cases
from divergence_vectors import column_cases, correction_cases, divergence_cases
from loss_vectors import policy_losses, preference_losses, row_losses
from rlhf_algos.testing.vectors.reader import CASES, TENSORS
from safetensors.torch import save
from torch import Tensor
from vector_case import Case

VERSION = 1
"""Raise it when a number, an input or an option of a case that was published changes; not when cases are added."""


def all_cases() -> list[Case]:
    """Every case, in the order of the file."""
    parts = (
        policy_losses(),
        preference_losses(),
        row_losses(),
        advantage_cases(),
        returns_cases(),
        divergence_cases(),
        correction_cases(),
        column_cases(),
    )
    return [case for part in parts for case in part]


def plain(value: Any) -> Any:
    """What JSON has for an option: infinity is the text `inf`."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def table(cases: list[Case]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The lines of the JSON file, and the tensors they name; an input that several cases share is held once."""
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def held(name: str, tensor: Tensor) -> str:
        content = (str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
        if content not in known:
            known[content] = name
            tensors[name] = tensor.detach().clone().contiguous()
        return known[content]

    rows = []
    for case in cases:
        rows.append(
            {
                "name": case.name,
                "kind": case.kind,
                "function": case.function,
                "source": case.source,
                "options": {name: plain(value) for name, value in case.options.items()},
                "inputs": {name: held(f"{case.name}:{name}", tensor) for name, tensor in case.inputs.items()},
                "results": {name: held(f"{case.name}={name}", value) for name, value in case.results().items()},
            }
        )
    return rows, tensors


def write(folder: Path) -> None:
    """Write both files."""
    rows, tensors = table(all_cases())
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = f'"version": {VERSION}, "tensors_sha256": "{digest}", "cases": [\n{lines}\n]'
    (folder / CASES).write_text(f"{{{head}}}\n", encoding="utf-8")
    (folder / TENSORS).write_bytes(content)
    size = sum((folder / name).stat().st_size for name in (CASES, TENSORS))
    print(f"{len(rows)} cases, {len(tensors)} tensors, {size / 1024:.0f} KiB in {folder}")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
