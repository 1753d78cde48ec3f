"""A rank that sends and fails goes on gathering with the others, which would wait for it for ever."""

import pytest
import torch
from rlhf_core import TensorSpec, WeightManifest, WeightSyncError, send_weights


class Source:
    """Four tensors, a bucket each; every gather is a collective of all ranks."""

    def __init__(self):
        self.gathered = []

    def manifest(self, version, *, bucket_bytes=256):
        specs = tuple(TensorSpec(name=f"w{i}", shape=(64,), dtype="float32") for i in range(4))
        return WeightManifest(version=version, bucket_bytes=bucket_bytes, tensors=specs)

    def gather(self, bucket):
        for spec in bucket.tensors:
            self.gathered.append(spec.name)
            yield spec.name, torch.ones(64)


class Sending:
    def wait(self):
        pass


class LosesItsReceiver:
    device = torch.device("cpu")

    def __init__(self, at):
        self.at, self.sent, self.closed = at, 0, False

    def buffers(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    def send(self, flat, bucket):
        self.sent += 1
        if self.sent == self.at:
            raise WeightSyncError("a receiver is gone")
        return Sending()

    def finish(self):
        if self.at > self.sent:
            raise WeightSyncError("a receiver is gone")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_failed_sender_takes_part_in_every_gather_once(at):
    source, sender = Source(), LosesItsReceiver(at)
    manifest = source.manifest(1)
    assert len(manifest.buckets()) == 4
    with pytest.raises(WeightSyncError, match="a receiver is gone"):
        send_weights(source, manifest, sender)
    assert source.gathered == ["w0", "w1", "w2", "w3"]
    assert sender.closed


def test_a_rank_that_does_not_send_gathers_all():
    source = Source()
    send_weights(source, source.manifest(1), None)
    assert source.gathered == ["w0", "w1", "w2", "w3"]


class PackingSource(Source):
    """Brings its tensors straight to a buffer of the rank that sends, as a sharded engine does."""

    def packs(self, bucket):
        return True

    def pack(self, bucket, flat):
        if flat is None:
            raise WeightSyncError("the rank that sends was called without a buffer")
        assert flat.numel() == bucket.nbytes
        self.gathered += [spec.name for spec in bucket.tensors]


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_failed_sender_packs_what_is_left_in_vain(at):
    source, sender = PackingSource(), LosesItsReceiver(at)
    with pytest.raises(WeightSyncError, match="a receiver is gone"):
        send_weights(source, source.manifest(1), sender)
    assert source.gathered == ["w0", "w1", "w2", "w3"]


class CountingSource(Source):
    """Counts what it gathers, and drops what it kept when a sync ends."""

    def __init__(self):
        super().__init__()
        self.ended = 0

    def end_sync(self):
        self.ended += 1
        return 64 * 4 * len(self.gathered)


@pytest.mark.parametrize("sender", [None, LosesItsReceiver(at=0)])
def test_a_report_tells_what_was_gathered(sender):
    source = CountingSource()
    report = send_weights(source, source.manifest(1), sender)
    assert (report.bytes, report.gathered_bytes, report.gathered_per_sent) == (1024, 1024, 1.0)
    assert source.ended == 1


def test_a_failed_sync_ends_for_its_source_too():
    source = CountingSource()
    with pytest.raises(WeightSyncError):
        send_weights(source, source.manifest(1), LosesItsReceiver(at=2))
    assert source.ended == 1
