"""Seeds of requests, from the run's seed and the request's name."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, label: str) -> int:
    """A seed for one request. Distinct labels give seeds far apart, so sample i may be drawn with seed + i."""
    digest = hashlib.blake2b(f"{run_seed}/{label}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33 << 8 & 0x7FFFFF00
