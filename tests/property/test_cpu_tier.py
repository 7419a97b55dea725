"""The CPU tier under random reserve, commit, abort, pin and evict; its order; its slabs."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import slots
from kvstore.arena import Arena
from kvstore.eviction.lru import LRU
from kvstore.index import Block
from kvstore.tiers.cpu import Answer, CpuTier
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo, Outcome

SLAB_BYTES = 8 << 10
_numbers = itertools.count()


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


def info_of(block_bytes: int, name: str = "n") -> NamespaceInfo:
    fingerprint = Fingerprint(hashlib.sha256(f"{name}{block_bytes}".encode()).digest())
    return NamespaceInfo(fingerprint, block_bytes, 16)


def new_tier(slabs: int, slab_bytes: int = SLAB_BYTES) -> CpuTier:
    path = Path(f"/dev/shm/kvstore-cpu-{os.getpid()}-{next(_numbers)}.arena")
    return CpuTier(
        Arena(path, slots.PAGE_BYTES + slabs * slab_bytes, epoch=1, slab_bytes=slab_bytes), LRU
    )


@pytest.fixture
def tier() -> Iterator[CpuTier]:
    made = new_tier(slabs=4)
    yield made
    made.arena.close()


def put(tier: CpuTier, info: NamespaceInfo, keys: Sequence[BlockKey]) -> list[Outcome]:
    return tier.put(info, keys, [memoryview(bytes(info.block_bytes)) for _ in keys])


def present(tier: CpuTier, info: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
    return sum(tier.contains(info, keys))


# -- against a model

INFOS = [info_of(900), info_of(900, "other"), info_of(3000)]
PATHS = [
    [key_of(branch[: depth + 1]) for depth in range(4)]
    for branch in [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)]
]


class CpuMachine(RuleBasedStateMachine):
    """Everything that the server does to the tier, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = new_tier(slabs=3)
        self.tier._on_evicted = self.evicted
        self.reserved: list[Block] = []
        self.aside: list[Block] = []
        self.pinned: list[Block] = []

    def teardown(self) -> None:
        arena = self.tier.arena
        try:
            for block in self.reserved:
                self.tier.abort(block)
            for block in self.aside:
                self.tier.free_aside(block)
            for block in self.pinned:
                block.pins -= 1
            self.tier.clear()
            assert (arena.used_bytes, arena.empty_slabs) == (0, 3)
        finally:
            arena.close()

    def readable(self) -> list[Block]:
        return [block for namespace in self.tier.namespaces for block in namespace]

    def evicted(self, gone: Block) -> None:
        assert gone.pins == 0
        assert gone not in self.pinned
        assert gone not in self.reserved
        for block in self.readable():
            assert block.namespace is not gone.namespace or block.parent_key != gone.key

    def fill(self, block: Block) -> None:
        view = self.tier.view(block)
        view[:] = block.key[:1] * len(view)

    @rule(info=st.sampled_from(INFOS), path=st.sampled_from(PATHS), length=st.integers(1, 4))
    def reserve(self, info: NamespaceInfo, path: list[BlockKey], length: int) -> None:
        keys = path[:length]
        namespace = self.tier.open(info)
        before = [namespace.get(key) for key in keys]
        busy = [namespace.is_pending(key) for key in keys]
        reservation = self.tier.reserve(namespace, keys, None)
        assert len(reservation.answers) == length
        assert len(reservation.blocks) == reservation.answers.count(Answer.RESERVED)
        for block, was_busy, answer in zip(before, busy, reservation.answers, strict=True):
            assert (answer is Answer.BUSY) == was_busy
            if answer is Answer.PRESENT:
                assert block is not None
                assert block.generation
        for block in reservation.blocks:
            self.fill(block)
        self.reserved.extend(reservation.blocks)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), what=st.sampled_from(["commit", "commit", "commit", "abort", "aside"]))
    def finish(self, data: st.DataObject, what: str) -> None:
        block = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if what == "commit":
            self.tier.commit(block)
            self.tier.touch([block])
        elif what == "abort":
            self.tier.abort(block)
        else:
            self.tier.set_aside(block)
            self.aside.append(block)

    @precondition(lambda self: self.aside)
    @rule()
    def free_aside(self) -> None:
        self.tier.free_aside(self.aside.pop(0))

    @rule(info=st.sampled_from(INFOS), path=st.sampled_from(PATHS))
    def pin(self, info: NamespaceInfo, path: list[BlockKey]) -> None:
        run = self.tier.open(info).longest_prefix(path)
        for block in run:
            block.pins += 1
        self.pinned.extend(run)
        self.tier.touch(run)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin_all(self) -> None:
        while self.pinned:
            self.pinned.pop().pins -= 1

    @rule(info=st.sampled_from(INFOS), path=st.sampled_from(PATHS), first=st.integers(0, 3))
    def evict(self, info: NamespaceInfo, path: list[BlockKey], first: int) -> None:
        self.tier.evict(info, path[first:])

    @rule(info=st.sampled_from(INFOS))
    def clear(self, info: NamespaceInfo) -> None:
        self.tier.clear(info)
        stay = [block for block in self.readable() if block.namespace.info == info]
        for block in stay:
            assert block.pins or block.children

    @invariant()
    def pinned_blocks_stay(self) -> None:
        for block in self.pinned:
            assert block.namespace.get(block.key) is block

    @invariant()
    def no_slot_has_two_holders(self) -> None:
        end = slots.PAGE_BYTES
        holders = [*self.readable(), *self.reserved, *self.aside]
        for block in sorted(holders, key=lambda block: block.offset):
            assert block.offset >= end
            end = block.offset + slots.slot_bytes(block.namespace.info.block_bytes)
        used = sum(block.namespace.info.block_bytes for block in holders)
        assert self.tier.arena.used_bytes == used <= self.tier.arena.capacity_bytes
        assert self.tier.status().blocks == len(self.readable())
        assert self.tier.set_aside_slots == len(self.aside)

    @invariant()
    def readable_blocks_are_whole(self) -> None:
        for block in self.readable():
            header = slots.read_header(self.tier.arena.buffer, block.offset)
            assert (header.generation, header.key) == (block.generation, block.key)
            view = bytes(self.tier.view(block))
            assert view.count(block.key[0]) == len(view)

    @invariant()
    def reserved_blocks_are_invisible(self) -> None:
        for block in self.reserved:
            assert block.namespace.get(block.key) is None
            assert slots.read_generation(self.tier.arena.buffer, block.offset) % 2 == 1


TestCpuTier = CpuMachine.TestCase
TestCpuTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- order


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=80),
    blocks=st.integers(1, 8),
)
def test_what_stays_is_what_a_plain_lru_of_prefixes_keeps(
    requests: list[tuple[int, int]], blocks: int
) -> None:
    """Each request uses the head of one of six chains: loads what is there, stores the rest."""
    info = info_of(4096 - slots.HEADER_BYTES)
    tier = new_tier(slabs=1, slab_bytes=blocks * 4096)
    reference: dict[tuple[int, int], int] = {}  # block to its last use
    try:
        for now, (name, length) in enumerate(requests):
            keys = [key_of((name, depth)) for depth in range(length)]
            tier.get(info, keys, [memoryview(bytearray(info.block_bytes)) for _ in keys])
            put(tier, info, keys)
            for depth in range(length):
                if (name, depth) in reference:
                    reference[name, depth] = now
            for depth in range(length):
                if (name, depth) in reference:
                    continue
                if len(reference) == blocks:
                    victim = min(reference, key=lambda at: (reference[at], -at[1]))
                    if victim[0] == name:
                        break  # it would push out its own prefix
                    del reference[victim]
                reference[name, depth] = now
            here = {
                (other, depth)
                for other, depth in itertools.product(range(6), range(5))
                if present(tier, info, [key_of((other, depth))])
            }
            assert here == set(reference)
    finally:
        tier.arena.close()


# -- slabs and sizes


def test_a_size_without_a_slab_gets_one(tier: CpuTier) -> None:
    small, large = info_of(900), info_of(3000)
    put(tier, small, [key_of(number) for number in range(40)])
    assert tier.arena.empty_slabs == 0
    assert put(tier, large, [key_of("large")]) == [Outcome.OK]
    assert tier.counters.slabs_moved == 1
    assert len(tier.arena.slabs(3000)) == 1


def test_a_size_in_use_takes_the_slabs_of_one_that_nobody_uses(tier: CpuTier) -> None:
    small, large = info_of(900), info_of(3000)
    for number in range(40):
        put(tier, small, [key_of(("old", number))])
    for number in range(40):
        put(tier, large, [key_of(("new", number))])
    assert len(tier.arena.slabs(3000)) >= 3
    for number in range(200):
        put(tier, small, [key_of(("again", number))])
    assert len(tier.arena.slabs(900)) >= 3


def test_two_sizes_in_steady_use_do_not_take_slabs_from_each_other_for_ever(
    tier: CpuTier,
) -> None:
    small, large = info_of(900), info_of(3000)
    for number in range(400):
        put(tier, small, [key_of(("small", number))])
        put(tier, large, [key_of(("large", number))])
    settled = tier.counters.slabs_moved
    for number in range(400, 1200):
        put(tier, small, [key_of(("small", number))])
        put(tier, large, [key_of(("large", number))])
    assert tier.counters.slabs_moved - settled <= 2


def test_a_slab_with_a_pinned_or_reserved_block_is_not_taken(tier: CpuTier) -> None:
    small, large = info_of(900), info_of(3000)
    namespace = tier.open(small)
    put(tier, small, [key_of(number) for number in range(40)])
    blocks = list(namespace)
    by_slab = {tier.arena.slab_of(block.offset): block for block in blocks}
    assert len(by_slab) == 4
    for block in by_slab.values():
        block.pins += 1
    assert put(tier, large, [key_of("large")]) == [Outcome.NO_SPACE]
    assert all(namespace.get(block.key) is block for block in by_slab.values())
    for block in by_slab.values():
        block.pins -= 1
    assert put(tier, large, [key_of("large")]) == [Outcome.OK]


def test_a_slab_with_a_slot_set_aside_is_not_emptied_in_vain(tier: CpuTier) -> None:
    small, large = info_of(900), info_of(3000)
    namespace = tier.open(small)
    late = tier.reserve(namespace, [key_of("late")], None).blocks[0]
    for number in range(39):
        put(tier, small, [key_of(number)])
    assert tier.arena.empty_slabs == 0
    tier.set_aside(late)
    assert put(tier, large, [key_of("large")]) == [Outcome.OK]
    held = {tier.arena.slab_of(block.offset) for block in namespace}
    assert tier.arena.slab_of(late.offset) in held
    assert tier.counters.slabs_moved == 1
    tier.free_aside(late)
    assert tier.set_aside_slots == 0
