"""Targets of `offline.py` and the table that says which of them were met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""Trainer -> its numbers, of one method."""

TIME_TARGETS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("dpo", "small"): {"trl": 5.0, "trl-compact": 3.0},
    ("dpo", "medium"): {"trl": 2.3, "trl-compact": 1.3},
    ("dpo", "large"): {"trl": 4.5, "trl-compact": 1.5},
    ("kto", "small"): {"trl": 3.0},
    ("sft", "small"): {"trl": 2.0, "packing": 1.0},
    ("rm", "small"): {"trl": 2.0},
}
"""(method, shape) -> peer -> how many times its time per token we want to be. `packing`: TRL's best packing."""

MEMORY_TARGETS = {"dpo": 1 / 3}
"""Method -> at most this share of the peak memory of TRL as shipped."""

LOSS_TARGET = 1e-4
"""How far the losses of steps on the same rows may be apart."""


def ratios(results: Results) -> Iterator[tuple[str, float]]:
    """(peer, its time per token divided by ours); TRL's fastest packing once more as `packing`."""
    ours = results["ours"]["ms_per_token"]
    found = {name: result["ms_per_token"] / ours for name, result in results.items() if name != "ours"}
    yield from found.items()
    packings = [ratio for name, ratio in found.items() if results[name]["packs"]]
    if packings:
        yield "packing", min(packings)


def loss_gap(results: Results, peer: str) -> float | None:
    """Largest difference between the losses of all steps; None where the steps hold other rows."""
    if results[peer]["packs"]:
        return None
    pairs = zip(results["ours"]["losses"], results[peer]["losses"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def rows(method: str, shape: str, results: Results) -> Iterator[tuple[str, str, str, str]]:
    """(what, found, wanted, verdict) of each target, and of each comparison that has none."""
    wanted = TIME_TARGETS.get((method, shape), {})
    for peer, ratio in ratios(results):
        target = wanted.get(peer)
        verdict = "" if target is None else _verdict(ratio >= target)
        yield f"time against {peer}", f"{ratio:.2f}x", "" if target is None else f"{target:g}x", verdict
    for peer in results:
        if peer == "ours":
            continue
        share = results["ours"]["peak_mib"] / results[peer]["peak_mib"]
        target = MEMORY_TARGETS.get(method) if peer == "trl" else None
        verdict = "" if target is None else _verdict(share <= target)
        yield f"memory against {peer}", f"{share:.2f}", "" if target is None else f"{target:.2f}", verdict
    for peer in results:
        if peer != "ours" and (gap := loss_gap(results, peer)) is not None:
            yield f"losses against {peer}", f"{gap:.1e}", f"{LOSS_TARGET:.0e}", _verdict(gap <= LOSS_TARGET)


def print_table(everything: Mapping[str, Results], shape: str) -> bool:
    """Print all methods in one table; True if every target was met."""
    print(f"\n{'method':7} {'comparison':28} {'found':>9} {'target':>9}")
    met = True
    for method, results in everything.items():
        if "ours" not in results:
            continue
        for what, found, wanted, verdict in rows(method, shape, results):
            print(f"{method:7} {what:28} {found:>9} {wanted:>9}  {verdict}")
            met = met and verdict != "FAILED"
    return met


def _verdict(met: bool) -> str:
    return "met" if met else "FAILED"
