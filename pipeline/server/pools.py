"""Threads for what would hold the event loop up, by how long it takes: a burst of one kind holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Pools:
    """A server's own. The loop's default pool is left to the server's end. To be called on the loop."""

    def __init__(self) -> None:
        self._texts = ThreadPoolExecutor(2, "headrace-texts")
        self._figures = ThreadPoolExecutor(2, "headrace-figures")
        self._waits = ThreadPoolExecutor(64, "headrace-waits")  # made as they are needed

    async def text(self, work: Callable[..., T], *args: object) -> T:
        """What is worth its size: a client's JSON, tokenizing."""
        return await _run(self._texts, work, *args)

    async def figures(self, work: Callable[..., T], *args: object) -> T:
        """What is over at once but takes locks of the engine: figures, a lease."""
        return await _run(self._figures, work, *args)

    async def wait(self, work: Callable[..., T], *args: object) -> T:
        """What may wait for running answers, for the disk, or for an engine in another process."""
        return await _run(self._waits, work, *args)


async def _run(pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
