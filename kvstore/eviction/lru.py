"""Least recently used, tails first.

Touching a prefix from its last block to its first leaves the first one the most recent. Since
every use of a block touches those before it too, a block is always more recent than all that
follow it: the coldest block is a leaf, without looking for one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block


class LRU(EvictionPolicy):
    """The block whose last use is longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()

    def insert(self, block: Block) -> None:
        self._order[block] = None

    def touch(self, prefix: Sequence[Block]) -> None:
        move_to_end = self._order.move_to_end
        for block in reversed(prefix):
            move_to_end(block)

    def remove(self, block: Block) -> None:
        del self._order[block]

    def candidates(self) -> Iterator[Block]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
