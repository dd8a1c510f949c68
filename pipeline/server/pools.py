"""Threads for what would hold the event loop up, by how long it takes: a burst of one kind holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Pools:
    """A server's own. The loop's default pool is left to the server's end. To be called on the loop."""

    def __init__(self) -> None:
        self._bodies = ThreadPoolExecutor(2, "headrace-bodies")
        self._tokens = ThreadPoolExecutor(2, "headrace-tokens")
        self._answers = ThreadPoolExecutor(2, "headrace-answers")
        self._figures = ThreadPoolExecutor(2, "headrace-figures")
        self._waits = ThreadPoolExecutor(64, "headrace-waits")  # made as they are needed

    async def body(self, work: Callable[..., T], *args: object) -> T:
        """A client's JSON, which takes as long as it is large."""
        return await _run(self._bodies, work, *args)

    async def tokens(self, work: Callable[..., T], *args: object) -> T:
        """Texts to tokens and back."""
        return await _run(self._tokens, work, *args)

    async def answer(self, work: Callable[..., T], *args: object) -> T:
        """Stored answers: their JSON, and the disk."""
        return await _run(self._answers, work, *args)

    async def figures(self, work: Callable[..., T], *args: object) -> T:
        """What is over at once but takes locks of the engine: figures, a lease."""
        return await _run(self._figures, work, *args)

    async def wait(self, work: Callable[..., T], *args: object) -> T:
        """What may wait for running answers, for the disk, or for an engine in another process."""
        return await _run(self._waits, work, *args)


class Shared(Generic[T]):
    """Work whose result is everybody's: who comes while it is done gets that one's. To be called on the loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]):
        self._work = work
        self._coming: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        if self._coming is None or self._coming.done():
            self._coming = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._coming)


async def _run(pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
