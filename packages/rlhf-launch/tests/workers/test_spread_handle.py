"""An engine over several hosts as one worker: real workers in threads, whose starts, deaths and ends are seen."""

import asyncio

import pytest
from rlhf_core import EngineDiedError
from rlhf_launch.workers.handles import LocalHandle, close_workers
from rlhf_launch.workers.spread_handle import SpreadHandle
from rlhf_launch.workers.waits import WorkerLostError

S = 30


class Engine:
    def __init__(self, events):
        self.events = events

    async def meeting(self):
        return "10.0.0.1:77"

    async def start(self, meeting):
        self.events.append(("engine", meeting))
        return 1.5

    async def add(self, a, b):
        return a + b

    async def stand_still(self):
        await asyncio.sleep(600)

    async def close(self):
        self.events.append("engine closed")


class Part:
    def __init__(self, events, fails=None):
        self.events, self.fails = events, fails
        self.died = asyncio.Event()
        self.error = None

    async def start(self, meeting):
        self.events.append(("part", meeting))
        if self.fails is not None:
            raise self.fails

    async def wait(self):
        await self.died.wait()
        if self.error is not None:
            raise self.error

    async def close(self):
        self.died.set()
        self.events.append("part closed")

    async def die(self, error):
        self.error = error
        self.died.set()


def spread(fails=None):
    events = []
    main = LocalHandle("rollout-0", lambda: Engine(events))
    part = LocalHandle("rollout-0.1", lambda: Part(events, fails))
    return SpreadHandle(main, [part]), part, events


def test_the_parts_start_where_the_engine_says_and_close_with_it():
    handle, _, events = spread()
    assert handle.call("start").result(S) == 1.5
    assert handle.call("add", 1, b=2).result(S) == 3
    close_workers([handle])
    meeting = "10.0.0.1:77"
    assert set(events) == {("engine", meeting), ("part", meeting), "engine closed", "part closed"}


def test_the_death_of_a_part_is_that_of_the_engine_whatever_it_waits_for():
    handle, part, _ = spread()
    handle.call("start").result(S)
    waiting = handle.call("stand_still")
    part.call("die", EngineDiedError("worker process VllmWorker-1 was killed by signal 9 (SIGKILL)")).result(S)
    message = r"rollout-0 has lost its part rollout-0\.1: worker process VllmWorker-1 was killed by signal 9"
    with pytest.raises(EngineDiedError, match=message):
        waiting.result(S)
    with pytest.raises(EngineDiedError, match=message):
        handle.call("add", 1, 2).result(S)
    with pytest.raises(EngineDiedError, match=message):
        handle.pulse()
    close_workers([handle])


def test_what_is_no_death_of_the_part_keeps_its_name():
    handle, part, _ = spread()
    handle.call("start").result(S)
    waiting = handle.call("stand_still")
    part.call("die", WorkerLostError("Ray's head is gone")).result(S)
    with pytest.raises(WorkerLostError, match=r"^Ray's head is gone$"):
        waiting.result(S)
    close_workers([handle])


def test_a_part_that_does_not_start_fails_the_start_of_the_engine():
    handle, _, _ = spread(fails=EngineDiedError("no memory"))
    handle.call("start")  # the engine itself may be up before
    with pytest.raises(EngineDiedError, match=r"lost its part rollout-0\.1: no memory"):
        handle.call("stand_still").result(S)
    handle.end()


def test_an_end_is_no_loss():
    handle, _, _ = spread()
    handle.call("start").result(S)
    handle.end()
    handle.end()
    assert handle._lost is None
