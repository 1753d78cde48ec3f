"""Runs that are asked to end before their last step."""

import os
import signal
import threading
import time

import pytest
from rlhf_core import RunStopped, StopRequest


def send(number, delay_s=0.0):
    """Send this process a signal, after a while."""
    threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()


def test_the_first_reason_counts():
    stop = StopRequest()
    stop.check()
    assert stop.reason is None
    stop.ask("the budget is spent", exit_code=3)
    stop.ask("something else")
    assert stop.reason == "the budget is spent"
    with pytest.raises(RunStopped, match="the budget is spent") as caught:
        stop.check()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_a_wait_at_once(number, code):
    stop = StopRequest()
    begin = time.monotonic()
    send(number, 0.3)
    with pytest.raises(RunStopped, match=number.name) as caught, stop.on_signals(), stop.interruptible():
        threading.Event().wait(600)
    assert time.monotonic() - begin < 300
    assert caught.value.exit_code == code


def test_work_goes_on_to_its_boundary():
    stop, said, done = StopRequest(), [], []

    def run():
        with stop.on_signals(said.append):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("step")
            stop.check()
            done.append("next step")

    with pytest.raises(RunStopped):
        run()
    assert done == ["step"]
    assert said == ["SIGTERM: the run ends after this step, with a checkpoint; again ends it at once"]


def test_no_wait_begins_after_the_request():
    stop = StopRequest()
    stop.ask("enough")
    with pytest.raises(RunStopped), stop.interruptible():
        pytest.fail("the wait began")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_work(number):
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_notice_before_the_end_may_come_twice():
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.reason == "SIGUSR1 was received"


def test_the_handlers_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_take_no_signals():
    stop = StopRequest()
    before, found = signal.getsignal(signal.SIGTERM), []

    def run():
        with stop.on_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]
