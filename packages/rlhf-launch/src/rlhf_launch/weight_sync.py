"""New weights from the policy's ranks to every rollout engine: one control call per worker and sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core import Link, RLHFError, UserError, WeightSyncError
from rlhf_core.weights import DEFAULT_BUCKET_BYTES

from rlhf_launch.handles import gather
from rlhf_launch.rollout_pool import RolloutPool
from rlhf_launch.train_group import TrainGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one sync did."""

    version: int
    bytes: int
    buckets: int
    seconds: float
    """From the first control call to the last acknowledgement."""


class WeightSync:
    """Keeps rollout engines at the policy's version. Opens its link on first use and again after a failure."""

    def __init__(
        self,
        policy: TrainGroup,
        pool: RolloutPool,
        *,
        transports: Sequence[str],
        timeout_s: float,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self.transport = pool.choose_transport(transports)
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._link: Link | None = None

    def __call__(self, version: int) -> SyncReport:
        """Bring all engines to `version`. A failed transfer is tried once more over a new link.

        Raises:
            WeightSyncError: both tries failed; the engines refuse to sample until a sync succeeds.
        """
        try:
            return self._sync(version)
        except UserError:
            raise
        except RLHFError as first:
            # A link is never reused after a failure: its two ends may be at different buckets.
            self._link = None
            try:
                return self._sync(version)
            except RLHFError as second:
                raise WeightSyncError(
                    f"weights of version {version} could not be sent: {first}; over a new link: {second}"
                ) from first

    def _sync(self, version: int) -> SyncReport:
        begin = time.perf_counter()
        if self._link is None:
            self._connect()
        manifest = self._policy.manifest(version, bucket_bytes=self._bucket_bytes)
        # Both sides enter together: the receivers' calls are under way before the senders start.
        futures = [*self._pool.receive(manifest), *self._policy.send(manifest)]
        gather(futures, what=f"weights of version {version} to arrive", timeout_s=self._timeout_s)
        return SyncReport(
            version=version,
            bytes=manifest.total_bytes,
            buckets=len(manifest.buckets()),
            seconds=time.perf_counter() - begin,
        )

    def _connect(self) -> None:
        link = self._policy.open_link(self.transport, self._pool.receivers)
        futures = [self._policy.accept_link(), *self._pool.connect(link)]
        gather(futures, what=f"all ends of the {link.kind} weight link to meet", timeout_s=self._timeout_s)
        self._link = link
