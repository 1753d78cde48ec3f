"""A pass of a deep model from that of a shallow one: equal layers take equal memory, one after the other.

A shallow model of four layers runs; the moments of its second and third layer say what each more adds, and where.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeVar

SHALLOW = 4
"""Layers that are run: a first, two in the middle to compare, a last."""
_LAYER = re.compile(r"\.(\d+)\.")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Moment(Protocol):
    @property
    def used(self) -> tuple[int, ...]: ...
    @property
    def peak(self) -> int: ...


P = TypeVar("P", bound=_Named)
M = TypeVar("M", bound=_Moment)


def layer_of(name: str) -> int | None:
    """The number of the layer that a parameter belongs to, by its name.

    >>> layer_of("model.layers.12.mlp.up_proj.weight"), layer_of("model.norm.weight")
    (12, None)
    """
    found = _LAYER.search(name)
    return None if found is None else int(found.group(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepening:
    """From a model of `SHALLOW` layers to one of `layers`."""

    layers: int

    @property
    def more(self) -> int:
        """Layers that are added, between the third and the last one."""
        return self.layers - SHALLOW

    def parameters(self, shallow: Sequence[P]) -> list[P]:
        """Those of the deep model, in its order."""
        found: list[P] = []
        for layer, run in groupby(shallow, key=lambda one: layer_of(one.name)):
            members = list(run)
            if layer is None:
                found += members
                continue
            copies = range(layer, layer + self.more + 1) if layer == SHALLOW - 2 else [self._number(layer)]
            found += [_renamed(one, number) for number in copies for one in members]
        return found

    def places(self, shallow: Sequence[P]) -> list[list[int]]:
        """For each parameter of the shallow model, the places of its copies in the deep one (of the third layer's
        in the order of layers, of any other a single one)."""
        deep = {one.name: place for place, one in enumerate(self.parameters(shallow))}
        found = []
        for one in shallow:
            layer = layer_of(one.name)
            if layer is None:
                found.append([deep[one.name]])
                continue
            copies = range(layer, layer + self.more + 1) if layer == SHALLOW - 2 else [self._number(layer)]
            found.append([deep[_renamed(one, number).name] for number in copies])
        return found

    def moments(self, shallow: Sequence[P], moments: Sequence[M]) -> list[M]:
        """Those of a pass of the deep model; the first half of what a layer is used in is forward."""
        places = self.places(shallow)
        runs = [(layer, list(run)) for layer, run in groupby(moments, key=lambda one: self._layer(shallow, one))]
        found: list[M] = []
        extra, last = 0, None
        for layer, run in runs:
            backward = last is not None and layer is not None and layer < last
            before = _run_before(runs, run, SHALLOW - 3)
            if layer != SHALLOW - 2 or before is None:
                found += [_moved(one, places, 0, extra) for one in run]
            else:
                steps = [mine.peak - its.peak for mine, its in zip(run, before, strict=False)]
                step = sorted(steps)[len(steps) // 2]
                order = range(self.more, -1, -1) if backward else range(self.more + 1)
                for copy in order:
                    found += [_moved(one, places, copy, step * copy) for one in run]
                extra = 0 if backward else step * self.more
            last = layer if layer is not None else last
        return found

    def _layer(self, shallow: Sequence[P], moment: _Moment) -> int | None:
        return layer_of(shallow[moment.used[0]].name) if moment.used else None

    def _number(self, layer: int) -> int:
        return layer if layer < SHALLOW - 1 else layer + self.more


def _run_before(runs: Sequence[tuple[int | None, list[M]]], run: list[M], layer: int) -> list[M] | None:
    """The run of the layer to compare with, next to this one: before it forwards, after it backwards."""
    place = next(index for index, (_, other) in enumerate(runs) if other is run)
    for neighbour in (place - 1, place + 1):
        if 0 <= neighbour < len(runs) and runs[neighbour][0] == layer:
            return runs[neighbour][1]
    return None


def _renamed(one: P, number: int) -> P:
    return replace(one, name=_LAYER.sub(f".{number}.", one.name, count=1))  # type: ignore[type-var]


def _moved(moment: M, places: Sequence[Sequence[int]], copy: int, extra: int) -> M:
    used = tuple(places[place][min(copy, len(places[place]) - 1)] for place in moment.used)
    return replace(moment, used=used, peak=moment.peak + extra)  # type: ignore[type-var]
