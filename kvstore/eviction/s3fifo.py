"""S3-FIFO: a small queue that lets one-hit wonders go early, a main queue, and ghosts.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). New blocks
enter the small queue. One that was used meanwhile moves on to the main queue when its turn
comes; one that wasn't goes, and is remembered, and enters the main queue when it comes again.
In the main queue a use earns another round.

Moves are made as soon as they are due, not when room is needed, so that the front of each queue
is always a block that may go and looking for one changes nothing. As in `fifo`, storing at the
end of a prefix renews the prefix: a block stands behind those that follow it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block
from kvstore.types import BlockKey

SMALL_SHARE = 0.1
USES_MAX = 3


class S3FIFO(EvictionPolicy):
    """Blocks that weren't used since they were stored go soon, others in rounds."""

    def __init__(self) -> None:
        self._small: OrderedDict[Block, None] = OrderedDict()
        self._main: OrderedDict[Block, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._uses: dict[Block, int] = {}
        self._fresh: set[Block] = set()

    def insert(self, block: Block) -> None:
        seen_before = block.key in self._ghosts
        if seen_before:
            del self._ghosts[block.key]
        queue = self._main if seen_before else self._small
        queue[block] = None
        self._uses[block] = 0
        self._fresh.add(block)

    def touch(self, prefix: Sequence[Block]) -> None:
        small, main, uses, fresh = self._small, self._main, self._uses, self._fresh
        stored = not fresh.isdisjoint(prefix)
        for block in reversed(prefix):
            if stored:
                (small if block in small else main).move_to_end(block)
            if block in fresh:
                fresh.remove(block)
            elif uses[block] < USES_MAX:
                uses[block] += 1
        self._settle()

    def remove(self, block: Block) -> None:
        del self._uses[block]
        self._fresh.discard(block)
        if block in self._main:
            del self._main[block]
        else:
            del self._small[block]
            self._ghosts[block.key] = None
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)
        self._settle()

    def candidates(self) -> Iterator[Block]:
        if len(self._small) > SMALL_SHARE * len(self):
            return chain(self._small, self._main)
        return chain(self._main, self._small)

    def __len__(self) -> int:
        return len(self._uses)

    def _settle(self) -> None:
        """Moves on the blocks at the fronts that have earned it."""
        small, main, uses = self._small, self._main, self._uses
        while small and uses[block := next(iter(small))]:
            del small[block]
            main[block] = None
            uses[block] = 0
        while main and uses[block := next(iter(main))]:
            main.move_to_end(block)
            uses[block] -= 1
