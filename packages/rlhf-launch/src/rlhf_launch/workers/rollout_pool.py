"""All rollout engines of a run: requests go to the engine with the least work, weights to every one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core import (
    PARTIAL_SYNCS,
    BackendCapabilities,
    CapabilityError,
    ConfigError,
    DeadlineExceeded,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    PartialSync,
    PauseMode,
    Precision,
    Sample,
    StaleWeightsError,
    WeightManifest,
    coarser,
)
from rlhf_rollout import gather_or_cancel

from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.devices import ROLLOUT, SharedDevices, Tenant
from rlhf_launch.workers.handles import Handle, close_workers
from rlhf_launch.workers.load import EngineLoads
from rlhf_launch.workers.probe import ProbeCheck
from rlhf_launch.workers.waits import Waits, WorkerLostError

_STALE_PAUSE_S = 0.2


class RolloutPool:
    """One or more rollout engines behind one `generate`."""

    def __init__(
        self,
        handles: Sequence[Handle],
        *,
        waits: Waits | None = None,
        devices: SharedDevices | None = None,
        scorers: Sequence[str] = (),
    ) -> None:
        self._handles = list(handles)
        self.devices = devices or SharedDevices()
        """Where the engines take turns with the training engines that share theirs."""
        self._scorers = tuple(scorers)
        self.waits = waits or Waits()
        """How its answers are waited for."""
        self._loads = EngineLoads(len(self._handles), clock=self.waits.clock.now)
        for engine, handle in enumerate(self._handles):
            self._watch(engine, handle)
        self._capabilities: list[BackendCapabilities] = []
        self._lost: dict[int, str] = {}
        self._starting: list[Any] = []
        self._replace_lost: Callable[[], None] = self._none_left

    def begin(self) -> None:
        """Let the engines start while others do; `start` waits for them."""
        self._starting = [handle.call("start") for handle in self._handles]

    def start(self) -> float:
        """Wait until all engines are up; returns the seconds of the slowest."""
        what = f"{self.engines} rollout engine(s) to start"
        with self.devices.moving_in(ROLLOUT, Tenant(leave=self.sleep, come=self.wake)):
            if not self._starting:
                self.begin()
            seconds = max(self.waits.gather(self._starting, what=what, workers=self._handles))
            self._capabilities = self._all("capabilities", what="state their capabilities")
            self._check_sleep()
        return seconds

    def _check_sleep(self) -> None:
        """Refuse engines that cannot make way for those that share their accelerators."""
        if not (neighbours := self.devices.neighbours(ROLLOUT)):
            return
        awake = [engine for engine, capabilities in enumerate(self._capabilities) if not capabilities.sleep]
        if any(device is not None for engine in awake for device in self.devices_of(engine)):
            raise ConfigError(
                "the rollout backend cannot give its accelerator's memory back (capabilities.sleep), so that "
                f"{', '.join(sorted(neighbours))} cannot share it; leave colocate_with out, or choose another "
                "rollout.backend"
            )

    @property
    def handles(self) -> Sequence[Handle]:
        """The engines' workers."""
        return tuple(self._handles)

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(self._handles)

    @property
    def live(self) -> list[int]:
        """Engines that take requests and weights."""
        return [engine for engine in range(self.engines) if engine not in self._lost]

    @property
    def lost(self) -> dict[int, str]:
        """Engines that are gone, with the reason."""
        return dict(self._lost)

    def handle_of(self, engine: int) -> Handle:
        """An engine's worker."""
        return self._handles[engine]

    def retire(self, engine: int) -> None:
        """Close what is left of a lost engine, so that its room is free."""
        self.waits.leave([self._handles[engine]])
        close_workers([self._handles[engine]])

    def drop(self, engine: int, reason: str) -> None:
        """Send nothing more to an engine that is gone; of several reasons the first counts."""
        self._lost.setdefault(engine, reason)
        self._loads.leave_out(engine)

    def replace(self, engine: int, handle: Handle) -> None:
        """Put a new worker in the place of a lost engine; it is used after `WeightSync.bring_up(engine)`."""
        self.drop(engine, "its replacement has no weights yet")
        self._handles[engine] = handle
        what = f"rollout engine {engine} to state its capabilities"
        call = handle.call("capabilities")
        (self._capabilities[engine],) = self.waits.gather([call], what=what, workers=[handle])
        self._watch(engine, handle)

    def admit(self, engine: int, *, paused: bool = False) -> None:
        """Use an engine again; `paused` lets requests queue up there until `resume`."""
        if paused:
            handle = self._handles[engine]
            call = handle.call("pause", self.pause_mode)
            self.waits.gather([call], what=f"rollout engine {engine} to pause", workers=[handle])
        if self._lost.pop(engine, None) is not None:
            self._loads.admit(engine)

    def receivers_of(self, engine: int) -> int:
        """Transport ranks of one engine."""
        return self._capabilities[engine].receivers

    def devices_of(self, engine: int) -> list[str | None]:
        """The device of each of an engine's transport ranks (see `device_names`); None where it is the CPU."""
        handle = self._handles[engine]
        call = handle.call("device_names")
        what = f"rollout engine {engine} to name its devices"
        (names,) = self.waits.gather([call], what=what, workers=[handle])
        receivers = self.receivers_of(engine)
        return [*names[:receivers], *[None] * (receivers - len(names))]

    @property
    def partial_sync(self) -> PartialSync:
        """What may travel in place of all weights to every engine."""
        kinds = [PARTIAL_SYNCS.index(capabilities.partial_sync) for capabilities in self._capabilities]
        return PARTIAL_SYNCS[min(kinds, default=0)]

    @property
    def adapters(self) -> bool:
        """Whether every engine takes adapters without the weights under them."""
        return all(capabilities.adapters for capabilities in self._capabilities)

    @property
    def takes_images(self) -> bool:
        """Whether requests to every engine may carry images."""
        return all(capabilities.images for capabilities in self._capabilities)

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether requests keep what older weights have computed of them, on every engine."""
        return all(capabilities.keeps_kv_cache for capabilities in self._capabilities)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the first engine has settled of its own options; the others have the same."""
        return self._capabilities[0].settings if self._capabilities else {}

    @property
    def token_scores(self) -> Precision | None:
        """The coarsest numbers in which an engine scores given tokens; None if one of them cannot."""
        coarsest: Precision | None = "float32"
        for capabilities in self._capabilities:
            scores: Precision | None = capabilities.token_scores
            coarsest = None if scores is None or coarsest is None else coarser(coarsest, scores)
        return coarsest if self._capabilities else None

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens that fit into every engine."""
        return min(self._all("max_model_len", what="tell how long a sequence may be"))

    def choose_transport(self, preferred: Sequence[str]) -> str:
        """The first of `preferred` that every engine can join."""
        for kind in preferred:
            if all(kind in capabilities.transports for capabilities in self._capabilities):
                return kind
        offered = sorted(set().union(*(capabilities.transports for capabilities in self._capabilities)))
        raise ConfigError(
            f"the rollout backend can join {', '.join(offered) or 'no weight transport'}, but with this placement "
            f"the weights travel by {' or '.join(preferred)}; choose another backend or `placement.executor`"
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one request on the engine with the fewest samples under way, to its end.

        If the engine dies, the request starts again on another one; what the dead one had sampled of it is not
        used. Once none is left, the replacement (see `replace_with`) is waited for. A request that a failed weight
        sync has ended starts again too: the sync is repeated, or the run ends.

        Engines that cannot let running requests stand still give them up in a pause (`finish_reason="abort"`).
        These samples are continued from the tokens that they have, under the weights of the next version; log-probs
        and versions of the tokens say which weights sampled what. A stop string that falls on the seam is not seen.
        Where penalties count the sampled tokens, these samples start again.

        Raises:
            EngineDiedError: no engine is left and none can be had.
            CapabilityError: the request asks for what the engines do not have.
        """
        if request.sampling.json_schema and not all(one.json_schema for one in self._capabilities):
            # A backend that was written before there were schemas would pass over it.
            raise CapabilityError(
                f"request {request.request_id!r}: the rollout backend keeps samples to no JSON Schema; leave it "
                "out, or use vllm"
            )
        result = await self._generate(request)
        # Samples stay for steps, some for longer than the cluster whose store they came in, which has little room.
        samples = [sample.owned() for sample in result.samples]
        while unfinished := [index for index, sample in enumerate(samples) if sample.finish_reason == "abort"]:
            if request.sampling.counts_sampled:  # to a further request they would be tokens of the prompt
                samples = [_NOTHING if index in unfinished else sample for index, sample in enumerate(samples)]
            rests = [_rest(request, index, samples[index]) for index in unfinished]
            parts = await gather_or_cancel(self._generate(rest) for rest in rests)
            for index, part in zip(unfinished, parts, strict=True):
                samples[index] = _join(samples[index], part.samples[0])
        return replace(result, samples=tuple(samples))

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        while True:
            while len(self._lost) == self.engines:
                await self.waits.clock.in_thread(self._replace_lost)
            try:
                return await self._generate_once(request)
            except EngineDiedError:
                continue
            except StaleWeightsError:  # until the sync has succeeded, or ended the run
                await asyncio.sleep(_STALE_PAUSE_S)

    async def _generate_once(self, request: GenerationRequest) -> GenerationResult:
        engine = self._loads.take(request.n)
        handle = self._handles[engine]
        try:
            return await asyncio.wrap_future(handle.call("generate", request))
        except EngineDiedError as error:
            if self._handles[engine] is handle:  # not replaced meanwhile
                self.drop(engine, str(error))
            raise
        finally:
            self._loads.give_back(engine, request.n)

    def end(self, engine: int, reason: str) -> None:
        """End an engine that stands still: its requests start again elsewhere, and not only once it moves again."""
        self.drop(engine, reason)
        self._handles[engine].end()

    def end_stuck(self) -> bool:
        """End engines that have work while nothing moves anywhere; says whether there is one.

        Their requests start again on other engines, or on replacements.
        """
        stuck = [engine for engine in self.live if self._loads.load(engine)]
        for engine in stuck:
            self.end(engine, "it stood still with samples under way")
        return bool(stuck)

    def replace_with(self, replace_lost: Callable[[], None]) -> None:
        """Say how lost engines are replaced once none is left; without that, the loss of the last ends the run."""
        self._replace_lost = replace_lost

    def _none_left(self) -> None:
        raise EngineDiedError(f"no rollout engine is left: {'; '.join(self._lost.values())}")

    def connect(self, engines: Sequence[int], link: Link) -> list[Any]:
        """Let engines join a weight link; returns futures, in their order."""
        futures, rank = [], 0
        for engine in engines:
            futures.append(self._handles[engine].call("connect", link, rank))
            rank += self._capabilities[engine].receivers
        return futures

    def receive(
        self, engines: Sequence[int], manifest: WeightManifest, check: ProbeCheck | None = None
    ) -> list[Any]:
        """Start receiving on engines; returns futures of LoadReport, in their order."""
        return [self._handles[engine].call("receive_weights", manifest, check) for engine in engines]

    def call(self, engine: int, method: str, *args: Any) -> Any:
        """Start a method of one engine's worker; returns a future."""
        return self._handles[engine].call(method, *args)

    def weight_versions(self) -> list[int]:
        """The version of each engine."""
        return self._all("weight_version", what="tell their weight version")

    @property
    def pause_mode(self) -> PauseMode | None:
        """The way in which all engines can pause: `keep`, else `abort`; None if some can do neither."""
        common = frozenset.intersection(*(capabilities.pause_modes for capabilities in self._capabilities))
        return "keep" if "keep" in common else ("abort" if "abort" in common else None)

    def pause(self) -> None:
        """Stop sampling on all engines; requests continue after `resume`. A dead engine is left out."""
        self._each_live("pause", self.pause_mode)
        self._loads.pause(True)

    def resume(self) -> None:
        """Continue sampling."""
        self._each_live("resume")
        self._loads.pause(False)

    def sleep(self) -> None:
        """Stop sampling, and give the devices' memory back, as far as the backend can; `wake` takes it again."""
        if self.pause_mode is not None:
            self.pause()
        self._each_live("sleep")

    def wake(self) -> None:
        """Take the devices' memory again and continue sampling."""
        self._each_live("wake")
        if self.pause_mode is not None:
            self.resume()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """A block that needs samples, and the reward models that score them as they come."""
        with self.devices.at_work(ROLLOUT, *self._scorers):
            yield

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which an engine had no work or was paused: the mean over engines."""
        return self._loads.take_idle_seconds()

    def close(self) -> None:
        """Close all engines."""
        self.waits.leave(self._handles)
        close_workers(self._handles)

    def _watch(self, engine: int, handle: Handle) -> None:
        def lost(error: EngineDiedError) -> None:
            if self._handles[engine] is handle:
                self.drop(engine, str(error))

        self.waits.watch([handle], lost)

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        what = f"{len(self.live)} rollout engine(s) to {what}"
        handles = [self._handles[engine] for engine in self.live]
        return self.waits.call_all(handles, method, *args, what=what)

    def _each_live(self, method: str, *args: Any) -> None:
        """Call a method of every live engine and note those that are dead."""
        calls = {engine: self._handles[engine].call(method, *args) for engine in self.live}
        for engine, call in calls.items():
            try:
                self.waits.gather(
                    [call], what=f"rollout engine {engine} to {method}", workers=[self._handles[engine]]
                )
            except WorkerLostError:
                raise
            except EngineDiedError as error:
                self.drop(engine, str(error))
            except DeadlineExceeded:  # it stands still or is cut off; the run goes on without it
                self.drop(engine, f"it did not {method} when it was asked to")
                self._handles[engine].end()


_NOTHING = Sample(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")


def _rest(request: GenerationRequest, index: int, sample: Sample) -> GenerationRequest:
    """A request for what is missing of one sample, with a new seed: the first would draw the first tokens again."""
    name = f"{request.request_id}+{index}.{sample.length}"
    return replace(
        request,
        request_id=name,
        prompt_token_ids=request.prompt_token_ids + sample.token_ids,
        sampling=replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - sample.length,
            min_tokens=max(0, request.sampling.min_tokens - sample.length),
        ),
        n=1,
        seed=None if request.seed is None else request_seed(request.seed, name),
    )


def _join(first: Sample, rest: Sample) -> Sample:
    return Sample(
        token_ids=first.token_ids + rest.token_ids,
        log_probs=first.log_probs + rest.log_probs,
        weight_versions=first.weight_versions + rest.weight_versions,
        finish_reason=rest.finish_reason,
    )
