"""What no policy can beat: a store without limits, and one that knows the future.

Both count as a replay does: a hit is a block in the longest present run from the start of its
request, and what a request asked for may be stored after it. Only a prefix is useful, so a block
is kept no longer than those before it. The optimal store evicts the leaf whose next use is
furthest (Belady 1966), and does not store a block whose own next use is further still.

The longest run, rather than the number of single blocks, is what is counted, but evicting by the
next use is optimal for it too: the blocks before a leaf are used no later than the leaf is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvstore.replay.trace import Numbers, Trace


def infinite_hits(trace: Trace) -> Numbers:
    """Hit blocks of each request, in a store that keeps all blocks of earlier requests."""
    _, firsts = np.unique(trace.ids, return_index=True)
    fresh = np.full(trace.blocks + 1, trace.blocks, np.int64)
    fresh[firsts] = firsts
    # A request's run ends at its first block that no earlier one has asked for.
    hits = np.zeros(trace.requests, np.int64)
    some = trace.lengths > 0
    if some.any():
        ends = np.minimum.reduceat(fresh, trace.starts[:-1][some])
        hits[some] = np.minimum(ends, trace.starts[1:][some]) - trace.starts[:-1][some]
    return hits


class Future:
    """Of each block asked for: which block it is, and the next request that asks for it."""

    def __init__(self, trace: Trace):
        self.trace = trace
        unique, nodes = np.unique(trace.ids, return_inverse=True)
        self.unique_blocks = len(unique)
        self.nodes = nodes.astype(np.int32)
        self.never = trace.requests
        """Stands for the next use of a block that isn't used again."""
        request_of = np.repeat(np.arange(trace.requests, dtype=np.int32), trace.lengths)
        order = np.argsort(nodes, kind="stable")
        following = np.full(trace.blocks, self.never, np.int32)
        same = nodes[order[:-1]] == nodes[order[1:]]
        following[order[:-1][same]] = request_of[order[1:][same]]
        self.next_use = following


def optimal_hits(
    future: Future, capacity_blocks: int, advance: Callable[[int], None] = lambda requests: None
) -> tuple[Numbers, Numbers]:
    """Hit blocks and stored blocks of each request, in the optimal store of this capacity.

    `advance` hears of requests done.
    """
    trace, never = future.trace, future.never
    next_use = [-1] * future.unique_blocks
    """Of present blocks; -1 for absent ones."""
    parents = [-1] * future.unique_blocks
    children = [0] * future.unique_blocks
    leaves: list[tuple[int, int]] = []
    """Leaves as (-next use, block). Out of date where it isn't the block's next use any more."""
    free = capacity_blocks
    hits = np.zeros(trace.requests, np.int64)
    stored = np.zeros(trace.requests, np.int64)

    def evict(sooner_than: int) -> bool:
        """Makes room for a block with this next use, unless it is the furthest itself."""
        while leaves and -leaves[0][0] > sooner_than:
            negative, node = heapq.heappop(leaves)
            if next_use[node] != -negative or children[node]:
                continue
            next_use[node] = -1
            parent = parents[node]
            if parent >= 0:
                children[parent] -= 1
                if not children[parent] and next_use[parent] >= 0:
                    heapq.heappush(leaves, (-next_use[parent], parent))
            return True
        return False

    for index in range(trace.requests):
        start, end = int(trace.starts[index]), int(trace.starts[index + 1])
        nodes = future.nodes[start:end].tolist()
        uses = future.next_use[start:end].tolist()
        hit, last = 0, -1
        # What the request uses is not among the leaves until it ends, so it can't be evicted.
        for node, use in zip(nodes, uses, strict=True):
            if next_use[node] < 0:
                break
            next_use[node] = use
            hit, last = hit + 1, node
        hits[index] = hit
        written = 0
        for node, use in zip(nodes[hit:], uses[hit:], strict=True):
            if use == never:
                break
            if next_use[node] >= 0:  # asked for before without those before it
                next_use[node], last = use, node
                if not children[node]:
                    heapq.heappush(leaves, (-use, node))
                continue
            if free:
                free -= 1
            elif not evict(use):
                break
            next_use[node], parents[node] = use, last
            if last >= 0:
                children[last] += 1
            written, last = written + 1, node
        stored[index] = written
        if last >= 0 and not children[last]:
            heapq.heappush(leaves, (-next_use[last], last))
        advance(1)
    return hits, stored
