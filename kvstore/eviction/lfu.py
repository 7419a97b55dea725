"""Least frequently used; among equals, least recently used, tails first.

Every use of a block is a use of those before it, so a block's count is at least that of any
block after it, and the first block of the lowest count is a leaf. Counts saturate, which keeps
the search for the lowest one short; at the limit the order is LRU's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block

COUNT_MAX = 255


class LFU(EvictionPolicy):
    """The block with the fewest uses goes first."""

    def __init__(self) -> None:
        self._counts: dict[Block, int] = {}
        self._with_count: list[OrderedDict[Block, None]] = [
            OrderedDict() for _ in range(COUNT_MAX + 1)
        ]

    def insert(self, block: Block) -> None:
        self._counts[block] = 0
        self._with_count[0][block] = None

    def touch(self, prefix: Sequence[Block]) -> None:
        counts, with_count = self._counts, self._with_count
        for block in reversed(prefix):
            count = counts[block]
            del with_count[count][block]
            counts[block] = count = min(count + 1, COUNT_MAX)
            with_count[count][block] = None

    def remove(self, block: Block) -> None:
        del self._with_count[self._counts.pop(block)][block]

    def candidates(self) -> Iterator[Block]:
        return chain.from_iterable(self._with_count)

    def __len__(self) -> int:
        return len(self._counts)
