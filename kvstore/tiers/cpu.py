"""The CPU tier: the arena, its index, and room made by eviction.

Clients on this host copy in place, so beside the contract there is `reserve`, `commit` and
`abort` for writing, and `lookup` with pins for reading. Invariants: a block is in the index only
while its slot is readable; a block goes no sooner than those that follow it; a pinned block
stays; a slot is freed only when nobody can be writing to it.

Room is made by the policy of the block's own size. A size that holds no slab, or whose coldest
block is much warmer than another size's, is starved: it takes over a slab from the coldest size,
the one whose blocks were used least recently, with all that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvstore import slots
from kvstore.arena import Arena
from kvstore.errors import NamespaceConflict, TooMany
from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.coldest import coldest
from kvstore.index import Block, Namespace
from kvstore.tiers.base import Tier, check_batch
from kvstore.types import (
    BlockKey,
    Fingerprint,
    NamespaceInfo,
    Outcome,
    TierName,
    TierState,
    TierStatus,
)

STARVATION_RATIO = 2
"""A size is starved when its coldest block was used this many times more recently than
another's. Below, two sizes in steady use would take slabs from each other back and forth, and
each move drops a slab's blocks out of order."""

NAMESPACES_MAX = 4096

BLOCKS_SAMPLED = 64
"""How many of a slab's blocks say how warm it is. Choosing a slab must not take longer with more
blocks: the event loop waits for it."""

BLOCKS_LOOKED_AT_MAX = 16_384
"""After so many blocks of slabs that can't be emptied, no other slab is tried."""


class Answer(Enum):
    """What `reserve` says of one block."""

    RESERVED = "reserved"
    PRESENT = "present"
    BUSY = "busy"
    NO_SPACE = "no_space"


@dataclass(slots=True)
class CpuCounters:
    """What happened since the start."""

    stored: int = 0
    evicted: int = 0
    aborted: int = 0
    no_space: int = 0
    slabs_moved: int = 0


@dataclass(slots=True)
class Reservation:
    """Answers in the order of the keys, and the blocks that were RESERVED, in order."""

    answers: list[Answer] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


class CpuTier(Tier[memoryview]):
    """Blocks in shared memory. Used by one thread; payloads may be copied by any."""

    name = TierName.CPU

    def __init__(
        self,
        arena: Arena,
        policy: Callable[[], EvictionPolicy],
        on_evicted: Callable[[Block], None] = lambda block: None,
    ):
        """`policy` makes one policy for each block size; `on_evicted` hears of each eviction."""
        self.arena = arena
        self.counters = CpuCounters()
        self._new_policy = policy
        self._policies: dict[int, EvictionPolicy] = {}
        self._namespaces: dict[Fingerprint, Namespace] = {}
        self._on_evicted = on_evicted
        self._uses = 0
        self._aside: set[Block] = set()
        self._slabs: dict[int, list[Block | None]] = {}
        """By slab, the block that has each slot: readable, reserved or set aside."""

    # -- namespaces

    def open(self, info: NamespaceInfo) -> Namespace:
        """The namespace's index, made when new.

        Raises:
            NamespaceConflict: it is open with another block size.
            InvalidRequest: no slab could hold its blocks.
            TooMany: `NAMESPACES_MAX` namespaces are open.
        """
        namespace = self._namespaces.get(info.fingerprint)
        if namespace is None:
            self.arena.check_payload_bytes(info.block_bytes)
            if len(self._namespaces) >= NAMESPACES_MAX:
                raise TooMany(f"{NAMESPACES_MAX} namespaces are open; restart to forget old ones")
            namespace = self._namespaces[info.fingerprint] = Namespace(info)
        known = namespace.info
        if (known.block_bytes, known.block_tokens) != (info.block_bytes, info.block_tokens):
            raise NamespaceConflict(
                f"namespace {info.fingerprint.hex()[:16]} is open with blocks of "
                f"{known.block_tokens} tokens and {known.block_bytes} bytes, not "
                f"{info.block_tokens} and {info.block_bytes}: the layout's fingerprint lacks "
                "something that decides the size"
            )
        return namespace

    def find_namespace(self, fingerprint: Fingerprint) -> Namespace | None:
        """The namespace's index, if it is open."""
        return self._namespaces.get(fingerprint)

    @property
    def namespaces(self) -> list[Namespace]:
        """All open namespaces."""
        return list(self._namespaces.values())

    # -- reading in place

    def touch(self, path: Sequence[Block]) -> None:
        """Notes that these blocks of one prefix, in order, were used, and so those before them."""
        if not path:
            return
        # A block that is being stored is no part of the order yet.
        prefix = [block for block in path[0].ancestors() if block.generation]
        prefix.extend(path)
        self._uses += 1
        uses = self._uses
        for block in prefix:
            block.touched = uses
        self._policy(path[0]).touch(prefix)

    def view(self, block: Block) -> memoryview:
        """The block's payload in place. Valid while the block is pinned or reserved."""
        return slots.payload(self.arena.buffer, block.offset, block.namespace.info.block_bytes)

    # -- writing in place

    def reserve(
        self, namespace: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> Reservation:
        """Takes a slot for each block that is not here yet, evicting as needed.

        A reserved block is invisible, and its slot is the caller's to write to, until `commit`
        or `abort`. Blocks after one that found no room are not tried: they could not be reached.
        """
        reservation = Reservation()
        held: list[Block] = []  # the prefix that this store extends must not make its own room
        try:
            for key in keys:
                present = namespace.get(key)
                if present is not None:
                    answer = Answer.PRESENT
                    present.pins += 1
                    held.append(present)
                elif namespace.is_pending(key):
                    answer = Answer.BUSY
                elif Answer.NO_SPACE in reservation.answers[-1:]:
                    answer = Answer.NO_SPACE
                else:
                    answer = self._reserve_one(namespace, key, parent, reservation)
                reservation.answers.append(answer)
                parent = key
        finally:
            for block in held:
                block.pins -= 1
        self.counters.no_space += reservation.answers.count(Answer.NO_SPACE)
        return reservation

    def _reserve_one(
        self,
        namespace: Namespace,
        key: BlockKey,
        parent: BlockKey | None,
        reservation: Reservation,
    ) -> Answer:
        parent_block = namespace.get(parent) if parent is not None else None
        if parent_block is not None:
            parent_block.pins += 1
        offset = self._allocate(namespace.info.block_bytes)
        if parent_block is not None:
            parent_block.pins -= 1
        if offset is None:
            return Answer.NO_SPACE
        block = Block(namespace, key, parent, offset)
        slab, slot = self.arena.place_of(offset)
        if slab not in self._slabs:
            self._slabs[slab] = [None] * self.arena.slot_count(slab)
        self._slabs[slab][slot] = block
        self.arena.begin(offset, key, namespace.info.block_bytes)
        namespace.begin(block)
        reservation.blocks.append(block)
        return Answer.RESERVED

    def commit(self, block: Block, checksum: int | None = None) -> None:
        """Makes a written block readable. The caller touches it and those stored with it then."""
        block.generation = self.arena.publish(block.offset, checksum)
        block.checksum = checksum
        block.namespace.commit(block)
        self._policy(block).insert(block)
        self.counters.stored += 1

    def abort(self, block: Block) -> None:
        """Gives a reserved slot back. Nobody may be writing to it any more."""
        block.namespace.abort(block)
        self._free(block)
        self.counters.aborted += 1

    def set_aside(self, block: Block) -> None:
        """Forgets a reserved block, but keeps its slot: its holder may still be writing."""
        block.namespace.abort(block)
        self._aside.add(block)

    def free_aside(self, block: Block) -> None:
        """Frees a slot that was set aside, once nobody can be writing to it."""
        self._free(block)
        self._aside.remove(block)

    @property
    def set_aside_slots(self) -> int:
        """Slots whose reservation expired while its holder lives."""
        return len(self._aside)

    def seal(self, block: Block, checksum: int) -> None:
        """Adds the checksum of a readable block's bytes to it and to its slot."""
        block.checksum = checksum
        self.arena.seal(block.offset, checksum)

    def drop(self, block: Block) -> None:
        """Removes a readable, evictable block; its slot is free at once."""
        self._policy(block).remove(block)
        block.namespace.remove(block)
        self._free(block)
        block.generation = 0

    # -- the contract

    def contains(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool]:
        index = self.open(namespace)
        return [index.get(key) is not None for key in keys]

    def get(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        check_batch(namespace, keys, [buffer.nbytes for buffer in into])
        index = self.open(namespace)
        outcomes = []
        for key, buffer in zip(keys, into, strict=True):
            block = index.get(key)
            if block is None:
                outcomes.append(Outcome.ABSENT)
                continue
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self.view(block), np.uint8))
            header = slots.read_header(self.arena.buffer, block.offset)
            sound = (header.generation, header.key) == (block.generation, key)
            outcomes.append(Outcome.OK if sound else Outcome.CORRUPT)
            if not sound and block.evictable:
                self.drop(block)
        self.touch(index.longest_prefix(keys))
        return outcomes

    def put(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        check_batch(namespace, keys, [block.nbytes for block in blocks])
        reservation = self.reserve(self.open(namespace), keys, parent)
        data = dict(zip(keys, blocks, strict=True))
        for block in reservation.blocks:
            np.copyto(
                np.frombuffer(self.view(block), np.uint8), np.frombuffer(data[block.key], np.uint8)
            )
            self.commit(block)
        self.touch(reservation.blocks)
        meaning = {
            Answer.RESERVED: Outcome.OK,
            Answer.PRESENT: Outcome.PRESENT,
            Answer.BUSY: Outcome.PRESENT,
            Answer.NO_SPACE: Outcome.NO_SPACE,
        }
        return [meaning[answer] for answer in reservation.answers]

    def evict(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        index = self.open(namespace)
        dropped = 0
        for key in reversed(keys):
            block = index.get(key)
            if block is not None and block.evictable:
                self.drop(block)
                dropped += 1
        return dropped

    def clear(self, namespace: NamespaceInfo | None = None) -> int:
        chosen = self.namespaces if namespace is None else [self.open(namespace)]
        dropped = 0
        for index in chosen:
            leaves = [block for block in index if block.evictable]
            while leaves:
                block = leaves.pop()
                parent = block.parent
                self.drop(block)
                dropped += 1
                if parent is not None and parent.evictable and parent.generation:
                    leaves.append(parent)
        return dropped

    def status(self) -> TierStatus:
        counters = self.counters
        return TierStatus(
            TierName.CPU,
            TierState.UP,
            self.arena.capacity_bytes,
            self.arena.used_bytes,
            sum(len(namespace) for namespace in self._namespaces.values()),
            {
                "stored": counters.stored,
                "evicted": counters.evicted,
                "aborted": counters.aborted,
                "no_space": counters.no_space,
                "slabs_moved": counters.slabs_moved,
            },
        )

    # -- making room

    def _policy(self, block: Block) -> EvictionPolicy:
        return self._policy_of(block.namespace.info.block_bytes)

    def _policy_of(self, block_bytes: int) -> EvictionPolicy:
        if block_bytes not in self._policies:
            self._policies[block_bytes] = self._new_policy()
        return self._policies[block_bytes]

    def _allocate(self, block_bytes: int) -> int | None:
        offset = self.arena.allocate(block_bytes)
        if offset is not None:
            return offset
        own = self._coldest(block_bytes)
        donor = self._starving(block_bytes, own)
        if donor is not None and self._take_slab(donor):
            return self.arena.allocate(block_bytes)
        if own is None:
            return None
        self._evict(own)
        return self.arena.allocate(block_bytes)

    def _coldest(self, block_bytes: int) -> Block | None:
        return coldest(self._policy_of(block_bytes))

    def _starving(self, block_bytes: int, own: Block | None) -> int | None:
        """The block size to take a slab from, if this one is starved; else None."""
        others = {
            size: block
            for size in self._policies
            if size != block_bytes and (block := self._coldest(size)) is not None
        }
        if not others:
            return None
        donor = min(others, key=lambda size: others[size].touched)
        if own is None:
            return donor
        age, own_age = self._uses - others[donor].touched, self._uses - own.touched
        return donor if age > STARVATION_RATIO * max(own_age, 1) else None

    def _take_slab(self, block_bytes: int) -> bool:
        """Empties a cold slab of this size whose blocks, and all that follow, may go."""
        warmth = {slab: _warmth(self._slabs[slab]) for slab in self.arena.slabs(block_bytes)}
        looked_at = 0
        for slab in sorted(warmth, key=warmth.__getitem__):
            if looked_at > BLOCKS_LOOKED_AT_MAX:
                break
            looked_at += len(self._slabs[slab])
            doomed = self._in_or_after(slab)
            if not doomed:
                continue
            leaves = [block for block in doomed if block.evictable]
            while leaves:
                block = leaves.pop()
                parent = block.parent
                self._evict(block)
                if parent in doomed and parent.evictable:
                    leaves.append(parent)
            self.counters.slabs_moved += 1
            return True
        return False

    def _in_or_after(self, slab: int) -> set[Block]:
        """The blocks in the slab, and all that follow them; none when one of them must stay."""
        doomed: set[Block] = set()
        found = [block for block in self._slabs[slab] if block is not None]
        while found:
            block = found.pop()
            if block.pins or not block.generation:  # in use, or somebody may be writing to it
                return set()
            if block not in doomed:
                doomed.add(block)
                found.extend(block.children)
        return doomed

    def _free(self, block: Block) -> None:
        slab, slot = self.arena.place_of(block.offset)
        self._slabs[slab][slot] = None
        self.arena.free(block.offset)
        if not self.arena.in_use(slab):
            del self._slabs[slab]

    def _evict(self, block: Block) -> None:
        self.drop(block)
        self.counters.evicted += 1
        self._on_evicted(block)


def _warmth(blocks: Sequence[Block | None]) -> int:
    """The last use of the warmest of a sample of a slab's blocks."""
    step = -(-len(blocks) // BLOCKS_SAMPLED)
    return max((block.touched for block in blocks[::step] if block is not None), default=0)
