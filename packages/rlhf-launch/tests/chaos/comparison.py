"""Two runs' directories compared: weights, optimizer, metrics, order of the data; and the account of one."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rlhf_algos import read_metrics
from safetensors.torch import load

VARYING = ("seconds/", "idle_seconds/", "tokens_per_second/", "memory/", "sync/probe_seconds")
"""Metrics that are of the machine, not of the run."""


def differences(one: Path, two: Path) -> list[str]:
    """What differs between two finished runs that should be the same, a line each."""
    found = []
    for folder in ("model", "model-average", "best"):
        found += _files(one / folder, two / folder)
    last = [max((run / "checkpoints").glob("step-*")) for run in (one, two)]
    if last[0].name != last[1].name:
        found.append(f"the last checkpoint is {last[0].name} and {last[1].name}")
    else:
        found += [f"{last[0].name}/{line}" for line in _files(*last, without=("manifest.json",))]
    found += _rows("metrics.jsonl", *(_metrics(run) for run in (one, two)))
    if (one / "samples.jsonl").exists():
        found += _rows("samples.jsonl", *(_by_step(read_metrics(run / "samples.jsonl")) for run in (one, two)))
    return found


def _metrics(run: Path) -> dict[str, Any]:
    rows = read_metrics(run / "metrics.jsonl")
    return _by_step([{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows])


def _by_step(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows by step; those of evaluations have names of their own."""
    found: dict[str, Any] = {}
    for row in rows:
        kind = next((name.rpartition("/")[0] for name in row if name.startswith("eval/")), "row")
        name = f"step {row['step']} {kind}"
        while name in found:
            name += " again"
        found[name] = row
    return found


def _rows(file: str, one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    found = [f"{file}: {name} is in one of them alone" for name in sorted(set(one) ^ set(two))]
    for name in one.keys() & two.keys():
        keys = [key for key in one[name].keys() | two[name].keys() if one[name].get(key) != two[name].get(key)]
        values = ", ".join(f"{key} {one[name].get(key)} and {two[name].get(key)}" for key in sorted(keys)[:3])
        found += [f"{file}: {name}: {len(keys)} values: {values[:300]}"] if keys else []
    return sorted(found)


def _files(one: Path, two: Path, *, without: tuple[str, ...] = ()) -> list[str]:
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - set(without)
        for folder in (one, two)
    ]
    found = [f"{one.name}/{name} is in one of them alone" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        bytes_one, bytes_two = (one / name).read_bytes(), (two / name).read_bytes()
        if bytes_one != bytes_two and (what := _content(name, bytes_one, bytes_two)):
            found.append(f"{one.name}/{name}: {what}")
    return found


def _content(name: str, one: bytes, two: bytes) -> str:
    """What differs in two files of unequal bytes; empty if only their wrapping does."""
    if name.endswith(".json"):
        left, right = json.loads(one), json.loads(two)
        keys = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
        return ", ".join(f"{key}: {str(left.get(key))[:80]} and {str(right.get(key))[:80]}" for key in keys[:4])
    try:
        if name.endswith(".safetensors"):
            left, right = load(one), load(two)
        else:
            left, right = (_leaves(torch.load(io.BytesIO(part), weights_only=False)) for part in (one, two))
    except Exception:
        return "other bytes"
    keys = [key for key in left.keys() | right.keys() if not _same(left.get(key), right.get(key))]
    return f"{len(keys)} of {len(left)} values, {', '.join(map(str, keys[:3]))}" if keys else ""


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {name: value}
    return {key: leaf for inner, part in items for key, leaf in _leaves(part, f"{name}.{inner}").items()}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(one, two))
    if hasattr(one, "__dict__") and type(one) is type(two):
        return _same(vars(one), vars(two)) or repr(one) == repr(two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return one is two or bool(one == two)


def account_faults(run: Path, *, steps: int, per_step: int, max_staleness: int) -> list[str]:
    """What is wrong with the account of a finished run: prompts lost, twice, or too old."""
    rows, metrics = read_metrics(run / "samples.jsonl"), read_metrics(run / "metrics.jsonl")
    found = []
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        found.append(f"samples.jsonl has rows of steps {[row['step'] for row in rows]}")
    entries = [(row["step"], entry) for row in rows for entry in row["prompts"]]
    positions = Counter(entry["position"] for _, entry in entries)
    found += [f"position {position} is there {times} times" for position, times in positions.items() if times > 1]
    lost = sorted(set(range(max(positions) + 1)) - set(positions))
    found += [f"positions {lost} are lost"] if lost else []
    for step, entry in entries:
        if entry["outcome"] == "used" and step - 1 - entry["versions"][0] > max_staleness:
            found.append(f"step {step} used position {entry['position']} of version {entry['versions'][0]}")
    outcomes = Counter(entry["outcome"] for _, entry in entries)
    if outcomes["used"] != steps * per_step:
        found.append(f"{outcomes['used']} prompts were used, not {steps * per_step}")
    for outcome in ("used", "filtered", "dropped"):
        told = sum(row.get(f"prompts/{outcome}", 0) for row in metrics)
        found += (
            [f"metrics say {told:g} {outcome}, the account {outcomes[outcome]}"]
            if told != outcomes[outcome]
            else []
        )
    started = sum(row.get("prompts/started", 0) for row in metrics)
    found += [f"{started:g} prompts were started, {len(positions)} settled"] if started != len(positions) else []
    return found
