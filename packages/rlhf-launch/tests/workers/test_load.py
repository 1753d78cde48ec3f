import threading
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st
from rlhf_launch.workers.load import EngineLoads, IdleTime

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=400)


@given(size=st.integers(1, 7), steps=STEPS)
def test_it_always_takes_what_a_full_search_would(size, steps):
    engines, loads, taken = EngineLoads(size), [0] * size, []
    for take, work in steps:
        if take or not taken:
            index = engines.take(work)
            assert index == loads.index(min(loads))
            loads[index] += work
            taken.append((index, work))
        else:
            index, work = taken.pop(0)
            engines.give_back(index, work)
            loads[index] -= work
        assert [engines.load(i) for i in range(size)] == loads


def test_the_heap_does_not_grow_without_end():
    engines = EngineLoads(3)
    for _ in range(10_000):
        engines.give_back(engines.take(2), 2)
    assert len(engines._heap) < 100


def test_threads_may_share_it():
    engines = EngineLoads(4)

    def work():
        for _ in range(2000):
            engines.give_back(engines.take(1), 1)

    def lose_and_admit():
        for _ in range(500):
            engines.leave_out(3)
            engines.admit(3)

    threads = [threading.Thread(target=run) for run in (work, work, work, lose_and_admit)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [engines.load(engine) for engine in range(4)] == [0, 0, 0, 0]
    assert {engines.take(1) for _ in range(4)} == {0, 1, 2, 3}  # none was forgotten


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_mean_over_engines_of_the_time_without_work():
    clock = Clock()
    loads = EngineLoads(2, clock=clock)
    clock.now = 1.0  # both idle
    assert loads.take(3) == 0
    clock.now = 3.0  # the second idle
    assert [loads.take(1), loads.take(1)] == [1, 1]
    clock.now = 4.0  # none
    loads.give_back(1, 1)
    clock.now = 5.0  # still none
    assert loads.take_idle_seconds() == (2 * 1 + 1 * 2) / 2
    loads.give_back(1, 1)
    clock.now = 6.0
    assert loads.take_idle_seconds() == 0.5


def test_paused_engines_are_idle_whatever_they_have():
    clock = Clock()
    loads = EngineLoads(1, clock=clock)
    loads.take(1)
    clock.now = 2.0
    loads.pause(True)
    clock.now = 5.0
    loads.pause(False)
    clock.now = 6.0
    assert loads.take_idle_seconds() == 3.0


def test_a_role_is_idle_while_none_of_its_ranks_has_a_call():
    clock = Clock()
    idle, calls = IdleTime(clock), [Future(), Future()]
    clock.now = 1.0
    idle.begin(calls)
    clock.now = 3.0
    calls[0].set_result(None)
    clock.now = 4.0  # one rank is still at work
    calls[1].set_exception(ValueError())
    clock.now = 6.0
    assert idle.take_idle_seconds() == 1.0 + 2.0
    done = Future()
    done.set_result(None)
    idle.begin([done])  # it was over before anyone looked
    clock.now = 7.0
    assert idle.take_idle_seconds() == 1.0
