"""GreedyDual: recency plus the prefill seconds that a block would save.

After Cao and Irani, "Cost-aware WWW proxy caching algorithms" (1997). A block's worth is what
the worth of the last evicted block was when it was used, plus its cost: so worth ages without a
clock, and a block that costs twice as much to compute survives twice as many evictions. All
blocks of one policy have the same size, so seconds a block are seconds a byte.

A late block costs more than an early one, as its tokens attend to all before them. A block
can't go before those after it, so it is worth at least as much as they are. Costs are kept in
classes a fifth apart, each a queue in which worth only grows; the first of the worst queue is
the block to go.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block

CONTEXT_DOUBLING_TOKENS = 32_768
"""The context at which attention costs as much as all else. It is about six times a model's
hidden size: 24,576 for one of 8 billion parameters, 49,152 for one of 70."""

CLASSES_AN_OCTAVE = 4


class CostAware(EvictionPolicy):
    """The block whose prefill is cheap and whose last use is long ago goes first."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Block, float]] = {}
        self._classes: dict[Block, int] = {}
        self._age = 0.0

    def insert(self, block: Block) -> None:
        self._classes[block] = 0
        self._queues.setdefault(0, OrderedDict())[block] = self._age

    def touch(self, prefix: Sequence[Block]) -> None:
        if not prefix:
            return
        context_tokens = len(prefix) * prefix[0].namespace.info.block_tokens
        cost = 1 + context_tokens / CONTEXT_DOUBLING_TOKENS
        cost_class = round(CLASSES_AN_OCTAVE * math.log2(cost))
        worth = self._age + 2 ** (cost_class / CLASSES_AN_OCTAVE)
        queue = self._queues.setdefault(cost_class, OrderedDict())
        for block in reversed(prefix):
            old_queue = self._queues[self._classes[block]]
            if old_queue[block] <= worth:
                del old_queue[block]
                queue[block] = worth
                self._classes[block] = cost_class

    def remove(self, block: Block) -> None:
        queue = self._queues[self._classes.pop(block)]
        went_first = next(iter(queue)) is block
        worth = queue.pop(block)
        if went_first and worth > self._age:
            self._age = worth

    def candidates(self) -> Iterator[Block]:
        by_worth = (queue.items() for queue in self._queues.values())
        return (block for block, _ in heapq.merge(*by_worth, key=lambda item: item[1]))

    def __len__(self) -> int:
        return len(self._classes)
