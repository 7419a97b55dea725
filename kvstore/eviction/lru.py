"""Least recently used, tails first.

Touching a prefix from its last block to its first leaves the first one the most recent. Since
every use of a block touches those before it too, a block is always more recent than all that
follow it: the coldest block is a leaf, without looking for one.

The order is a list that is linked through the blocks themselves, which takes an eighth of the
memory of an ordered dictionary. Blocks that were used together stay neighbours, so a prefix is
moved in few pieces, most often in one. So a block can be in one such order alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block


class LRU(EvictionPolicy):
    """The block whose last use is longest ago goes first."""

    def __init__(self) -> None:
        self._coldest: Block | None = None
        self._warmest: Block | None = None
        self._count = 0

    def insert(self, block: Block) -> None:
        self._count += 1
        self._append(block, block)

    def touch(self, prefix: Sequence[Block]) -> None:
        blocks = reversed(prefix)
        cold = warm = next(blocks, None)
        if cold is None or warm is None:
            return
        for block in blocks:
            if warm.warmer is not block:  # the piece of neighbours ends
                self._take(cold, warm)
                self._append(cold, warm)
                cold = block
            warm = block
        self._take(cold, warm)
        self._append(cold, warm)

    def remove(self, block: Block) -> None:
        self._count -= 1
        self._take(block, block)
        block.colder = block.warmer = None

    def candidates(self) -> Iterator[Block]:
        block = self._coldest
        while block is not None:
            yield block
            block = block.warmer

    def __len__(self) -> int:
        return self._count

    def _take(self, cold: Block, warm: Block) -> None:
        """Takes a piece of the list out, from one end of it to the other."""
        before, after = cold.colder, warm.warmer
        if before is None:
            self._coldest = after
        else:
            before.warmer = after
        if after is None:
            self._warmest = before
        else:
            after.colder = before

    def _append(self, cold: Block, warm: Block) -> None:
        """Adds a piece that was taken out, at the warm end."""
        cold.colder, warm.warmer = self._warmest, None
        if self._warmest is None:
            self._coldest = cold
        else:
            self._warmest.warmer = cold
        self._warmest = warm
