"""One fetch for many askers.

The first to ask for a block starts the work; those who ask while it runs wait for the same
result. The work is nobody's in particular: it goes on when an asker gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Inflight(Generic[K, V]):
    """Results that are on their way, by key. Used within one event loop."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._futures)

    def share(
        self, keys: Sequence[K], fetch: Callable[[Sequence[K]], Awaitable[dict[K, V]]]
    ) -> list[asyncio.Future[V]]:
        """One future a key, in order; `fetch` is started with those that nobody fetches yet.

        `fetch` returns a value for each of its keys; when it raises, its askers get that error.
        """
        loop = asyncio.get_running_loop()
        new = [key for key in dict.fromkeys(keys) if key not in self._futures]
        for key in new:
            self._futures[key] = loop.create_future()
        futures = [self._futures[key] for key in keys]
        if new:
            task = loop.create_task(self._run(new, fetch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return futures

    async def drain(self) -> None:
        """Waits for all work that is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(
        self, keys: Sequence[K], fetch: Callable[[Sequence[K]], Awaitable[dict[K, V]]]
    ) -> None:
        try:
            results = await fetch(keys)
            values = [results[key] for key in keys]
        except BaseException as error:
            for key in keys:
                future = self._futures.pop(key)
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                elif not future.cancelled():
                    future.set_exception(error)
                    future.exception()  # an asker may be gone; the others still see it
            if not isinstance(error, Exception):
                raise
            return
        for key, value in zip(keys, values, strict=True):
            future = self._futures.pop(key)
            if not future.cancelled():
                future.set_result(value)
