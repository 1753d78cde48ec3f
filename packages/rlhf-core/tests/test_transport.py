"""Links: local between threads, gloo between processes, deadlines and misuse."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from rlhf_core import ConfigError, DeadlineExceeded, Link, WeightSyncError, join, open_sender

RECEIVER = """
import sys, torch
from rlhf_core import Link, join
link = Link(kind="gloo", address=sys.argv[1], receivers=2, timeout_s=60)
receiver = join(link, int(sys.argv[2]))
flat = torch.empty(1000, dtype=torch.uint8)
for _ in range(3):
    receiver.receive(flat)
    print(int(flat.sum()), flush=True)
receiver.close()
receiver.close()
"""


def buffer(value: int, size: int = 16) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def in_thread(function, *args):
    """Run beside the test; returns the thread and the list that gets the result or the error."""
    outcome = []

    def work():
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


def test_gloo_between_processes():
    sender = open_sender("gloo", receivers=2, timeout_s=60)
    command = [sys.executable, "-c", RECEIVER, sender.link.address]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        sender.accept()
        for value in (1, 2, 3):
            sender.send(buffer(value, 1000)).wait()
        assert [process.communicate(timeout=60)[0].split() for process in processes] == [
            ["1000", "2000", "3000"]
        ] * 2
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        sender.close()
        sender.close()
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kind", ["local", "gloo"])
def test_between_threads(kind):
    sender = open_sender(kind, receivers=1, timeout_s=20)

    def receive():
        receiver = join(sender.link, 0)
        flat = torch.empty(16, dtype=torch.uint8)
        sums = []
        for _ in range(3):
            receiver.receive(flat)
            sums.append(int(flat.sum()))
        return sums

    thread, outcome = in_thread(receive)
    sender.accept()
    for value in (1, 2, 3):
        sender.send(buffer(value)).wait()
    thread.join(20)
    assert outcome == [[16, 32, 48]]
    sender.close()


def test_two_links_do_not_disturb_each_other():
    first, second = (open_sender("gloo", receivers=1, timeout_s=20) for _ in range(2))
    assert first.link.address != second.link.address
    flats = [torch.empty(16, dtype=torch.uint8) for _ in range(2)]
    threads = [
        in_thread(lambda link=s.link, flat=flat: join(link, 0).receive(flat))[0]
        for s, flat in zip((first, second), flats, strict=True)
    ]
    for sender, value in ((second, 5), (first, 4)):
        sender.accept()
        sender.send(buffer(value)).wait()
    for thread in threads:
        thread.join(20)
    assert [int(flat[0]) for flat in flats] == [4, 5]


def test_a_sender_names_what_it_waited_for():
    sender = open_sender("gloo", receivers=1, timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.5 s for the other ends of the gloo weight link"):
        sender.accept()
    assert time.monotonic() - started < 30
    sender.close()


def test_a_receiver_names_the_sender_it_did_not_find():
    gone = open_sender("gloo", receivers=1, timeout_s=5)
    link = Link(kind="gloo", address=gone.link.address, receivers=1, timeout_s=0.5)
    gone.close()
    with pytest.raises(DeadlineExceeded, match=f"found no sender at {link.address}"):
        join(link, 0)


def test_a_local_receiver_gives_up_at_its_deadline():
    sender = open_sender("local", receivers=1, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        join(sender.link, 0).receive(torch.empty(1, dtype=torch.uint8))


def test_a_local_sender_gives_up_at_its_deadline():
    sender = open_sender("local", receivers=1, timeout_s=0.2)
    with pytest.raises(WeightSyncError, match="not all 1 local receivers"):
        sender.send(buffer(1)).wait()


def test_a_local_receiver_hears_that_the_sender_has_closed():
    sender = open_sender("local", receivers=1, timeout_s=20)
    receiver = join(sender.link, 0)
    sender.close()
    with pytest.raises(WeightSyncError, match="closed the local weight link"):
        receiver.receive(torch.empty(1, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="closed"):
        sender.send(buffer(1))


def test_a_gloo_receiver_hears_that_the_sender_has_closed():
    sender = open_sender("gloo", receivers=1, timeout_s=3)
    thread, outcome = in_thread(lambda: join(sender.link, 0).receive(torch.empty(16, dtype=torch.uint8)))
    sender.accept()
    sender.close()
    thread.join(30)
    assert isinstance(outcome[0], WeightSyncError)


def test_buffers_of_unequal_size_are_noticed():
    sender = open_sender("local", receivers=1, timeout_s=5)
    thread, outcome = in_thread(lambda: join(sender.link, 0).receive(torch.empty(8, dtype=torch.uint8)))
    with pytest.raises(WeightSyncError):
        sender.send(buffer(1)).wait()
    thread.join(10)
    assert "same manifest" in str(outcome[0])


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match=r"'carrier pigeon'.*gloo, local, nccl"):
        open_sender("carrier pigeon", receivers=1)
    sender = open_sender("local", receivers=2)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=r"outside 0\.\.1"):
            join(sender.link, rank)
    with pytest.raises(WeightSyncError, match="within one process"):
        join(Link(kind="local", address="elsewhere", receivers=1, timeout_s=1), 0)
    with pytest.raises(WeightSyncError, match="not accepted yet"):
        open_sender("gloo", receivers=1).send(buffer(1))
