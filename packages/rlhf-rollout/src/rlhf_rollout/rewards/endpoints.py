"""Posting JSON to one of several equal servers, with deadlines, retries and a balance of the load."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rlhf_core import ConfigError, PluginError, RewardError

_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointsConfig:
    """Servers that all give the same answers, and how long and how often they are asked."""

    urls: tuple[str, ...]
    """Each gets a share of the requests."""
    timeout_s: float = 30.0
    """Deadline of one attempt, from connecting to the last byte."""
    attempts: int = 4
    """Tries of a request, each at the next server. What is tried again: refused or broken connections, missed
    deadlines, and the answers 408, 425, 429 and 5xx."""
    backoff_s: float = 0.5
    """Pause before the second attempt; grows twofold, with jitter, up to 30 s."""
    max_in_flight: int = 32
    """Requests at the same time."""
    max_answer_bytes: int = 64 * 2**20
    """Largest answer that is read, unpacked; a larger one is an error, and never in memory as a whole."""
    api_key_env: str | None = None
    """Name of the environment variable with the key for `Authorization: Bearer`; the key itself is in no file."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.urls or isinstance(self.urls, str):
            raise ConfigError(f"endpoints: urls must be a list with at least one address, got {self.urls!r}")
        for url in self.urls:
            if not _is_address(url):
                raise ConfigError(f"endpoints: {url!r} is not an address; write http://host:port/path")
        if self.attempts < 1 or self.timeout_s <= 0 or self.max_in_flight < 1 or self.max_answer_bytes < 1:
            raise ConfigError(
                "endpoints: needs attempts >= 1, timeout_s > 0, max_in_flight >= 1 and max_answer_bytes >= 1, got "
                f"{self.attempts}, {self.timeout_s:g}, {self.max_in_flight} and {self.max_answer_bytes}"
            )

    def all_headers(self) -> dict[str, str]:
        """The headers, with the one that carries the key.

        Raises:
            ConfigError: the variable that `api_key_env` names is not set.
        """
        if self.api_key_env is None:
            return dict(self.headers)
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(f"endpoints: api_key_env names {self.api_key_env!r}, which is not set; export it")
        return {**self.headers, "Authorization": f"Bearer {key}"}


class Endpoints:
    """The servers of an `EndpointsConfig`. Requests go to the one with the fewest in flight, in turns if equal.

    A server that fails is left alone for a while, longer with every failure in a row: a dead one has the fewest
    requests in flight and would get all retries. Needs the extra `http` (httpx, tenacity).
    """

    def __init__(self, config: EndpointsConfig, *, name: str) -> None:
        _http()
        self.config = config
        self.name = name
        self._headers = config.all_headers()
        self._in_flight = dict.fromkeys(config.urls, 0)
        self._failures = dict.fromkeys(config.urls, 0)
        self._rests_until = dict.fromkeys(config.urls, 0.0)
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._turns = itertools.count()

    @asynccontextmanager
    async def connections(self) -> AsyncIterator[EndpointConnections]:
        """Connections for the requests of one batch, which belong to the running event loop."""
        httpx, _, tls = _http()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.config.max_in_flight)
        # No proxies from the environment: a reward server is addressed as it is written.
        async with httpx.AsyncClient(
            headers=self._headers, verify=tls, limits=limits, timeout=self.config.timeout_s, trust_env=False
        ) as client:
            yield EndpointConnections(self, client)

    @property
    def room(self) -> asyncio.Semaphore:
        """What every request of the running event loop holds, so that at most `max_in_flight` run at once."""
        return self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.config.max_in_flight))

    def take(self, avoid: frozenset[str]) -> str:
        """The server for the next attempt, if possible none of `avoid`; hand it back with `release`."""
        now = time.monotonic()
        turn = next(self._turns)
        urls = self.config.urls[turn % len(self.config.urls) :] + self.config.urls[: turn % len(self.config.urls)]
        rests = {url: max(now, self._rests_until[url]) for url in urls}
        url = min(urls, key=lambda url: (rests[url], url in avoid, self._in_flight[url]))
        self._in_flight[url] += 1
        return url

    def release(self, url: str, *, failed: bool = False) -> None:
        """End an attempt at this server."""
        self._in_flight[url] -= 1
        self._failures[url] = self._failures[url] + 1 if failed else 0
        if failed:
            rest_s = min(30.0, self.config.backoff_s * 2 ** min(self._failures[url], 16))
            self._rests_until[url] = time.monotonic() + rest_s


class EndpointConnections:
    """Open connections to the servers of an `Endpoints`."""

    def __init__(self, endpoints: Endpoints, client: Any) -> None:
        self._endpoints = endpoints
        self._client = client

    async def post(self, body: Any, *, path: str = "", sample_ids: tuple[str, ...] = ()) -> Any:
        """The JSON answer to a JSON body.

        Raises:
            RewardError: no attempt succeeded, or the answer is an error that trying again does not mend. Names
                the server, what it said, and the samples.
        """
        config, (_, tenacity, _) = self._endpoints.config, _http()
        tried: list[str] = []
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(config.attempts),
            wait=tenacity.wait_exponential(multiplier=config.backoff_s, max=30)
            + tenacity.wait_random(0, config.backoff_s),
            retry=tenacity.retry_if_exception_type(_TryAgain),
            reraise=True,
        )
        async with self._endpoints.room:
            try:
                return await retrying(self._attempt, body, path, tried)
            except _TryAgain as error:
                raise RewardError(
                    f"reward {self._endpoints.name}: no answer after {len(tried)} attempts at "
                    f"{', '.join(dict.fromkeys(tried))}; the last: {error}",
                    sample_ids=sample_ids,
                ) from error
            except _Refused as error:
                raise RewardError(f"reward {self._endpoints.name}: {error}", sample_ids=sample_ids) from error

    async def _attempt(self, body: Any, path: str, tried: list[str]) -> Any:
        httpx, _, _ = _http()
        timeout_s = self._endpoints.config.timeout_s
        url = self._endpoints.take(frozenset(tried))
        tried.append(url)
        failed = True
        try:
            # httpx's time-outs are per read: a server that drips would never reach them.
            status, content = await asyncio.wait_for(self._answer(url + path, body), timeout_s)
            failed = status in _AGAIN or status >= 500
        except TimeoutError as error:
            raise _TryAgain(f"{url} did not answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise _TryAgain(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        except asyncio.CancelledError:
            failed = False
            raise
        finally:
            self._endpoints.release(url, failed=failed)
        said = repr(content[:200].decode(errors="replace"))
        if failed:
            raise _TryAgain(f"{url} answered {status}: {said}")
        if status != 200:
            raise _Refused(f"{url} answered {status}: {said}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise _Refused(f"{url} answered what is not JSON: {said}") from error

    async def _answer(self, url: str, body: Any) -> tuple[int, bytes]:
        """The status of an answer and what it says, unpacked, of which no more is read than allowed."""
        most = self._endpoints.config.max_answer_bytes
        content = bytearray()
        async with self._client.stream("POST", url, json=body) as answer:
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > most:
                    raise _Refused(f"{url} answered {answer.status_code} with more than max_answer_bytes={most}")
        return answer.status_code, bytes(content)


def unreachable(urls: Iterable[str], *, timeout_s: float = 5.0) -> dict[str, str]:
    """Addresses at which no connection can be made now, with the reason."""
    found = {}
    for url in urls:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
        except OSError as error:
            found[url] = f"{type(error).__name__}: {error}"
    return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class _TryAgain(Exception):
    """Another attempt may succeed."""


class _Refused(Exception):
    """Another attempt would end the same."""


@lru_cache(maxsize=1)
def _http() -> tuple[Any, Any, Any]:
    """httpx, tenacity, and a TLS context; they need an extra, and the context takes its time to build."""
    try:
        import httpx
        import tenacity
    except ImportError as error:
        raise PluginError(f"rewards over HTTP need {error.name}: install rlhf-rollout[http]") from error
    return httpx, tenacity, httpx.create_ssl_context()
