"""Segmented LRU: blocks that were used since they were stored are protected.

After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994).
New blocks are on probation, and go first. A use moves a block into the protected segment; what
overflows there returns to the warm end of probation. Both are in LRU's order, and a block is
protected whenever one after it is, so tails come before heads throughout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block

PROTECTED_SHARE = 0.8


class SLRU(EvictionPolicy):
    """Blocks never used since they were stored go first, then the least recently used."""

    def __init__(self) -> None:
        self._probation: OrderedDict[Block, None] = OrderedDict()
        self._protected: OrderedDict[Block, None] = OrderedDict()
        self._fresh: set[Block] = set()

    def insert(self, block: Block) -> None:
        self._probation[block] = None
        self._fresh.add(block)

    def touch(self, prefix: Sequence[Block]) -> None:
        probation, protected, fresh = self._probation, self._protected, self._fresh
        for block in reversed(prefix):
            if block in protected:
                protected.move_to_end(block)
            elif block in fresh:
                fresh.remove(block)
                probation.move_to_end(block)
            else:
                del probation[block]
                protected[block] = None
        protected_max = PROTECTED_SHARE * len(self)
        while len(protected) > protected_max:
            probation[protected.popitem(last=False)[0]] = None

    def remove(self, block: Block) -> None:
        segment = self._protected if block in self._protected else self._probation
        del segment[block]
        self._fresh.discard(block)

    def candidates(self) -> Iterator[Block]:
        return chain(self._probation, self._protected)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
