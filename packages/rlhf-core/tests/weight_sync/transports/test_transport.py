"""The built-in transports pass the conformance checks; what is particular to each; processes that die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rlhf_core import (
    ConfigError,
    DeadlineExceeded,
    Link,
    WeightSyncError,
    join_link,
    open_sender,
    receive_weights,
    release_sender,
    send_weights,
    shared_link,
)
from rlhf_core.testing.transport import Beside, Source, TransportConformance
from rlhf_core.weight_sync.transports.broadcast import _watchdog_only_cleans_up
from safetensors.torch import load_file

pytestmark = pytest.mark.stack


class TestLocal(TransportConformance):
    kind = "local"
    can_give_up = False


class TestGloo(TransportConformance):
    kind = "gloo"
    can_give_up = False


class TestSharedMemory(TransportConformance):
    kind = "shm"


class TestByPath(TransportConformance):
    kind = "rlhf_core.weight_sync.transports.local:LocalTransport"
    can_give_up = False


class TestDisk(TransportConformance):
    kind = "disk"

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RLHF_WEIGHTS_DIRECTORY", str(tmp_path))
        yield
        assert list(tmp_path.iterdir()) == [], "closing left something behind"


# ------------------------------------------------------------ between processes

RECEIVER = """
import os, signal, sys
from rlhf_core import Link, WeightManifest, join_link, receive_weights
from rlhf_core.testing.transport import Source

kind, address = sys.argv[1:3]
receivers, rank, die_after, size, bucket_bytes = map(int, sys.argv[3:])
link = Link(kind=kind, address=address, receivers=receivers, timeout_s=60)
receiver = join_link(link, rank)
buckets = 0

def load(pairs):
    global buckets
    pairs = list(pairs)
    if not pairs:
        return
    buckets += 1
    if buckets == die_after:
        os.kill(os.getpid(), signal.SIGKILL)
    assert all((tensor == expected.tensors[name]).all() for name, tensor in pairs), "wrong values"

for version in (1, 2):
    expected = Source([size] * 3, version)
    receive_weights(expected.manifest(bucket_bytes=bucket_bytes), receiver, load)
    print("version", version, flush=True)
"""


def start_receiver(link, rank, die_after=0, size=40_000, bucket_bytes=4096):
    command = [sys.executable, "-c", RECEIVER, link.kind, link.address]
    command += map(str, (link.receivers, rank, die_after, size, bucket_bytes))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["gloo", "shm", "disk"])
def test_between_processes_and_one_dies_amid_the_second_sync(kind, tmp_path):
    sender = open_sender(kind, receivers=2, host=f"{tmp_path}/weights" if kind == "disk" else None, timeout_s=120)
    processes = [start_receiver(sender.link, rank, die_after=5 if rank else 0) for rank in range(2)]
    try:
        sender.accept()
        first, second = Source([40_000] * 3, 1), Source([40_000] * 3, 2)
        send_weights(first, first.manifest(), sender)
        sender.link = Link(kind=kind, address=sender.link.address, receivers=2, timeout_s=2)
        with pytest.raises((WeightSyncError, DeadlineExceeded)):
            send_weights(second, second.manifest(), sender)
        assert "version 1" in processes[0].stdout.readline()
        assert processes[1].wait(30) == -signal.SIGKILL
    finally:
        sender.close()
        for process in processes:
            process.kill()
            process.communicate()


def test_a_receiver_that_stands_still_and_is_ended_frees_the_sender_with_the_reason():
    """The sender's deadline is minutes away, and it waits for no note that could be answered in its place."""
    sender = open_sender("gloo", receivers=1, timeout_s=120)
    process = start_receiver(sender.link, 0)
    try:
        sender.accept()
        process.send_signal(signal.SIGSTOP)
        source = Source([4_000_000] * 3, 1)  # more than sockets hold
        sending = Beside(lambda: send_weights(source, source.manifest(bucket_bytes=16_000_000), sender))
        time.sleep(0.5)
        release_sender(sender.link)
        time.sleep(1)  # the guard looks at notes four times a second
        process.kill()
        with pytest.raises(WeightSyncError, match="given up"):
            sending.result(30)
    finally:
        sender.close()
        process.kill()
        process.communicate()


def test_a_sender_that_closes_amid_a_transfer_frees_the_receivers_that_live():
    """Another one stands still, so that the transfer is not over; those that live must not wait for their deadline:
    whoever runs them would take them for dead."""
    sender = open_sender("gloo", receivers=2, timeout_s=120)
    size, bucket_bytes = 4_000_000, 16_000_000  # more than sockets hold
    processes = [start_receiver(sender.link, rank, size=size, bucket_bytes=bucket_bytes) for rank in range(2)]
    try:
        sender.accept()
        first, second = Source([size] * 3, 1), Source([size] * 3, 2)
        send_weights(first, first.manifest(bucket_bytes=bucket_bytes), sender)
        processes[1].send_signal(signal.SIGSTOP)
        sending = Beside(lambda: send_weights(second, second.manifest(bucket_bytes=bucket_bytes), sender))
        time.sleep(0.5)
        assert sending.running
        sender.close()
        with pytest.raises(WeightSyncError):
            sending.result(30)
        _, errors = processes[0].communicate(timeout=120)
        assert "WeightSyncError: the sender closed the gloo weight link" in errors
        assert "DeadlineExceeded" not in errors
    finally:
        sender.close()
        for process in processes:
            process.kill()
            process.communicate()


def test_an_nccl_group_cannot_end_the_process_and_leaves_others_as_they_are(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with _watchdog_only_cleans_up():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


# ------------------------------------------------------------ particular to a kind


def test_the_files_are_ordinary_safetensors(tmp_path):
    sender = open_sender("disk", receivers=1, host=str(tmp_path), timeout_s=20)
    joining = Beside(lambda: join_link(sender.link, 0))
    sender.accept()
    receiver = joining.result()
    source = Source([7, 33, 900], 3)
    manifest = source.manifest(checksums=True, bucket_bytes=3600)
    assert [bucket.part for bucket in manifest.buckets()] == [None, None]
    taking = Beside(lambda: [load_file(file) for file in files(tmp_path, receiver, manifest)])
    send_weights(source, manifest, sender)
    found = {name: tensor for part in taking.result() for name, tensor in part.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in source.tensors.items())
    assert found.keys() - source.tensors.keys() == {"rlhf.checksum"}
    sender.close()


def files(directory, receiver, manifest):
    """The path of each bucket, while it is there."""
    for bucket, _ in enumerate(receiver.receive(manifest.buckets())):
        yield next(directory.glob(f"*/sync-1/bucket-{bucket}.safetensors"))


def test_shared_memory_is_held_by_its_mappings_alone():
    sender, (receiver,) = TestSharedMemory().connected()
    source = Source([700, 300], 1)
    taking = Beside(lambda: TestSharedMemory().received(receiver, source.manifest()))
    pair = sender.buffers(4096)
    assert pair[0].numel() >= 4096
    assert [path for path in map_paths() if "memfd:rlhf-weights" in path]
    assert not [path for path in open_paths() if "memfd:rlhf-weights" in path]
    send_weights(source, source.manifest(), sender)
    taking.result()
    sender.close()


def open_paths():
    descriptors = Path("/proc/self/fd")
    return [os.readlink(one) for one in list(descriptors.iterdir()) if one.is_symlink()]


def map_paths():
    maps = Path("/proc/self/maps")
    return maps.read_text().splitlines() if maps.exists() else []


@pytest.mark.parametrize("kind", ["local", "shm", "disk"])
def test_another_manifest_on_the_other_side_is_noticed(kind):
    checks = type("Checks", (TransportConformance,), {"kind": kind})()
    sender, (receiver,) = checks.connected(timeout_s=5)
    source, other = Source([700, 300], 1), Source([700, 200], 1)
    taking = Beside(lambda: checks.received(receiver, other.manifest()))
    with pytest.raises((WeightSyncError, DeadlineExceeded)):
        send_weights(source, source.manifest(), sender)
    with pytest.raises(WeightSyncError, match="same manifest"):
        taking.result()
    sender.close()


def test_every_receiver_joins_its_own_sender():
    # Two engines of two workers each, whose first workers are on the first rank's GPU.
    source = Source([300, 7, 2000], version=3)
    senders = [open_sender("shm", receivers=2, timeout_s=30) for _ in range(2)]
    one, two = (sender.link for sender in senders)
    link = shared_link([one, two, one, two])
    manifest = source.manifest()

    def take(rank):
        found = {}
        receiver = join_link(link, rank)
        receive_weights(manifest, receiver, lambda pairs: found.update({n: t.clone() for n, t in pairs}))
        receiver.close()
        return found

    def send(sender):
        sender.accept()
        send_weights(source, manifest, sender)
        sender.close()

    receiving = [Beside(lambda r=rank: take(r)) for rank in range(4)]
    sending = [Beside(lambda s=sender: send(s)) for sender in senders]
    for weights in (beside.result() for beside in receiving):
        assert weights.keys() == source.tensors.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in source.tensors.items())
    for beside in sending:
        beside.result()


def test_all_senders_of_a_link_are_released():
    senders = [open_sender("shm", receivers=1, timeout_s=30) for _ in range(2)]
    link = shared_link([sender.link for sender in senders])
    waiting = [Beside(sender.accept) for sender in senders]
    while any(beside.running for beside in waiting):
        release_sender(link)
    for beside in waiting:
        with pytest.raises(WeightSyncError):
            beside.result()


def test_a_sender_that_serves_others_too_is_refused():
    link = Link(kind="shm", address="a:1", receivers=2, timeout_s=1)
    with pytest.raises(ConfigError, match="serves 2 receivers, and 1 join"):
        shared_link([link])


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match=r"'carrier pigeon'.*disk, gloo, ipc, local, nccl, shm"):
        open_sender("carrier pigeon", receivers=1)
    sender = open_sender("local", receivers=2)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=r"outside 0\.\.1"):
            join_link(sender.link, rank)
    with pytest.raises(WeightSyncError, match="within one process"):
        join_link(Link(kind="local", address="elsewhere", receivers=1, timeout_s=1), 0)
    bucket = Source([700], 1).manifest().buckets()[0]
    with pytest.raises(WeightSyncError, match="not accepted yet"):
        open_sender("gloo", receivers=1).send(torch.zeros(bucket.nbytes, dtype=torch.uint8), bucket)
