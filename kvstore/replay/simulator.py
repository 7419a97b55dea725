"""A store without tensors: its own index, eviction and admission, driven by a trace.

It does to them what the server does in a request's life. A lookup finds the longest present
prefix and touches it; what admission wants of the rest is reserved block by block, making room
as the CPU tier does, while the prefix that it extends is held; then it is committed and touched.
The tests hold it to the real CPU tier, hit by hit.

What a trace can't tell is left out: requests that overlap, leases that outlive their request,
and several block sizes in one arena.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.coldest import coldest
from kvstore.index import Block, Namespace
from kvstore.replay.admission import Admission
from kvstore.replay.trace import Numbers, Trace
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo


class TraceClock:
    """A `kvstore.clock.Clock` that stands at the time of the request being replayed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds since the trace's start."""
        return self.now_s

    def wall_s(self) -> float:
        """The same: a trace doesn't tell the date."""
        return self.now_s


class SimulatedTier:
    """The blocks of one store of limited capacity. Invariant: `len(self) <= capacity_blocks`."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int):
        self.index = Namespace(
            NamespaceInfo(Fingerprint(bytes(32)), block_bytes=1, block_tokens=1, model="trace")
        )
        self._policy = policy
        self._capacity = self._free = capacity_blocks

    def __len__(self) -> int:
        return len(self.index)

    @property
    def free(self) -> float:
        """The share that is free."""
        return self._free / self._capacity

    def find(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The longest present prefix, now touched."""
        found = self.index.longest_prefix(keys)
        if found:
            self._touch(found)
        return found

    def store(self, prefix: list[Block], keys: Sequence[BlockKey]) -> list[Block]:
        """Stores these blocks after a prefix that was found; those that find room, in order."""
        index = self.index
        new: list[Block] = []
        held = prefix[-1:]  # what this store extends must not make room for it
        for block in held:
            block.pins += 1
        parent_key = held[0].key if held else None
        for key in keys:
            present = index.get(key)  # after a block that was not: a trace may begin in the middle
            if present is not None:
                present.pins += 1
                held.append(present)
                parent_key = key
                continue
            if self._free:
                self._free -= 1
            elif not self._make_room():
                break
            block = Block(index, key, parent_key, 0)
            index.begin(block)
            new.append(block)
            parent_key = key
        for block in held:
            block.pins -= 1
        for block in new:
            block.generation = 1
            index.commit(block)
            self._policy.insert(block)
        if new:
            self._touch(new)
        return new

    def _touch(self, path: list[Block]) -> None:
        """A use of a block is a use of those before it, also of those that nobody asked for."""
        first = path[0]
        self._policy.touch(path if first.parent is None else [*first.ancestors(), *path])

    def drop(self, block: Block) -> None:
        """Removes a block that no other follows."""
        self._policy.remove(block)
        self.index.remove(block)
        block.generation = 0
        self._free += 1

    def _make_room(self) -> bool:
        victim = coldest(self._policy)
        if victim is None:
            return False
        self._policy.remove(victim)
        self.index.remove(victim)
        victim.generation = 0
        return True


class Expiry:
    """Drops what was not used for `ttl_s`, as the Redis tier's time to live does."""

    def __init__(self, tier: SimulatedTier, ttl_s: float):
        self._tier = tier
        self._ttl_s = ttl_s
        self._used_s: dict[Block, float] = {}
        """In the order of last uses."""

    def sweep(self, now_s: float) -> None:
        """Drops what has expired by now."""
        for block in list(self._expired(now_s)):
            del self._used_s[block]
            if block.generation:  # not evicted meanwhile
                self._tier.drop(block)

    def _expired(self, now_s: float) -> Iterator[Block]:
        # A prefix's blocks are ordered last to first, so each goes after those that follow it.
        for block, used_s in self._used_s.items():
            if block.generation and used_s + self._ttl_s > now_s:
                return
            yield block

    def note(self, prefix: Sequence[Block], now_s: float) -> None:
        """Notes that these blocks of one prefix were used."""
        for block in reversed(prefix):
            self._used_s.pop(block, None)
            self._used_s[block] = now_s


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of each request."""

    hits: Numbers
    """Blocks in the longest present prefix."""
    stored: Numbers
    """Blocks written."""


def replay(
    trace: Trace,
    policy: Callable[[TraceClock], EvictionPolicy],
    admission: Callable[[TraceClock, int], Admission],
    capacity_blocks: int,
    ttl_s: float | None = None,
    advance: Callable[[int], None] = lambda requests: None,
) -> Replayed:
    """Puts the trace's requests to a store, one after another. `advance` hears of requests done."""
    clock = TraceClock()
    tier = SimulatedTier(policy(clock), capacity_blocks)
    rule = admission(clock, capacity_blocks)
    expiry = Expiry(tier, ttl_s) if ttl_s is not None else None
    hits = np.zeros(trace.requests, np.int64)
    stored = np.zeros(trace.requests, np.int64)
    with _no_garbage_collection():
        for index, request in enumerate(trace):
            clock.now_s = request.time_s
            if expiry is not None:
                expiry.sweep(clock.now_s)
            prefix = tier.find(request.keys)
            hits[index] = hit = len(prefix)
            wanted = rule.admit(request, hit, tier.free)
            new = tier.store(prefix, request.keys[hit : hit + wanted]) if wanted else []
            stored[index] = len(new)
            if expiry is not None:
                expiry.note(prefix + new, clock.now_s)
            advance(1)
    return Replayed(hits, stored)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A block and its index refer to each other, but are taken apart when a block goes: only at
    the end is there garbage, and looking for it meanwhile would be a third of the time."""
    was_on = gc.isenabled()
    gc.collect(1)  # what the last replay left is young, since nothing has looked at it
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
