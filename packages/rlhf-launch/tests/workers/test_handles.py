import asyncio
import threading
import time
from concurrent.futures import Future

import pytest
from rlhf_core import EngineDiedError
from rlhf_launch.workers.handles import LocalHandle, close_workers


class Worker:
    def __init__(self):
        self.thread = threading.current_thread().name
        self.gate = asyncio.Event()
        self.closed = 0

    def where(self):
        return self.thread, threading.current_thread().name

    def fail(self):
        raise KeyError("the first cause")

    async def wait_for_gate(self):
        await self.gate.wait()
        return "through"

    async def open_gate(self):
        self.gate.set()

    def close(self):
        self.closed += 1


@pytest.fixture
def handle():
    handle = LocalHandle("worker", Worker)
    yield handle
    close_workers([handle])


def test_the_worker_lives_on_its_own_thread(handle):
    assert handle.call("where").result(5) == ("worker", "worker")


def test_coroutines_of_one_worker_interleave(handle):
    waiting = handle.call("wait_for_gate")
    handle.call("open_gate").result(5)
    assert waiting.result(5) == "through"


def test_a_failing_constructor_shows_in_ready_and_in_calls():
    def broken():
        raise ValueError("no such model")

    handle = LocalHandle("worker", broken)
    with pytest.raises(ValueError, match="no such model"):
        handle.ready().result(5)
    with pytest.raises(ValueError, match="no such model"):
        handle.call("where").result(5)
    close_workers([handle])


def test_a_call_under_way_ends_when_the_worker_is_closed(handle):
    waiting = handle.call("wait_for_gate")
    close_workers([handle])
    with pytest.raises(EngineDiedError, match="closed during wait_for_gate"):
        waiting.result(5)


def test_close_twice(handle):
    close_workers([handle])
    close_workers([handle])


class NeverIdle:
    """A handle of a worker that does not come to its close."""

    def __init__(self, name):
        self.name, self.ended = name, False

    def begin_close(self):
        return Future()

    def end(self):
        self.ended = True


def test_workers_that_are_busy_share_one_deadline(handle):
    busy = [NeverIdle(f"rank-{rank}") for rank in range(64)]
    begin = time.monotonic()
    close_workers([*busy, handle], timeout_s=2)
    assert time.monotonic() - begin < 64 * 2
    assert all(worker.ended for worker in busy)
    with pytest.raises(EngineDiedError, match="worker is closed; where was called"):
        handle.call("where")
