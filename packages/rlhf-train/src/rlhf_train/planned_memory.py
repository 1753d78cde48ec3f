"""What a rank of the engine will hold, before there is one: sharded states, and passes with what they gather.

The sizes of DeepSpeed's buffers follow `runtime/zero/stage3.py`, `stage_1_and_2.py` and
`partitioned_param_coordinator.py` of DeepSpeed 0.19; `benchmarks/plan_memory.py` holds them against real peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_core import EngineConfig, ImaginedPass, Moment, ParameterSize

from rlhf_train.config.options import ZeroConfig

_REUSE_ELEMENTS = 1_000_000_000
"""Parameters that are used again within so many elements stay gathered (`stage3_max_reuse_distance`)."""
_GROUP_ELEMENTS = 1_000_000_000
"""Elements that the optimizer updates at a time (`sub_group_size`)."""
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStates:
    """Bytes of one rank that last from step to step, on the device or, where offloaded, on the host."""

    parameters: int
    gradients: int
    optimizer: int
    """Moments and float32 master weights."""
    buckets: int
    """Buffers for the reduction of gradients."""
    update: int
    """What the optimizer's update needs for a moment, beside no activations."""
    host: int = 0
    """What of all this is in host memory instead."""

    @property
    def device(self) -> int:
        """Bytes on the device between steps."""
        return self.parameters + self.gradients + self.optimizer + self.buckets


def planned_states(config: EngineConfig, parameters: Sequence[ParameterSize], *, ranks: int) -> PlannedStates:
    """The lasting memory of a rank among `ranks`.

    Args:
        config: of the engine.
        parameters: of the model at full size.
        ranks: of the engine; those that share rows (sequence parallel ones) shard together, too.
    """
    zero = ZeroConfig.of(config)
    sliced = max(1, zero.autotp_size)
    sizes = [_sliced(one, sliced) for one in parameters]
    ranks = max(1, ranks // sliced)
    width = _SIZES[config.dtype]
    held = sum(_held(one, zero, ranks) for one in sizes)
    if not config.trained:
        return _settled(zero, parameters=held, gradients=0, optimizer=0, buckets=0, update=0)
    trained = [one for one in sizes if one.trained]
    elements = sum(one.elements for one in trained)
    # Stages 1 and up keep master weights, in float32 beside 32-bit ones, too.
    mine = elements if zero.stage == 0 else -(-elements // ranks)
    masters = 4 * mine if zero.stage or width < 4 else 0
    moments = (4 if config.optimizer is not None and config.optimizer.kind == "muon" else 8) * mine
    accumulated = 4 if config.dtype == "float32" else _SIZES[zero.accumulate_dtype]
    gradients = (elements if zero.stage < 2 else mine) * accumulated
    bucket = min(zero.reduce_bucket_size, elements) * width if zero.stage else 0
    # The flat copy of a group's gradients, in the type of the master weights.
    update = 4 * min(mine, _GROUP_ELEMENTS) if zero.stage else 0
    return _settled(
        zero,
        parameters=held,
        gradients=gradients,
        optimizer=masters + moments,
        buckets=bucket,
        update=update,
    )


def _settled(
    zero: ZeroConfig, *, parameters: int, gradients: int, optimizer: int, buckets: int, update: int
) -> PlannedStates:
    host = 0
    if zero.offload_optimizer:
        # The host has the gradients of the update, too; they pass through the device one bucket at a time.
        host += optimizer + gradients
        optimizer, gradients, update = 0, 0, 0
    if zero.offload_parameters:
        host += parameters
        parameters = 0
    return PlannedStates(
        parameters=parameters, gradients=gradients, optimizer=optimizer, buckets=buckets, update=update, host=host
    )


def _sliced(one: ParameterSize, ways: int) -> ParameterSize:
    """What tensor parallelism leaves of a matrix; vectors stay whole."""
    if ways == 1 or one.elements < 1 << 16:
        return one
    return replace(
        one, elements=one.elements // ways, bytes=one.bytes // ways, values_bytes=one.values_bytes // ways
    )


def _held(one: ParameterSize, zero: ZeroConfig, ranks: int) -> int:
    if zero.stage < 3:
        return one.bytes
    shard = -(-one.bytes // ranks)
    if one.elements <= zero.param_persistence_threshold:
        return one.bytes + shard  # the whole of it, and its shard
    return shard + (one.bytes // zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else 0)


def pass_peak(
    config: EngineConfig,
    parameters: Sequence[ParameterSize],
    done: ImaginedPass,
    *,
    head: Sequence[int],
    ranks: int,
) -> int:
    """Most bytes of a pass beside the lasting ones: what its tensors take, and under ZeRO-3 what is gathered then.

    The gathered parameters are followed from call to call: a module's are there while it runs, those that come next
    are fetched ahead, those that are needed again soon stay, and the head's stay to the end.

    Args:
        config: of the engine.
        parameters: of the model at full size.
        done: the pass.
        head: places of the head's parameters.
        ranks: of the engine.
    """
    zero = ZeroConfig.of(config)
    beside = 0
    if config.trained and zero.stage and _SIZES[config.dtype] < _SIZES[zero.reduce_dtype]:
        elements = sum(one.elements for one in parameters if one.trained)
        beside = min(zero.reduce_bucket_size, elements) * _SIZES[zero.reduce_dtype]
    # A layer of 4-bit codes makes values of them whenever it is used, forwards and backwards.
    beside += max((one.values_bytes for one in parameters), default=0)
    if zero.stage < 3 or (ranks == 1 and not zero.offload_parameters):
        # The shard of a single rank is the whole parameter, which DeepSpeed uses where it lies.
        return done.peak + beside
    return _Gathered(zero, parameters, done.moments, head).peak() + beside


class _Gathered:
    """Follows which parameters are gathered at each moment of a pass."""

    def __init__(
        self, zero: ZeroConfig, parameters: Sequence[ParameterSize], moments: Sequence[Moment], head: Sequence[int]
    ) -> None:
        self._zero, self._parameters, self._moments = zero, parameters, moments
        self._head = {place for place in head if not self._persistent(place)}
        self._most_live = zero.most_live(sum(parameters[place].elements for place in head))
        self._calls = [place for place, moment in enumerate(moments) if moment.begins and moment.used]

    def _persistent(self, place: int) -> bool:
        return self._parameters[place].elements <= self._zero.param_persistence_threshold

    def peak(self) -> int:
        """Most bytes of a moment's tensors and of what is gathered then."""
        there: set[int] = set(self._head)
        most, call = 0, -1
        for moment in self._moments:
            used = {place for place in moment.used if not self._persistent(place)}
            fetched = 0
            if moment.begins:
                call += bool(moment.used)
                ahead = self._ahead(call, there | used)
                fetched = self._bytes((used | ahead) - there)
                there |= used | ahead
            # What is fetched together arrives in one buffer and is then cut into parameters.
            several = fetched if moment.begins and len(used) > 1 else 0
            most = max(most, moment.peak + self._bytes(there) + several)
            if not moment.begins:
                there -= used - self._soon(call) - self._head
        return most

    def _ahead(self, call: int, there: set[int]) -> set[int]:
        """The parameters of the next calls, as many as are fetched ahead."""
        found: set[int] = set()
        room = min(
            self._zero.prefetch_bucket_size,
            self._most_live - sum(self._parameters[place].elements for place in there),
        )
        for place in self._calls[call + 1 :]:
            for used in self._moments[place].used:
                if used in there or used in found or self._persistent(used):
                    continue
                room -= self._parameters[used].elements
                if room < 0:
                    return found
                found.add(used)
        return found

    def _soon(self, call: int) -> set[int]:
        """The parameters that are used again within the distance of reuse."""
        found: set[int] = set()
        room = _REUSE_ELEMENTS
        for place in self._calls[call + 1 :]:
            if room <= 0:
                break
            found |= set(self._moments[place].used)
            room -= sum(self._parameters[used].elements for used in self._moments[place].used)
        return found

    def _bytes(self, places: set[int]) -> int:
        return sum(self._parameters[place].bytes for place in places)
