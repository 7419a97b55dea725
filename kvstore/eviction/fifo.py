"""First in, first out, tails first.

A block is as young as the youngest block stored at or after it, since it can't go before that
one: storing at the end of a prefix renews the prefix, using it doesn't.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block


class FIFO(EvictionPolicy):
    """The block that was stored the longest time ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()
        self._fresh: set[Block] = set()

    def insert(self, block: Block) -> None:
        self._order[block] = None
        self._fresh.add(block)

    def touch(self, prefix: Sequence[Block]) -> None:
        if self._fresh.isdisjoint(prefix):
            return
        for block in reversed(prefix):
            self._order.move_to_end(block)
        self._fresh.difference_update(prefix)

    def remove(self, block: Block) -> None:
        del self._order[block]
        self._fresh.discard(block)

    def candidates(self) -> Iterator[Block]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
