"""GreedyDual with a learned worth: how likely a prefix is to be continued.

A prefix that has grown often is likely to grow again, and a short first prompt hardly ever does,
while LRU gives both the same time. So prefixes are put into classes by how often they grew and by
the logarithm of their length, and for each class the share that was continued is counted as the
cache runs. A block's worth is what the worth of the last evicted block was when it was used, plus
that share: a class that is continued twice as often keeps its blocks for twice as many evictions.
With nothing learned all shares are equal, and the order is LRU's.

Blocks that were evicted are remembered, with the growth and the class of their prefix, so that a
session that comes back too late is still known, and counted as continued. Without that, a small
cache would learn that nothing is ever continued. Memory of such ghosts is bounded by
`GHOSTS_A_BLOCK`. Classes are queues in which worth only grows; the first of the worst queue is
the block to go. Whenever a block is used those before it are worth at least as much, so tails
come before heads.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block
from kvstore.types import BlockKey

GROWTH_MAX = 8
"""Prefixes that grew more often are in one class with those that grew this often."""

GHOSTS_A_BLOCK = 4
"""Evicted blocks remembered for each block that is here."""


class PrefixClass(NamedTuple):
    """What a prefix has in common with others: how often it grew, and bits of its length."""

    growth: int
    length_bits: int


class Continuation(EvictionPolicy):
    """The block whose prefix is unlikely to be continued and whose last use is long ago goes."""

    def __init__(self) -> None:
        self._queues: dict[PrefixClass, OrderedDict[Block, float]] = {}
        self._queue_of: dict[Block, OrderedDict[Block, float]] = {}
        self._stored_as: dict[Block, PrefixClass] = {}
        self._ghosts: OrderedDict[BlockKey, PrefixClass] = OrderedDict()
        self._fresh: set[Block] = set()
        self._stored: dict[PrefixClass, int] = {}
        self._continued: dict[PrefixClass, int] = {}
        self._age = 0.0
        self._coldest: OrderedDict[Block, float] | None = None
        self._next_worth = 0.0
        """The lowest worth outside of the coldest queue, unless that is None: not known."""

    def insert(self, block: Block) -> None:
        prefix_class = PrefixClass(0, 0)
        self._stored_as[block] = prefix_class
        self._fresh.add(block)
        queue = self._queues.setdefault(prefix_class, OrderedDict())
        if not queue:
            self._coldest = None
        queue[block] = self._age
        self._queue_of[block] = queue

    def touch(self, prefix: Sequence[Block]) -> None:
        if not prefix:
            return
        if not self._fresh.isdisjoint(prefix):
            self._learn(prefix)
        prefix_class = self._stored_as[prefix[-1]]
        worth = self._age + self._share_continued(prefix_class)
        queue = self._queues.setdefault(prefix_class, OrderedDict())
        if not queue:
            self._coldest = None
        queue_of = self._queue_of
        for block in reversed(prefix):
            old_queue = queue_of[block]
            if old_queue[block] <= worth:
                del old_queue[block]
                queue[block] = worth
                queue_of[block] = queue

    def remove(self, block: Block) -> None:
        queue = self._queue_of.pop(block)
        went_first = next(iter(queue)) is block
        worth = queue.pop(block)
        if went_first and worth > self._age:
            self._age = worth
        self._fresh.discard(block)
        self._ghosts[block.key] = self._stored_as.pop(block)
        while len(self._ghosts) > GHOSTS_A_BLOCK * len(self):
            self._ghosts.popitem(last=False)

    def candidates(self) -> Iterator[Block]:
        first = self._first()
        if first is None:
            return
        yield first
        by_worth = (queue.items() for queue in self._queues.values() if queue)
        for block, _ in heapq.merge(*by_worth, key=lambda item: item[1]):
            if block is not first:
                yield block

    def __len__(self) -> int:
        return len(self._queue_of)

    def _first(self) -> Block | None:
        """The block of the lowest worth.

        Fronts of queues only rise, except where a queue was empty. So the coldest queue stays
        the coldest until its front reaches the next one's, and needs no new search.
        """
        if self._coldest:
            block, worth = next(iter(self._coldest.items()))
            if worth < self._next_worth:
                return block
        fronts = [(next(iter(queue.values())), queue) for queue in self._queues.values() if queue]
        if not fronts:
            return None
        coldest = min(fronts, key=lambda front: front[0])[1]
        self._coldest = coldest
        self._next_worth = min(
            (worth for worth, queue in fronts if queue is not coldest), default=float("inf")
        )
        return next(iter(coldest))

    def _learn(self, prefix: Sequence[Block]) -> None:
        """Counts what this prefix continues, and puts its new blocks into their class."""
        continued = self._continues(prefix)
        growth = 1
        if continued is not None:
            self._continued[continued] = self._continued.get(continued, 0) + 1
            growth = min(continued.growth + 1, GROWTH_MAX)
        prefix_class = PrefixClass(growth, len(prefix).bit_length())
        self._stored[prefix_class] = self._stored.get(prefix_class, 0) + 1
        for block in prefix:
            if block in self._fresh:
                self._stored_as[block] = prefix_class
                self._ghosts.pop(block.key, None)
        self._fresh.difference_update(prefix)

    def _continues(self, prefix: Sequence[Block]) -> PrefixClass | None:
        """The class of the deepest block of this prefix that is, or was, here already."""
        for block in reversed(prefix):
            known = self._ghosts.get(block.key) if block in self._fresh else self._stored_as[block]
            if known is not None:
                return known
        return None

    def _share_continued(self, prefix_class: PrefixClass) -> float:
        """By the rule of succession, so that a class is neither hopeless nor certain at first."""
        continued = self._continued.get(prefix_class, 0) + 1
        return continued / (max(self._stored.get(prefix_class, 0), continued - 1) + 2)
