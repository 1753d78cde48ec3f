"""A guard ends what stands still, for a reason, once, and leaves the rest alone."""

import threading
import time

import pytest
from rlhf_core import DeadlineExceeded, WeightSyncError
from rlhf_core.weight_sync.transports.guard import TransferGuard


class Work:
    """Ends when it is told to, or when its group is aborted."""

    def __init__(self):
        self.ended = threading.Event()

    def is_completed(self):
        return self.ended.is_set()


class Group:
    def __init__(self, works, *, fails=False):
        self.works, self.fails, self.aborts = works, fails, []

    def abort(self):
        self.aborts.append(threading.current_thread().name)
        for work in self.works:
            work.ended.set()
        if self.fails:
            raise RuntimeError("peers are gone")


def guard(group, *, given_up=lambda: False, timeout_s=30.0):
    return TransferGuard("fake link", group.abort, given_up, timeout_s=timeout_s)


def test_a_transfer_that_ends_is_left_alone():
    work = Work()
    group = Group([work])
    watching = guard(group, timeout_s=0.1)
    watching.watch(work)
    work.ended.set()
    watching.wait(work)
    time.sleep(0.3)  # three deadlines
    assert group.aborts == []
    watching.check()
    watching.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_transfer_that_stands_still_is_ended_from_another_thread(fails):
    works = [Work(), Work()]
    group = Group(works, fails=fails)
    watching = guard(group, timeout_s=0.2)
    for work in works:
        watching.watch(work)
    # As a thread that waits for the device, where no deadline is looked at.
    assert works[0].ended.wait(20)
    for work in works:
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for receivers.*fake link"):
            watching.wait(work)
    assert group.aborts == ["weight-link-guard"]
    with pytest.raises(DeadlineExceeded):
        watching.check()
    watching.close()


def test_a_released_sender_does_not_wait_for_the_deadline():
    work, released = Work(), threading.Event()
    group = Group([work])
    watching = guard(group, given_up=released.is_set)
    watching.watch(work)
    released.set()
    with pytest.raises(WeightSyncError, match="over the fake link was given up"):
        watching.wait(work)
    assert len(group.aborts) == 1
    watching.close()


def test_notes_out_of_reach_leave_the_deadline():
    def unreachable():
        raise WeightSyncError("the store is gone")

    work = Work()
    group = Group([work])
    watching = guard(group, given_up=unreachable, timeout_s=0.6)
    watching.watch(work)
    with pytest.raises(DeadlineExceeded):
        watching.wait(work)
    watching.close()


def test_a_closed_guard_holds_and_ends_nothing():
    work = Work()
    group = Group([work])
    watching = guard(group, timeout_s=0.1)
    watching.watch(work)
    watching.close()
    time.sleep(0.3)
    assert group.aborts == []
    assert watching._abort.__name__ == "_nothing"
    assert watching._works == []
