"""Read the frozen vectors and try a function on them.

This file needs numpy and safetensors and nothing else of the package: it may be copied, together with `cases.json`
and `tensors.safetensors`.

    def dpo(inputs, options):  # in any framework
        ...
        return {"loss": ..., "weight": ..., "gradient/log_probs": ...}

    check_vectors(dpo, "dpo/sigmoid")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

CASES, TENSORS = "cases.json", "tensors.safetensors"
TOLERANCE = {"float64": 1e-9, "float32": 5e-5}
"""Largest error of a result, relative to its largest entry."""

VectorFunction = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]
"""f(inputs, options) -> results, all by name; inputs are numpy arrays, results whatever `numpy.asarray` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class VectorCase:
    """A function on one set of inputs."""

    name: str
    """`function/variant`, for estimators of advantages `advantages/function/variant`."""
    kind: str
    """`loss`, `advantages`, `returns`, `kl`, `divergence`, `correction`, `diagnostic` or `columns`."""
    function: str
    """Name of the function in `rlhf_algos`."""
    source: str
    """Where the formula comes from."""
    options: dict[str, Any]
    """Every option, defaults included."""
    inputs: dict[str, np.ndarray]
    results: dict[str, np.ndarray]
    """Of a loss: `loss`, the mean over the batch; `weight`, what its sum was divided by; `gradient/<input>`."""


def load_vectors(
    *, dtype: Literal["float64", "float32"] = "float64", folder: Path | None = None
) -> dict[str, VectorCase]:
    """All cases by name, in the order of the file.

    Args:
        dtype: of the inputs; results stay in float64.
        folder: with both files; None means the one of this module.
    """
    folder = folder or Path(__file__).parent
    table = json.loads((folder / CASES).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS)

    def given(array: np.ndarray) -> np.ndarray:
        return array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array.copy()

    return {
        row["name"]: VectorCase(
            name=row["name"],
            kind=row["kind"],
            function=row["function"],
            source=row["source"],
            options={name: float("inf") if value == "inf" else value for name, value in row["options"].items()},
            inputs={name: given(tensors[key]) for name, key in row["inputs"].items()},
            results={name: tensors[key].copy() for name, key in row["results"].items()},
        )
        for row in table["cases"]
    }


def check_vectors(
    function: VectorFunction,
    name: str,
    *,
    dtype: Literal["float64", "float32"] = "float32",
    tolerance: float | None = None,
    only: Collection[str] | None = None,
) -> dict[str, float]:
    """Call a function with the inputs and options of a case and compare every result.

    Args:
        function: see `VectorFunction`.
        name: of a case (`dpo/sigmoid`), or of a function for all its cases (`dpo`, `advantages/grpo`).
        dtype: of the inputs.
        tolerance: largest error of a result relative to its largest entry; None means `TOLERANCE` of the dtype.
        only: results that are compared, for a function that does not have them all.

    Returns:
        the largest error of each case.

    Raises:
        KeyError: no case has this name.
        AssertionError: a result is missing, has another shape or is further off.
    """
    known = load_vectors(dtype=dtype)
    cases = [case for case in known.values() if name == case.name or case.name.startswith(f"{name}/")]
    if not cases:
        raise KeyError(f"no vectors are named {name!r}; there are {', '.join(known)}")
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    return {case.name: _check(case, function(dict(case.inputs), dict(case.options)), limit, only) for case in cases}


def _check(case: VectorCase, found: Mapping[str, Any], limit: float, only: Collection[str] | None) -> float:
    wanted = {name: value for name, value in case.results.items() if only is None or name in only}
    if missing := wanted.keys() - found.keys():
        raise AssertionError(f"{case.name}: {sorted(missing)} are missing; the function gave {sorted(found)}")
    errors = {
        name: _error(np.asarray(found[name]), value, f"{case.name}: {name}") for name, value in wanted.items()
    }
    if far := {name: error for name, error in errors.items() if not error <= limit}:
        raise AssertionError(f"{case.name}: relative errors {far} are above {limit:g}")
    return max(errors.values(), default=0.0)


def _error(found: np.ndarray, expected: np.ndarray, what: str) -> float:
    """Largest difference, relative to the largest entry where one is not 0."""
    if found.shape != expected.shape:
        raise AssertionError(f"{what} has shape {found.shape}, must be {expected.shape}")
    if not expected.size:
        return 0.0
    largest = float(np.abs(expected.astype(np.float64)).max())
    difference = float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max())
    return difference / largest if largest else difference
