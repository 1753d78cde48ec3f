"""Checks that every weight transport must pass: subclass `TransportConformance` and set `kind`.

class TestMine(TransportConformance):
    kind = "my_package.my_module:MyTransport"
"""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlhf_core.errors import DeadlineExceeded, RLHFError, WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket, TensorSpec, WeightManifest
from rlhf_core.weight_sync.receive import receive_weights
from rlhf_core.weight_sync.send import send_weights
from rlhf_core.weight_sync.transports.transport import Receiver, Sender, join_link, open_sender, release_sender


class Source:
    """Weights w0, w1, ... of the given sizes, whose values depend on the version."""

    def __init__(self, sizes: Iterable[int], version: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {f"w{i}": torch.randn(size, generator=generator).to(device) for i, size in enumerate(sizes)}
        self.version = version

    def manifest(self, version: int = 0, *, bucket_bytes: int = 4096, checksums: bool = False) -> WeightManifest:
        """See WeightSource."""
        return WeightManifest(
            version=version or self.version,
            bucket_bytes=bucket_bytes,
            checksums=checksums,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32")
                for name, tensor in self.tensors.items()
            ),
        )

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        return [(spec.name, self.tensors[spec.name]) for spec in bucket.tensors]


class Beside:
    """A function on a thread; `result` returns its value or raises its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = [None, None]

        def run() -> None:
            try:
                self._outcome[0] = function()
            except BaseException as error:
                self._outcome[1] = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._thread.is_alive()

    def result(self, timeout_s: float = 60.0) -> Any:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"an end of the link still hangs after {timeout_s:g} s"
        if self._outcome[1] is not None:
            raise self._outcome[1]
        return self._outcome[0]


class TransportConformance:
    """What a sender and its receivers promise, with all ends in this process."""

    kind: ClassVar[str]
    device: ClassVar[str] = "cpu"
    can_give_up: ClassVar[bool] = True
    """Whether the transport has a `release_sender` that ends every wait of the sender."""
    patience_s: ClassVar[float] = 0.6
    """Deadline of links on which something goes wrong."""

    def connected(self, receivers: int = 1, timeout_s: float = 30.0) -> tuple[Sender, list[Receiver]]:
        sender = open_sender(self.kind, receivers=receivers, device=self.device, timeout_s=timeout_s)
        joining = [
            Beside(lambda rank=rank: join_link(sender.link, rank, device=self.device)) for rank in range(receivers)
        ]
        sender.accept()
        return sender, [one.result() for one in joining]

    def received(self, receiver: Receiver, manifest: WeightManifest) -> dict[str, Tensor]:
        arrived: dict[str, Tensor] = {}
        receive_weights(manifest, receiver, lambda pairs: arrived.update({n: t.clone() for n, t in pairs}))
        return arrived

    # ------------------------------------------------------------ bytes arrive

    @pytest.mark.parametrize("receivers", [1, 3])
    @pytest.mark.parametrize("buckets", [1, 2, 5])
    @pytest.mark.parametrize("checksums", [False, True])
    def test_every_receiver_gets_every_byte(self, receivers: int, buckets: int, checksums: bool) -> None:
        source = Source([700, 300] * buckets, 1, self.device)
        manifest = source.manifest(checksums=checksums)
        assert len(manifest.buckets()) == buckets
        sender, ends = self.connected(receivers)
        with closing(sender):
            taking = [Beside(lambda end=end: self.received(end, manifest)) for end in ends]
            send_weights(source, manifest, sender)
            for one in taking:
                self.check_equal(one.result(), source)

    def check_equal(self, arrived: dict[str, Tensor], source: Source) -> None:
        assert list(arrived) == list(source.tensors)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in source.tensors.items())

    def test_a_link_carries_many_syncs_of_changing_sizes(self) -> None:
        sender, ends = self.connected(2)
        # Alone in a bucket and a multiple of 64 bytes: sent in place. Then larger, none at all, and small ones.
        for version, sizes in enumerate([(4096,), (10, 8192, 3), (), (5,) * 9, (4096, 4096, 1)], start=1):
            source = Source(sizes, version, self.device)
            manifest = source.manifest()
            taking = [Beside(lambda end=end, m=manifest: self.received(end, m)) for end in ends]
            send_weights(source, manifest, sender)
            for one in taking:
                self.check_equal(one.result(), source)
        sender.close()

    def test_a_buffer_may_be_reused_once_its_sending_is_over(self) -> None:
        manifest = Source([64] * 6, 1, self.device).manifest(bucket_bytes=256)
        sender, (end,) = self.connected()
        seen: list[float] = []

        def take() -> None:
            for flat in end.receive(manifest.buckets()):
                time.sleep(0.005)  # slower than the sender
                seen.append(float(flat.view(torch.float32).unique()))

        taking = Beside(take)
        pair, sendings = sender.buffers(256), []
        for number, bucket in enumerate(manifest.buckets()):
            if number >= 2:
                sendings[number - 2].wait()
            flat = pair[number % 2][:256]
            flat.view(torch.float32).fill_(number)
            sendings.append(sender.send(flat, bucket))
        sender.finish()
        taking.result()
        assert seen == [0, 1, 2, 3, 4, 5]
        sender.close()

    def test_links_do_not_disturb_each_other(self) -> None:
        pairs = [self.connected() for _ in range(2)]
        assert pairs[0][0].link.address != pairs[1][0].link.address
        sources = [Source([9, 700], version, self.device) for version in (1, 2)]
        taking = [
            Beside(lambda end=ends[0], source=source: self.received(end, source.manifest()))
            for (_, ends), source in zip(pairs, sources, strict=True)
        ]
        for (sender, _), source, one in zip(reversed(pairs), reversed(sources), reversed(taking), strict=True):
            send_weights(source, source.manifest(), sender)
            self.check_equal(one.result(), source)
            sender.close()

    # ------------------------------------------------------------ what goes wrong ends in time

    def test_a_sender_that_waits_in_vain_can_be_released(self) -> None:
        if not self.can_give_up:
            pytest.skip("this transport notices by itself that a receiver is gone")
        sender, _ = self.connected(2)
        source = Source([10], 1, self.device)
        sending = Beside(lambda: send_weights(source, source.manifest(), sender))
        while sending.running:
            release_sender(sender.link)
            time.sleep(0.05)
        with pytest.raises(WeightSyncError, match="given up"):
            sending.result()

    def test_a_sender_names_the_receiver_that_did_not_come(self) -> None:
        sender = open_sender(self.kind, receivers=2, device=self.device, timeout_s=self.patience_s)
        joining = Beside(lambda: join_link(sender.link, 0, device=self.device))
        with pytest.raises(DeadlineExceeded, match=r"2 receiver.*missing: receiver.1$"):
            sender.accept()
        sender.close()
        with pytest.raises(RLHFError):
            joining.result()

    def test_a_receiver_does_not_wait_for_ever_to_be_accepted(self) -> None:
        sender = open_sender(self.kind, receivers=1, device=self.device, timeout_s=self.patience_s)
        with pytest.raises(DeadlineExceeded, match=r"accept receiver 0"):
            join_link(sender.link, 0, device=self.device)
        sender.close()

    def test_a_receiver_that_finds_no_sender_says_so(self) -> None:
        sender = open_sender(self.kind, receivers=1, device=self.device, timeout_s=self.patience_s)
        sender.close()
        with pytest.raises((DeadlineExceeded, WeightSyncError)):
            join_link(sender.link, 0, device=self.device)

    def test_a_sender_that_closes_between_two_buckets_leaves_no_receiver_waiting(self) -> None:
        source = Source([700, 300] * 3, 1, self.device)
        manifest = source.manifest()
        sender, ends = self.connected(2, timeout_s=20)
        taking = [Beside(lambda end=end: self.received(end, manifest)) for end in ends]
        first = manifest.buckets()[0]
        flat = sender.buffers(first.nbytes)[0][: first.nbytes].zero_()
        sender.send(flat, first).wait()
        sender.close()
        for one in taking:
            with pytest.raises((WeightSyncError, DeadlineExceeded)):
                one.result()

    def test_a_receiver_that_leaves_between_two_buckets_ends_the_senders_wait(self) -> None:
        source = Source([40_000] * 6, 1, self.device)
        manifest = source.manifest()
        sender, (end,) = self.connected(timeout_s=self.patience_s)

        def one_bucket() -> None:
            stream = end.receive(manifest.buckets())
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            end.close()

        leaving = Beside(one_bucket)
        with pytest.raises((WeightSyncError, DeadlineExceeded)):
            send_weights(source, manifest, sender)
        leaving.result()
        sender.close()

    def test_a_receiver_that_takes_nothing_ends_the_senders_wait(self) -> None:
        source = Source([40_000] * 6, 1, self.device)
        sender, _ends = self.connected(timeout_s=self.patience_s)
        with pytest.raises((WeightSyncError, DeadlineExceeded)):
            send_weights(source, source.manifest(), sender)
        sender.close()

    def test_a_sender_that_sends_nothing_ends_the_receivers_wait(self) -> None:
        manifest = Source([700], 1, self.device).manifest()
        sender, (end,) = self.connected(timeout_s=self.patience_s)
        with pytest.raises(DeadlineExceeded):
            self.received(end, manifest)
        sender.close()

    def test_damage_is_noticed_where_there_are_checksums(self) -> None:
        source = Source([700, 300] * 2, 1, self.device)
        manifest = source.manifest(checksums=True)
        sender, (end,) = self.connected(timeout_s=5)
        taking = Beside(lambda: self.received(end, manifest))
        damaging: Any = _Damaging(sender)
        with pytest.raises((WeightSyncError, DeadlineExceeded)):
            send_weights(source, manifest, damaging)
        with pytest.raises(WeightSyncError, match=r"checksum of bucket 1 of weight version 1"):
            taking.result()
        sender.close()

    def test_both_ends_may_be_closed_twice(self) -> None:
        sender, (end,) = self.connected()
        for one in (end, sender):
            one.close()
            one.close()
        bucket = Source([700], 1).manifest().buckets()[0]
        with pytest.raises(WeightSyncError, match="closed"):
            sender.send(torch.zeros(bucket.nbytes, dtype=torch.uint8, device=self.device), bucket)


class _Damaging:
    """A sender on whose way one bit of the second bucket flips."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def send(self, flat: Tensor, bucket: Bucket) -> Any:
        if bucket.index == 1:
            flat[1234] ^= 4
        return self._sender.send(flat, bucket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)
