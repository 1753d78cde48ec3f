"""The virtual clock: one thing at a time, no time lost, and every standstill found."""

import asyncio
from concurrent.futures import Future

import pytest
from rlhf_launch.simulation.clock import Deadlock, VirtualClock


def test_a_year_passes_at_once():
    clock = VirtualClock()

    def work():
        clock.wait([], 365 * 86400)
        return clock.now()

    assert clock.run(work) == pytest.approx(365 * 86400)


def test_a_wait_ends_with_its_first_future_and_not_before():
    clock = VirtualClock()

    def work():
        first, second = Future(), Future()
        clock.loop.call_later(7, second.set_result, "there")
        clock.wait([first, second], 100)
        assert (clock.now(), second.done(), first.done()) == (7, True, False)
        clock.wait([first], 5)
        return clock.now()

    assert clock.run(work) == 12


def test_coroutines_and_blocking_code_take_turns_in_the_same_order_every_time():
    def once():
        clock, heard = VirtualClock(), []

        async def talker(name, pause):
            for _ in range(3):
                await asyncio.sleep(pause)
                heard.append((clock.now(), name))

        def work():
            thread = clock.loop_thread("talkers")
            calls = [thread.start(talker("a", 2)), thread.start(talker("b", 3))]
            for _ in range(4):
                clock.wait([], 1.5)
                heard.append((clock.now(), "main"))
            clock.wait(calls, 100)
            thread.close()

        clock.run(work)
        return heard

    heard = once()
    assert heard == sorted(heard, key=lambda entry: entry[0])
    assert {name for _, name in heard} == {"a", "b", "main"}
    assert heard == once()


def test_a_lock_is_passed_on_while_its_owners_wait():
    clock, held = VirtualClock(), []
    lock = clock.lock()

    def owner(name):
        def work():
            with lock:
                held.append((name, clock.now()))
                clock.wait([], 10)

        return work

    async def beside():
        await asyncio.gather(clock.in_thread(owner("first")), clock.in_thread(owner("second")))

    def main():
        thread = clock.loop_thread("owners")
        clock.wait([thread.start(beside())], 100)

    clock.run(main)
    assert held == [("first", 0.0), ("second", 10.0)]


def test_who_waits_for_what_can_never_happen_is_named():
    clock = VirtualClock()
    with pytest.raises(Deadlock, match=r"main waits for 1 call\(s\)"):
        clock.run(lambda: clock.wait([Future()], float("inf")))


def test_an_error_of_the_blocking_code_is_raised():
    def fail():
        raise ValueError("so it is")

    with pytest.raises(ValueError, match="so it is"):
        VirtualClock().run(fail)


def test_closing_a_thread_cancels_its_coroutines_and_no_others():
    clock, ended = VirtualClock(), []

    async def sleeper(name):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append((name, clock.now()))

    def work():
        one, other = clock.loop_thread("one"), clock.loop_thread("other")
        one.start(sleeper("one"))
        left = other.start(sleeper("other"))
        clock.wait([], 5)
        one.close()
        assert not one.running
        clock.wait([left], 5000)

    clock.run(work)
    assert ended == [("one", 5.0), ("other", 1000.0)]
