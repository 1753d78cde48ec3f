"""The prompt ledger: every prompt that was started, and what became of it. It has no clock and no threads.

Let `step` be the next step to be trained, B the prompts of a step, `version` the weights that the engines have, and
S the number of weight updates that may lie between a sample's oldest token and the step that trains on it. A group
started at version v is due at step v + S at the latest. The bound holds always, because

- a prompt is started only while at most B * (S + version - step + 1) are under way or waiting to be trained on,
  which is what the steps until its own due one can take;
- a step takes the oldest groups that are finished, and begins only once the rest fits into the steps before it is
  due. What is due is hence waited for, and never thrown away.

With S = 0 this is the ordinary alternation: B prompts are started, all are waited for, none is left.

What is outstanding was started at few different versions, S + 2 at most. Hence it is counted by version, and no
event costs more than the logarithm of the number of prompts.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_rollout import ScoredGroup

from rlhf_launch.samples.saved_groups import can_be_saved


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLimits:
    """How many prompts may be under way, waiting, or replaced."""

    per_step: int
    """Prompts of a step, B."""
    steps: int
    """Steps of the run: nothing is started that no step would take."""
    max_staleness: int = 0
    """Weight updates that a sample may be behind, S."""
    max_in_flight: int = 0
    """Prompts being generated or scored at the same time; 0 for as many as the staleness allows."""
    max_misses: int = 0
    """Prompts without use (filtered, or without a score) that are replaced for one step; with more of them the step
    trains on what there is. 0 means B."""


class Ledger:
    """The accounts of a run's prompts, which are known by their position in the stream.

    `dispatched` = in flight + waiting + consumed + filtered + dropped, at any moment.

    >>> ledger = Ledger(LedgerLimits(per_step=2, steps=9))
    >>> ledger.room
    2
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self.limits = limits
        self.step = 0
        self.version = 0
        self.counts: Counter[str] = Counter(dispatched=0, consumed=0, filtered=0, dropped=0, dropped_samples=0)
        self.dropped: deque[tuple[int, str]] = deque(maxlen=100)
        """The latest prompts without a score, with the reason."""
        self._again: deque[int] = deque()
        self._started_at: dict[int, int] = {}
        """The version that each prompt without an outcome, or with a group that waits, was started at."""
        self._started: Counter[int] = Counter()
        """How many of these were started at each version."""
        self._finished: dict[int, ScoredGroup] = {}
        self._finished_of: dict[int, list[int]] = {}
        """The positions of the finished ones by the version that they were started at, each list a heap."""
        self._misses = 0
        self._flat: list[ScoredGroup] = []

    @property
    def in_flight(self) -> list[int]:
        """Prompts that were started and have no outcome."""
        return sorted((*(self._started_at.keys() - self._finished.keys()), *self._again))

    @property
    def unfinished(self) -> int:
        """Number of prompts in flight."""
        return len(self._started_at) - len(self._finished) + len(self._again)

    @property
    def waiting(self) -> int:
        """Groups that are finished and wait for a step."""
        return len(self._finished)

    @property
    def room(self) -> int:
        """Prompts that may be started now."""
        limits, outstanding = self.limits, len(self._started_at)
        fits = limits.per_step * (limits.max_staleness + self.version - self.step + 1) - outstanding
        wanted = limits.per_step * (limits.steps - self.step) - outstanding
        room = min(fits, wanted, len(self._again) if self._exhausted else fits)
        if limits.max_in_flight:
            room = min(room, limits.max_in_flight - (outstanding - self.waiting))
        return max(0, room)

    def again(self) -> int | None:
        """A prompt whose samples an interruption took, to be started before any other."""
        return self._again.popleft() if self._again else None

    def start(self, position: int, *, repeated: bool = False) -> None:
        """Note that a prompt is on its way to the engines."""
        self._count_start(position, self.version)
        self.counts["dispatched"] += not repeated

    def finish(self, position: int, group: ScoredGroup) -> None:
        """Note that the samples of a prompt have scores."""
        self._finished[position] = group
        heapq.heappush(self._finished_of.setdefault(self._started_at[position], []), position)

    def filter(self, position: int, group: ScoredGroup) -> None:
        """Note that the samples of a prompt teach nothing: their scores are equal."""
        self._forget(position)
        self.counts["filtered"] += 1
        self._misses += 1
        if len(self._flat) < self.limits.per_step:
            self._flat.append(group)

    def drop(self, position: int, reason: str) -> None:
        """Note that no sample of a prompt has a score."""
        self._forget(position)
        self.dropped.append((position, reason))
        self.counts["dropped"] += 1
        self._misses += 1

    @property
    def ready(self) -> bool:
        """Whether the step can be taken: it has all groups that it will get, those that are due among them."""
        limits = self.limits
        if self.waiting < limits.per_step and (self.unfinished or not self._exhausted):
            return False
        # The step takes the oldest, so of the groups started at some version or before, it takes as many as it can.
        versions = deque(sorted(self._started))
        started = finished = 0
        for later in range(limits.max_staleness + 1):
            while versions and versions[0] + limits.max_staleness <= self.step + later:
                version = versions.popleft()
                started += self._started[version]
                finished += len(self._finished_of.get(version, ()))
            if started - min(finished, limits.per_step) > limits.per_step * later:
                return False
        return True

    def take(self) -> list[ScoredGroup]:
        """Hand over the groups of the step, in the order of their prompts, and begin the next step.

        Filtered groups stand in if there is no other (their advantages are zero); empty if there is none at all.
        """
        chosen = sorted(self._pop_oldest(self.limits.per_step))
        groups = [self._finished.pop(position) for position in chosen] or self._flat
        for position in chosen:
            self._forget(position)
        self.counts["consumed"] += len(chosen)
        self._misses, self._flat = 0, []
        self.step += 1
        return groups

    @property
    def _exhausted(self) -> bool:
        return self._misses > (self.limits.max_misses or self.limits.per_step)

    def _pop_oldest(self, count: int) -> list[int]:
        """Positions of the oldest finished groups, which are due first."""
        oldest: list[int] = []
        for version in sorted(self._finished_of):
            heap = self._finished_of[version]
            while heap and len(oldest) < count:
                oldest.append(heapq.heappop(heap))
            if not heap:
                del self._finished_of[version]
        return oldest

    def _count_start(self, position: int, version: int) -> None:
        """Count a prompt as outstanding, since this version of the weights."""
        self._started_at[position] = version
        self._started[version] += 1

    def _forget(self, position: int) -> None:
        """Count a prompt as outstanding no longer."""
        version = self._started_at.pop(position)
        self._started[version] -= 1
        if not self._started[version]:
            del self._started[version]

    def state(self) -> tuple[dict[str, Any], list[ScoredGroup]]:
        """The accounts as a checkpoint holds them: what JSON can express, and the groups of its `finished`.

        Samples of prompts in flight are not kept, nor those that no file can hold (images, dates): all of these are
        generated again.
        """
        again, counts = self.in_flight, dict(self.counts)
        finished, groups = [], []
        for position, group in self._finished.items():
            if can_be_saved(group):
                finished.append({"position": position, "version": self._started_at[position]})
                groups.append(group)
            else:
                again.append(position)
                counts["dropped_samples"] -= len(group.dropped)  # to be counted when they are there again
        plain = {
            "in_flight": sorted(again),
            "finished": finished,
            "dropped": [list(entry) for entry in self.dropped],
            "counts": counts,
        }
        return plain, groups

    def restore(self, state: Mapping[str, Any], groups: Sequence[ScoredGroup], *, step: int) -> None:
        """Continue from saved accounts, before `step` and with the engines at that version."""
        self.step = self.version = step
        again = list(state["in_flight"])
        self._finished, self._finished_of = {}, {}
        self._started_at, self._started = {}, Counter()
        entries = zip(state["finished"], groups, strict=True)
        saved = [(entry["version"], entry["position"], group) for entry, group in entries]
        for version, position, group in sorted(saved, key=lambda item: item[:2]):
            left = version + self.limits.max_staleness - step + 1
            if self.waiting < self.limits.per_step * left:
                self._count_start(position, version)
                self.finish(position, group)
            else:  # the limits are tighter than before; these samples would come too late
                again.append(position)
        self._again = deque(sorted(again))
        self.dropped.clear()
        self.dropped.extend((position, reason) for position, reason in state["dropped"])
        self.counts = Counter(state["counts"])
        self._misses, self._flat = 0, []
