"""Coroutines on threads of their own: under a running event loop too, and with nothing left behind."""

import asyncio
import os
import signal
import threading
import time

import pytest
from rlhf_launch.workers.coroutines import LoopThread
from rlhf_launch.workers.waits import Waits


@pytest.fixture
def interruptible():
    """SIGINT raises, also where the tests were started in the background and inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def answer(value=42):
    await asyncio.sleep(0)
    return value


async def fail():
    raise KeyError("the first cause")


def run(work):
    return Waits().run(work, what="a coroutine")


def threads():
    return {thread.name for thread in threading.enumerate()}


def test_a_result_and_an_error_come_back():
    assert run(answer()) == 42
    with pytest.raises(KeyError, match="the first cause"):
        run(fail())
    assert "coroutine" not in threads()


def test_it_works_while_an_event_loop_is_running():
    async def cell():
        return run(answer())

    assert asyncio.run(cell()) == 42


def test_it_may_be_nested():
    async def outer():
        return run(answer(1)) + 1

    assert run(outer()) == 2


def test_an_interrupt_ends_the_coroutine_too(interruptible):
    ended = threading.Event()

    async def endless():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(endless())
    assert ended.is_set()
    assert "coroutine" not in threads()


def test_closing_ends_what_is_under_way_and_may_be_done_twice():
    thread = LoopThread("worker")
    future = thread.start(asyncio.sleep(60))
    thread.close()
    thread.close()
    assert future.cancelled()
    assert not thread.running


def test_a_blocked_thread_is_left_behind(caplog):
    thread, released = LoopThread("blocked"), threading.Event()

    async def block():
        released.wait(600)

    thread.start(block())
    begin = time.monotonic()
    thread.close(timeout_s=0.2)
    assert time.monotonic() - begin < 300
    assert not thread.running
    assert "the thread blocked is blocked and cannot be ended" in caplog.text
    released.set()
