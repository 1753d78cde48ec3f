"""A stream of prompts whose next one depends on how the last ones went: the curriculum of a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rlhf_core import DataError

from rlhf_launch.config.curriculum import CurriculumSection
from rlhf_launch.samples.prompts import Prompt, PromptSets, PromptStream

_TRIES = 64
"""Draws after which all prompts that are not under way are looked at."""


class CurriculumStream(PromptStream):
    """Draws each prompt by what is known when it is started: a pure function of seed, position and the visits that
    were settled before.

    What samples score is noted as they come and counts from the end of their step on (`settle`), in the order of
    positions: when a sample arrived has no influence. A position keeps its prompt until its step is settled.
    """

    def __init__(
        self,
        sets: PromptSets,
        rules: CurriculumSection,
        *,
        seed: int,
        names: Sequence[str] = (),
        data: str = "data",
    ) -> None:
        """Draw from these prompts.

        Args:
            sets: the prompts, dataset after dataset.
            rules: what decides.
            seed: of the draws.
            names: of the datasets, for metrics; their numbers if not given.
            data: where the prompts are from, for messages.

        Raises:
            DataError: a prompt without a number in the column of difficulty.
        """
        super().__init__(sets.prompts, seed=seed)
        self._rules, self._sets = rules, sets
        self._names = list(names) or [str(index) for index in range(len(sets.sizes))]
        self._starts = np.concatenate([[0], np.cumsum(sets.sizes)]).tolist()
        count = len(sets.prompts)
        self._difficulty = difficulties(sets.prompts, rules, data)
        self._ranks = _ranks(self._difficulty, self._starts)
        self._step = 0
        self._draws = np.zeros(count, dtype=np.int64)
        self._rates = np.full(count, np.nan)
        self._rests = np.zeros(count, dtype=np.int64)
        """The step from which each prompt may come again."""
        self._sums: dict[int, NDArray[np.float64]] = {}
        """By dataset, of this step; see `_sums_of`."""
        self._drawn: dict[int, int] = {}
        """Position to prompt, of positions that no step has settled."""
        self._noted: dict[int, tuple[float, bool]] = {}
        """Of positions, success rate and whether all scores were equal."""

    @property
    def passes(self) -> float:
        """How often the prompt was drawn that was drawn least."""
        return float(self._draws.min())

    def at(self, position: int) -> Prompt:
        """The prompt at a position that is not settled; drawn now, if it was not yet."""
        if position not in self._drawn:
            self._drawn[position] = index = self._draw(position)
            self._draws[index] += 1
        return self._prompts[self._drawn[position]]

    def note(self, position: int, scores: Sequence[float]) -> None:
        """Remember what the samples of a position scored."""
        passed = sum(score > self._rules.pass_score for score in scores) / len(scores)
        self._noted[position] = (passed, len(scores) > 1 and max(scores) == min(scores))

    def settle(self, positions: Iterable[int]) -> dict[str, float]:
        """Count the visits of a step; returns its metrics.

        `curriculum/share/<dataset>` and `curriculum/difficulty` are of the prompts of the step,
        `curriculum/success_rate` of those with scores; `curriculum/resting`, `curriculum/open` and
        `curriculum/seen` are shares of all prompts after it.
        """
        indices: list[int] = []
        passed: list[float] = []
        for position in sorted(positions):
            index = self._drawn.pop(position)
            indices.append(index)
            if (noted := self._noted.pop(position, None)) is None:
                continue
            rate, flat = noted
            passed.append(rate)
            old, decay = self._rates[index], self._rules.decay
            self._rates[index] = rate if np.isnan(old) else decay * old + (1 - decay) * rate
            if flat:
                self._rests[index] = self._step + 1 + self._rules.cooldown_steps
        self._step += 1
        self._sums.clear()
        return self._metrics(indices, passed)

    def state(self) -> dict[str, Any]:
        """See PromptStream."""
        seen = np.flatnonzero(self._draws).tolist()
        known = [
            [index, int(self._draws[index]), _plain(float(self._rates[index])), int(self._rests[index])]
            for index in seen
        ]
        return {
            "step": self._step,
            "drawn": [list(pair) for pair in sorted(self._drawn.items())],
            "noted": [[position, *noted] for position, noted in sorted(self._noted.items())],
            "prompts": json.dumps(known),  # in one line of the checkpoint's file
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """See PromptStream. Without a state (a run that had no curriculum until now) it begins anew."""
        self._draws[:], self._rates[:], self._rests[:] = 0, np.nan, 0
        self._step, self._drawn, self._noted, self._sums = 0, {}, {}, {}
        if state is None:
            return
        self._step = state["step"]
        self._drawn = dict(state["drawn"])
        # What was noted belongs to samples that are drawn again, or wait in the ledger.
        self._noted = {position: (rate, bool(flat)) for position, rate, flat in state["noted"]}
        for index, draws, rate, rests in json.loads(state["prompts"]):
            self._draws[index], self._rests[index] = draws, rests
            self._rates[index] = math.nan if rate is None else rate

    def _draw(self, position: int) -> int:
        chance = random.Random(f"{self._seed}/curriculum/{position}")
        weights = self._rules.weights_at(self._step) or self._sets.weights
        dataset = _place(np.cumsum(weights), chance.random())
        first, last = self._starts[dataset], self._starts[dataset + 1]
        if self._rules.target_success_rate is not None:
            sums, busy = self._sums_of(dataset), set(self._drawn.values())
            # Nearly always one of the first tries is free, and nothing is done for each prompt of the data.
            for _ in range(_TRIES if sums[-1] > 0 else 0):
                if (index := first + _place(sums, chance.random())) not in busy:
                    return index
        weights = self._weights(first, last)
        return first + _place(np.cumsum(weights), chance.random())

    def _sums_of(self, dataset: int) -> NDArray[np.float64]:
        """Sums of the weights of a dataset's prompts that are open and do not rest, which stay for the step."""
        if dataset not in self._sums:
            part = slice(self._starts[dataset], self._starts[dataset + 1])
            may = self._open(part.start, part.stop) & (self._rests[part] <= self._step)
            self._sums[dataset] = np.cumsum(np.where(may, interest(self._rates[part], self._rules), 0.0))
        return self._sums[dataset]

    def _weights(self, first: int, last: int) -> NDArray[np.float64]:
        """Weights of a dataset's prompts."""
        part = slice(first, last)
        free = np.ones(last - first, dtype=bool)
        free[[index - first for index in self._drawn.values() if first <= index < last]] = False
        may = self._open(first, last)
        rests = self._rests[part]
        if (may & free).any():
            may &= free
        if (may & (rests <= self._step)).any():
            may &= rests <= self._step
        else:
            may &= rests == rests[may].min()
        if self._rules.target_success_rate is None:
            draws = self._draws[part]
            return (may & (draws == draws[may].min())).astype(np.float64)
        return np.where(may, interest(self._rates[part], self._rules), 0.0)

    def _open(self, first: int, last: int) -> NDArray[np.bool_]:
        """Which prompts of a dataset are easy enough by now; at least one is."""
        if self._rules.difficulty is None:
            return np.ones(last - first, dtype=bool)
        share = self._rules.difficulty.open_share(self._step)
        return self._ranks[first:last] < max(1, math.ceil(share * (last - first) - 1e-9))

    def _metrics(self, indices: Sequence[int], passed: Sequence[float]) -> dict[str, float]:
        count = len(self._prompts)
        metrics = {
            "curriculum/seen": float((self._draws > 0).mean()),
            "curriculum/resting": float((self._rests > self._step).mean()),
        }
        if len(self._names) > 1 and indices:
            places = np.searchsorted(self._starts, indices, side="right") - 1
            shares = np.bincount(places, minlength=len(self._names)) / len(indices)
            metrics |= {f"curriculum/share/{name}": float(shares[i]) for i, name in enumerate(self._names)}
        if self._difficulty is not None:
            if indices:
                metrics["curriculum/difficulty"] = float(self._difficulty[list(indices)].mean())
            opened = sum(self._open(first, last).sum() for first, last in pairwise(self._starts))
            metrics["curriculum/open"] = float(opened / count)
        if passed:
            metrics["curriculum/success_rate"] = sum(passed) / len(passed)
        return metrics


def interest(rates: NDArray[np.float64], rules: CurriculumSection) -> NDArray[np.float64]:
    """Weights of prompts by their success rates; 1 for one that is not known (NaN).

    >>> rules = CurriculumSection(target_success_rate=0.5)
    >>> interest(np.array([0.5, 0.75, 1.0, np.nan]), rules).tolist()
    [1.0, 0.25, 0.05, 1.0]
    """
    target = rules.target_success_rate or 0.0
    distance = np.nan_to_num(np.abs(rates - target), nan=0.0)
    near = np.maximum(0.0, 1 - distance / max(target, 1 - target))
    return np.maximum(rules.min_weight, near**rules.sharpness)


def difficulties(prompts: Sequence[Prompt], rules: CurriculumSection, data: str) -> NDArray[np.float64] | None:
    """The column of difficulty, if the curriculum names one.

    Raises:
        DataError: a row without it, or with something else than a finite number.
    """
    if rules.difficulty is None:
        return None
    column, found = rules.difficulty.column, np.empty(len(prompts))
    for index, prompt in enumerate(prompts):
        value = prompt.metadata.get(column)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            there = ", ".join(sorted(prompt.metadata)) or "none"
            what = f"{value!r} in the column" if column in prompt.metadata else "no column"
            raise DataError(
                f"{data} row {int(prompt.prompt_id) + 1}: data.curriculum.difficulty.column needs a finite number, "
                f"found {what} {column!r} (columns beside the prompt: {there})"
            )
        found[index] = value
    return found


def dataset_names(paths: Sequence[str]) -> list[str]:
    """Short names of datasets: the last part of each path, with its number where two are alike.

    >>> dataset_names(["a/gsm8k.jsonl", "b/gsm8k.jsonl", "org/math"])
    ['gsm8k', 'gsm8k-2', 'math']
    """
    names: list[str] = []
    for number, path in enumerate(paths, 1):
        stem = path.rstrip("/").rsplit("/", 1)[-1].split(".")[0] or str(number)
        names.append(stem if stem not in names else f"{stem}-{number}")
    return names


def _ranks(difficulty: NDArray[np.float64] | None, starts: Sequence[int]) -> NDArray[np.int64]:
    """Each prompt's place in its dataset from easy to hard."""
    ranks = np.zeros(starts[-1], dtype=np.int64)
    if difficulty is not None:
        for first, last in pairwise(starts):
            order = np.argsort(difficulty[first:last], kind="stable")
            ranks[first + order] = np.arange(last - first)
    return ranks


def _place(sums: NDArray[np.float64], chance: float) -> int:
    """An index by the sums of weights that are not all 0; `chance` is in [0, 1)."""
    # By rounding the product may be the whole sum, which is past the last index that has a weight.
    last = np.searchsorted(sums, sums[-1], side="left")
    return int(min(np.searchsorted(sums, chance * sums[-1], side="right"), last))


def _plain(rate: float) -> float | None:
    return None if math.isnan(rate) else rate
