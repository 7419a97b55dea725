"""Copies of one batch on several threads.

When `each` returns or raises, no copy is under way: a slot that is given back after it is written
by nobody. Knows nothing of blocks, or of what a copy does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

SHARE_BYTES_MIN = 2 << 20
"""Below so many bytes a thread, waking it takes longer than it saves."""


class Copiers:
    """The calling thread and its helpers. Thread-safe."""

    def __init__(self, threads: int):
        """`threads` copy at a time, the calling one included; with 1 there are no helpers."""
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        if self._helpers:
            self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="kvstore-copier")

    def each(self, count: int, size_bytes: int, copy: Callable[[int], bool]) -> None:
        """Calls `copy` with 0 to `count` - 1, begun in order, until one returns False.

        `size_bytes` is what one copy moves. Raises what a copy raises, and begins no more then.
        """
        numbers = itertools.count()  # one `next` is atomic
        stop = False

        def work() -> None:
            nonlocal stop
            try:
                while not stop and (number := next(numbers)) < count:
                    if not copy(number):
                        stop = True
            except BaseException:
                stop = True
                raise

        shares = min(count, count * size_bytes // SHARE_BYTES_MIN)
        helpers = max(min(self._helpers, shares - 1), 0)
        helping = [self._pool.submit(work) for _ in range(helpers)] if self._pool else []
        try:
            work()
        finally:
            for helper in helping:
                helper.cancel()  # if it has not begun, there is nothing left to do
            wait(helping)
        for helper in helping:
            if not helper.cancelled():
                helper.result()

    def close(self) -> None:
        """Ends the helpers."""
        if self._pool is not None:
            self._pool.shutdown()
