"""Waits that last while something moves, end at a standstill, and hear of every lost worker."""

import logging
import threading
import time
from concurrent.futures import Future

import pytest
from rlhf_core import DeadlineExceeded, EngineDiedError, note_progress
from rlhf_launch.workers.handles import LocalHandle, close_workers, finished
from rlhf_launch.workers.pulse import Pulse, attended
from rlhf_launch.workers.waits import Waits, WorkerLostError


class Worker:
    """Fails, hangs until an event, or works on for a while."""

    def __init__(self):
        self.event = threading.Event()

    def fail(self):
        raise KeyError("the first cause")

    def hang(self):
        self.event.wait(600)

    def work(self, seconds, unit="rows"):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            note_progress(unit)
            time.sleep(0.02)
        return "done"

    def close(self):
        pass


class Remote:
    """A worker elsewhere: its pulse says what it is told to say."""

    def __init__(self, name="policy-0"):
        self.name, self.rows, self.dead, self.silent = name, 0, False, False

    def call(self, method, *args):
        return Future()

    def pulse(self):
        if self.dead:
            raise EngineDiedError(f"{self.name} died during step: its node was lost")
        doing = Pulse(progress={"rows": self.rows}, doing="step since 7 s", stack="engine.py:12 step")
        return Future() if self.silent else finished(doing)


@pytest.fixture
def make_handle():
    handles = []

    def make(name="worker"):
        handles.append(LocalHandle(name, Worker))
        return handles[-1]

    yield make
    for handle in handles:
        handle.ready().result(5).event.set()
    close_workers(handles)


def test_results_come_in_the_order_of_the_calls(make_handle):
    one, two = make_handle("one"), make_handle("two")
    calls = [one.call("work", 0.2), two.call("work", 0.0)]
    assert Waits().gather(calls, what="two calls", workers=[one, two]) == ["done", "done"]


def test_the_first_failure_is_raised_without_waiting_for_the_rest(make_handle):
    one, two = make_handle("one"), make_handle("two")
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the first cause"):
        Waits().gather([one.call("hang"), two.call("fail")], what="two calls")
    assert time.monotonic() - begin < 300


def test_a_standstill_ends_the_wait_and_says_where_the_late_worker_stands(make_handle):
    handle, waits = make_handle(), Waits(0.4)
    waits.watch([handle])
    with pytest.raises(DeadlineExceeded) as caught:
        waits.gather([handle.call("hang")], what="the worker to wake up", workers=[handle])
    message = str(caught.value)
    assert "nothing has moved for 0." in message
    assert "while waiting for the worker to wake up" in message
    assert "worker: hang since 0 s" in message
    assert "test_waits.py" in message  # the line that it stands at
    assert "placement.timeout_s" in message


def test_long_work_is_not_ended_while_it_moves(make_handle):
    handle, waits = make_handle(), Waits(0.3)
    waits.watch([handle])
    assert waits.gather([handle.call("work", 1.5)], what="long work", workers=[handle]) == ["done"]


def test_what_others_get_done_does_not_keep_a_wait_alive():
    stuck, busy = Remote("policy-0"), Remote("rollout-0")
    waits = Waits(0.4)
    waits.watch([stuck, busy])
    thread = threading.Thread(target=move, args=(busy, 3.0), daemon=True)
    thread.start()
    standing = r"policy-0: step since 7 s; done so far: nothing; at engine\.py:12 step"
    with pytest.raises(DeadlineExceeded, match=standing):
        waits.gather([stuck.call("step")], what="a step", workers=[stuck])


def test_a_wait_for_no_one_by_name_lasts_while_anyone_moves():
    engine, waits = Remote("rollout-0"), Waits(0.4)
    waits.watch([engine], lambda error: None)
    answer = Future()
    thread = threading.Thread(target=lambda: (move(engine, 1.2), answer.set_result("groups")), daemon=True)
    thread.start()
    assert waits.gather([answer], what="samples") == ["groups"]


def move(worker, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        worker.rows += 1
        time.sleep(0.05)


def test_whoever_waits_hears_of_a_lost_rank_that_it_does_not_wait_for():
    critic, waits = Remote("critic-1"), Waits(300)
    waits.watch([critic])
    critic.dead = True
    with pytest.raises(WorkerLostError, match="critic-1 is lost: critic-1 died during step: its node was lost"):
        waits.gather([Future()], what="samples")
    with pytest.raises(WorkerLostError, match="critic-1 is lost"):  # and so does everyone after
        waits.gather([Future()], what="weights")


def test_the_loss_of_an_engine_is_told_to_its_pool_and_ends_no_wait():
    engine, waits, lost = Remote("rollout-1"), Waits(1.0), []
    waits.watch([engine], lost.append)
    engine.dead = True
    with pytest.raises(DeadlineExceeded):
        waits.gather([Future()], what="samples")
    assert [str(error) for error in lost] == ["rollout-1 died during step: its node was lost"]


def test_a_worker_that_is_being_closed_is_not_missed():
    rank, waits = Remote(), Waits(0.6)
    waits.watch([rank])
    rank.dead = True
    waits.leave([rank])
    with pytest.raises(DeadlineExceeded):
        waits.gather([Future()], what="something else")


def test_a_peer_of_a_dead_rank_fails_first_and_the_dead_one_is_named():
    dead, peer, waits = Remote("policy-1"), Remote("policy-0"), Waits(60)
    waits.watch([dead, peer])
    dead.dead = True
    broken = Future()
    broken.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:40112"))
    with pytest.raises(WorkerLostError, match="policy-1 is lost") as caught:
        waits.gather([broken, Future()], what="a step", workers=[peer, dead])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_with_all_workers_alive_is_raised_as_it_is():
    one, two, waits = Remote("policy-0"), Remote("policy-1"), Waits(300)
    waits.watch([one, two])
    broken = Future()
    broken.set_exception(RuntimeError("shapes do not match"))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="shapes do not match"):
        waits.gather([broken, Future()], what="a step", workers=[one, two])
    assert time.monotonic() - begin < 300


def test_another_thread_may_end_every_wait():
    waits = Waits(60)
    threading.Timer(0.2, lambda: waits.fail(WorkerLostError("the cluster is gone"))).start()
    with pytest.raises(WorkerLostError, match="the cluster is gone"):
        waits.gather([Future()], what="samples")


def test_a_standstill_is_reported_before_it_ends_the_wait(caplog):
    rank, waits = Remote(), Waits(1.6, report_s=0.3)
    rank.silent = True
    waits.watch([rank])
    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineExceeded):
        waits.gather([rank.call("step")], what="a step", workers=[rank])
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 3  # at every doubling
    assert "while waiting for a step; the run gives up at 2 s" in lines[0]
    assert "policy-0 has not answered yet" in lines[0]


def test_settling_takes_failures_as_ends():
    failed = Future()
    failed.set_exception(KeyError("x"))
    begin = time.monotonic()
    Waits().settle([failed], at_most_s=300)
    Waits().settle([failed, Future()], at_most_s=0.1)
    assert time.monotonic() - begin < 300


class Async:
    """Says hello, slowly."""

    def __init__(self, name):
        self.name = name

    async def hello(self):
        return f"hello {self.name}", self.pulse().doing

    def plain(self, *, loud):
        return self.name.upper() if loud else self.pulse().doing


def test_an_attended_worker_tells_what_it_is_doing():
    import asyncio

    worker = attended(Async)("you")
    assert worker.pulse().doing == "nothing"
    assert asyncio.run(worker.hello()) == ("hello you", "hello since 0 s")
    assert worker.plain(loud=True) == "YOU"
    assert worker.plain(loud=False) == "plain since 0 s"
    assert worker.pulse().doing == "nothing"
    before = worker.pulse().progress.get("greetings", 0)
    note_progress("greetings", 3)
    assert worker.pulse().progress["greetings"] == before + 3
