"""Requests a second through the gateway, and the slowest of many clients while one sends a large body.

    python benchmarks/gateway.py --clients 200

The backend answers at once: what is measured is the gateway, and the clients, which share its machine and its
Python. Bodies of 20 MiB in three forms are more than the context of 131,072 tokens holds, and are refused;
a text of 120,000 tokens is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig

BODY_BYTES = 20 << 20
ASKED = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    backend = ScriptedBackend(script=lambda request, index: range(100, 116))
    config = GatewayConfig(model="m", max_model_len=131_072)
    with Gateway(backend, byte_tokenizer(), config) as gateway:
        asyncio.run(measure(gateway, arguments.clients, arguments.requests))


async def measure(gateway: Gateway, clients: int, requests: int) -> None:
    access = gateway.open_session("benchmark")
    limits = httpx.Limits(max_connections=clients + 1)
    headers = {"x-api-key": access.api_key}
    async with httpx.AsyncClient(base_url=access.url, headers=headers, limits=limits, timeout=300) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))
        began = time.monotonic()
        for _ in range(requests // 20):
            await asyncio.gather(*(ask(client) for _ in range(20)))
        rate = requests / (time.monotonic() - began)
        print(f"{rate:.0f} requests/s from 20 clients at a time, recorded in one session")
        alone = await asyncio.gather(*(ask(client) for _ in range(clients)))
        show(f"{clients} clients at once", alone)
        for form, body, status in large_bodies():
            path = "/completions" if form == "token ids" else "/chat/completions"
            sending = asyncio.create_task(post(client, path, body, status))
            seconds: list[float] = []
            while not sending.done():
                seconds += await asyncio.gather(*(ask(client) for _ in range(clients)))
            show(f"the same while a body of {len(body) / (1 << 20):.1f} MiB arrives ({form}, {status})", seconds)
            print(f"  the large request took {await sending:.1f} s")


def show(what: str, seconds: list[float]) -> None:
    print(f"{what}: slowest {max(seconds):.2f} s, median {statistics.median(seconds):.2f} s of {len(seconds)}")


async def ask(client: httpx.AsyncClient) -> float:
    """Seconds until the answer."""
    began = time.monotonic()
    answer = await client.post("/chat/completions", json=ASKED)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


async def post(client: httpx.AsyncClient, path: str, body: bytes, status: int) -> float:
    began = time.monotonic()
    answer = await client.post(path, content=body)
    assert answer.status_code == status, answer.text[:200]
    return time.monotonic() - began


def large_bodies() -> Iterator[tuple[str, bytes, int]]:
    """Each body with its form and the status that answers it."""

    def chat(messages: list[Any]) -> bytes:
        return json.dumps(ASKED | {"messages": messages}).encode()

    small = {"role": "user", "content": "x" * 30}
    yield "one text", chat([small | {"content": "x" * BODY_BYTES}]), 400
    yield "many messages", chat([small] * (BODY_BYTES // 64)), 400
    yield "token ids", json.dumps({"model": "m", "prompt": [100] * (BODY_BYTES // 5)}).encode(), 400
    yield "a text that fits", chat([small | {"content": "x" * 120_000}]), 200


if __name__ == "__main__":
    main()
