"""Many pieces of work under way at once, but not all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def in_lanes(items: Sequence[Item], one: Callable[[Item], Awaitable[None]], *, lanes: int) -> None:
    """Work through the items in their order, so many at a time; the first error ends them all."""
    waiting = iter(items)
    tasks = [asyncio.ensure_future(_lane(waiting, one)) for _ in range(min(lanes, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _lane(waiting: Iterator[Item], one: Callable[[Item], Awaitable[None]]) -> None:
    for item in waiting:
        await one(item)
