"""Rollout engines that are made up: they answer as real ones do, after seconds of a virtual clock."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlhf_core import (
    BackendCapabilities,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    PauseMode,
    Sample,
    SendReport,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
)

from rlhf_launch.simulation.clock import VirtualClock
from rlhf_launch.workers.handles import finished
from rlhf_launch.workers.probe import LoadReport
from rlhf_launch.workers.pulse import Pulse

_DONE = 1e-6
"""A sample with less than this many tokens to go is finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeed:
    """Seconds of a token as a function of what runs beside it: `alone_s` + `more_s` for every sample under way.

    An engine decodes one token of every running sample at a time. That takes the reading of the weights, and the
    work of each sample.

    >>> EngineSpeed(alone_s=0.01, more_s=0.001).tokens_per_second(10)
    50.0
    """

    alone_s: float
    more_s: float = 0.0
    max_samples: int = 256
    """Samples under way at once; further ones queue."""

    def tokens_per_second(self, samples: int) -> float:
        """Of each of so many samples."""
        return 1.0 / (self.alone_s + self.more_s * samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSpeed:
    """How long a weight sync takes."""

    seconds: float = 1.0
    give_up_s: float = 10.0
    """After so many seconds the sender knows that a receiver is gone."""


@dataclass(slots=True)
class _Request:
    """A request under way, with the samples of it that are there."""

    request: GenerationRequest
    answer: Future[Any]
    samples: list[Sample | None]
    missing: int


@dataclass(slots=True)
class _Running:
    """A sample under way."""

    owner: _Request
    index: int
    begin: float
    """What each sample of the engine had got when this one began, in tokens."""
    length: float
    """Tokens that are missing when it begins."""
    started: bool = False


class Lengths:
    """How long every sample is, by the label of its request and its place in it.

    What a pause interrupts is continued by a request of its own (see `RolloutPool.generate`), on any engine.
    """

    def __init__(self, length_of: Callable[[str, int], float]) -> None:
        self._length_of = length_of
        self._left: dict[tuple[str, int], float] = {}

    def missing(self, request_id: str, index: int) -> float:
        """Tokens that a request has to sample."""
        label, index, continued = _sample_of(request_id, index)
        return self._left[label, index] if continued else self._length_of(label, index)

    def interrupt(self, request_id: str, index: int, missing: float) -> None:
        """Note how much of a sample is missing."""
        label, index, _ = _sample_of(request_id, index)
        self._left[label, index] = missing


def _sample_of(request_id: str, index: int) -> tuple[str, int, bool]:
    """Label and place of a sample, and whether the request goes on with it; see `RolloutPool`'s names of these."""
    label, *rests = request_id.split("+")
    return (label, int(rests[0].split(".")[0]), True) if rests else (label, index, False)


class SimulatedWeights:
    """The policy's weights on their way: who has joined the link, and whether all of them are still there."""

    def __init__(self, clock: VirtualClock, speed: SyncSpeed) -> None:
        self.clock, self.speed = clock, speed
        self.on_send: Callable[[Sequence[SimulatedEngine]], None] = lambda receivers: None
        """Is told who is about to receive weights."""
        self._joined: list[SimulatedEngine] = []
        self._expected = 0
        self._accepting: Future[Any] | None = None

    def open(self, kind: str, receivers: int) -> Link:
        """A new link, which nobody has joined."""
        self._joined, self._expected, self._accepting = [], receivers, None
        return Link(
            kind=kind, address="a link of a simulation", receivers=receivers, timeout_s=self.speed.give_up_s
        )

    def join(self, engine: SimulatedEngine) -> None:
        """Let an engine join."""
        self._joined.append(engine)
        self._meet()

    def accept(self) -> Future[Any]:
        """A future that is done when all have joined, and fails when that takes too long."""
        accepting = self._accepting = Future()
        self._meet()

        def give_up() -> None:
            if not accepting.done():
                accepting.set_exception(WeightSyncError("not all receivers have joined the link"))

        self.clock.loop.call_later(self.speed.give_up_s, give_up)
        return accepting

    def _meet(self) -> None:
        accepting = self._accepting
        if accepting is not None and not accepting.done() and len(self._joined) >= self._expected:
            accepting.set_result(None)

    def send(self, manifest: WeightManifest) -> Future[Any]:
        """Bring the weights to all who have joined, or to nobody."""
        sent: Future[Any] = Future()
        receivers = list(self._joined)
        self.on_send(receivers)

        def end() -> None:
            if all(engine.receives(manifest) for engine in receivers):
                for engine in receivers:
                    engine.commit(manifest.version)
                size = manifest.total_bytes
                sent.set_result(SendReport(bytes=size, gathered_bytes=0, seconds=self.speed.seconds))
            else:
                self.clock.loop.call_later(self.speed.give_up_s, fail)

        def fail() -> None:
            for engine in receivers:
                engine.break_off()
            sent.set_exception(WeightSyncError("a receiver is gone"))

        self.clock.loop.call_later(self.speed.seconds, end)
        return sent


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class SimulatedEngine:
    """The handle of a rollout engine: samples share its speed, and are as long as `length_of` says.

    A sample stands for all its tokens by one token of each version of the weights that it was sampled with.
    """

    def __init__(
        self,
        name: str,
        weights: SimulatedWeights,
        speed: EngineSpeed,
        lengths: Lengths,
        *,
        pause_mode: PauseMode = "keep",
        start_s: float = 0.0,
    ) -> None:
        """An engine with the weights of version 0.

        Args:
            name: of the worker.
            weights: how it gets others.
            speed: of its samples.
            lengths: of its samples.
            pause_mode: what it can do in a pause.
            start_s: seconds until it is up; below 0 it does not come up at all.
        """
        self.name = name
        self.lost: str | None = None
        """What it died of."""
        self._weights, self._clock, self._speed = weights, weights.clock, speed
        self._lengths, self._start_s = lengths, start_s
        self._pause_mode: PauseMode = pause_mode
        self._cut_off_until = 0.0
        self._held_back: list[Callable[[], None]] = []
        self._unanswered: dict[Future[Any], None] = {}
        self._receiving: tuple[WeightManifest, Future[Any]] | None = None
        self._stale = self._paused = self._soon = False
        self._running: list[tuple[float, int, _Running]] = []
        self._queue: deque[_Running] = deque()
        self._number = 0
        self._tokens = 0.0
        self._since = 0.0
        self._timer: Any = None
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """From which token on, counted for each sample, the engine had which weights."""

    # ------------------------------------------------------------ the handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Handle."""
        if self.lost is not None:
            return _failed(EngineDiedError(f"{self.name} is gone: {self.lost}"))
        answer: Future[Any] = Future()
        self._unanswered[answer] = None
        getattr(self, f"_on_{method}")(answer, *args, **kwargs)
        return answer

    def pulse(self) -> Future[Pulse]:
        """See Handle."""
        if self.lost is not None:
            return _failed(EngineDiedError(f"{self.name} is gone: {self.lost}"))
        answer: Future[Pulse] = Future()
        self._unanswered[answer] = None
        self._advance()
        self._answer(answer, Pulse(progress={"tokens": int(self._tokens * 1000)}, doing="generate"))
        return answer

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        return finished(None)

    def end(self) -> None:
        """See Handle."""
        self.die("it was ended")

    # ------------------------------------------------------------ faults

    def die(self, reason: str) -> None:
        """Lose the engine with all that it was at."""
        if self.lost is not None:
            return
        self._advance()
        self.lost = reason
        unanswered, self._unanswered = self._unanswered, {}
        self._held_back, self._running, self._queue = [], [], deque()
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(EngineDiedError(f"{self.name}: {reason}"))

    def cut_off(self, seconds: float) -> None:
        """Let nothing that the engine says arrive for so long; it works on."""
        self._cut_off_until = self._clock.now() + seconds

        def heal() -> None:
            held_back, self._held_back = self._held_back, []
            for say in held_back:
                say()

        self._clock.loop.call_later(seconds + _DONE, heal)

    def _answer(self, answer: Future[Any], result: Any) -> None:
        if self._clock.now() < self._cut_off_until:
            self._held_back.append(lambda: self._answer(answer, result))
            return
        self._unanswered.pop(answer, None)
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    # ------------------------------------------------------------ its methods

    def _on_start(self, answer: Future[Any]) -> None:
        if self._start_s < 0:
            self._clock.loop.call_later(-self._start_s, self.die, "it could not start")
        else:
            self._clock.loop.call_later(self._start_s, self._answer, answer, self._start_s)

    def _on_capabilities(self, answer: Future[Any]) -> None:
        modes: frozenset[PauseMode] = frozenset((self._pause_mode,))
        self._answer(answer, BackendCapabilities(transports=frozenset({"disk"}), pause_modes=modes))

    def _on_shared_memory(self, answer: Future[Any]) -> None:
        self._answer(answer, None)

    def _on_connect(self, answer: Future[Any], link: Link, rank: int) -> None:
        if self._clock.now() >= self._cut_off_until:
            self._weights.join(self)
        self._answer(answer, None)

    def _on_receive_weights(self, answer: Future[Any], manifest: WeightManifest, check: object) -> None:
        self._advance()
        self._receiving = (manifest, answer)
        self._plan()

    def receives(self, manifest: WeightManifest) -> bool:
        """Whether the engine is taking these weights, and can be heard."""
        heard = self._clock.now() >= self._cut_off_until and self.lost is None
        return heard and self._receiving is not None and self._receiving[0] is manifest

    def commit(self, version: int) -> None:
        """Sample with the weights that have come."""
        if self._receiving is None:
            return
        self._advance()
        answer, self._receiving, self._stale = self._receiving[1], None, False
        self._versions = [*self._versions[-64:], (self._tokens, version)]
        self._answer(answer, LoadReport(seconds=self._weights.speed.seconds))
        self._plan()

    def break_off(self) -> None:
        """Sample nothing until other weights have come: these did not come whole."""
        if self._receiving is None or self.lost is not None:
            return
        answer, self._receiving, self._stale = self._receiving[1], None, True
        self._answer(answer, WeightSyncError("the sender has ended the link"))
        error = StaleWeightsError("the last weight sync failed")
        owners = {id(r.owner): r.owner for _, _, r in self._running} | {id(r.owner): r.owner for r in self._queue}
        self._running, self._queue = [], deque()
        for owner in owners.values():
            self._answer(owner.answer, error)

    def _on_pause(self, answer: Future[Any], mode: PauseMode) -> None:
        self._advance()
        self._paused = True
        if mode == "abort":
            stopped = [sample for _, _, sample in sorted(self._running)] + list(self._queue)
            self._running, self._queue = [], deque()
            for sample in stopped:
                self._give_up(sample)
        self._answer(answer, None)
        self._plan()

    def _on_resume(self, answer: Future[Any]) -> None:
        self._advance()
        self._paused = False
        self._answer(answer, None)
        self._plan()

    def _on_generate(self, answer: Future[Any], request: GenerationRequest) -> None:
        if self._stale:
            self._answer(answer, StaleWeightsError("the last weight sync failed"))
            return
        owner = _Request(request, answer, [None] * request.n, request.n)
        self._queue.extend(
            _Running(owner, index, 0.0, self._lengths.missing(request.request_id, index))
            for index in range(request.n)
        )
        self._plan()

    # ------------------------------------------------------------ samples

    @property
    def _moves(self) -> bool:
        return bool(self._running) and not self._paused and self._receiving is None and self.lost is None

    def _advance(self) -> None:
        """Count what was sampled until now."""
        now = self._clock.now()
        if self._moves:
            self._tokens += (now - self._since) * self._speed.tokens_per_second(len(self._running))
        self._since = now

    def _plan(self) -> None:
        """Look again, at the end of this moment, at what happens next."""
        if not self._soon:
            self._soon = True
            self._clock.loop.call_soon(self._look)

    def _look(self) -> None:
        self._soon = False
        self._advance()
        if self.lost is not None:
            return
        if not self._paused and self._receiving is None:
            while self._running and self._running[0][0] <= self._tokens + _DONE:
                self._finish(heapq.heappop(self._running)[2])
            while self._queue and len(self._running) < self._speed.max_samples:
                sample = self._queue.popleft()
                sample.begin, sample.started = self._tokens, True
                self._number += 1
                heapq.heappush(self._running, (self._tokens + sample.length, self._number, sample))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._moves:
            left = max(0.0, self._running[0][0] - self._tokens)
            rate = self._speed.tokens_per_second(len(self._running))
            self._timer = self._clock.loop.call_later(left / rate, self._look)

    def _finish(self, sample: _Running) -> None:
        self._give(sample, self._sampled(sample, "stop"))

    def _give_up(self, sample: _Running) -> None:
        """Hand over what there is of a sample."""
        done = self._tokens - sample.begin if sample.started else 0.0
        self._lengths.interrupt(sample.owner.request.request_id, sample.index, sample.length - done)
        nothing = Sample(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")
        self._give(sample, self._sampled(sample, "abort") if done > _DONE else nothing)

    def _give(self, running: _Running, sample: Sample) -> None:
        owner = running.owner
        owner.samples[running.index] = sample
        owner.missing -= 1
        if not owner.missing:
            result = GenerationResult(request_id=owner.request.request_id, samples=tuple(owner.samples))  # type: ignore[arg-type]
            self._answer(owner.answer, result)

    def _sampled(self, sample: _Running, reason: Any) -> Sample:
        first = max(0, bisect.bisect_right(self._versions, (sample.begin + _DONE, 1 << 60)) - 1)
        used = [version for since, version in self._versions[first + 1 :] if since < self._tokens - _DONE]
        versions = (self._versions[first][1], *used)
        size = len(versions)
        return Sample(
            token_ids=(7,) * size, log_probs=(-1.0,) * size, weight_versions=versions, finish_reason=reason
        )
