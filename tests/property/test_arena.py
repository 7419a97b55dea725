"""The arena against a plain model: slots never overlap, counts are exact, slabs come back."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import slots
from kvstore.arena import Arena
from kvstore.types import BlockKey

SLAB_BYTES = 64 << 10
SLABS = 4
SIZES = [1, 64, 1000, 20_000, SLAB_BYTES - slots.HEADER_BYTES]
_numbers = itertools.count()


def new_arena() -> Arena:
    path = Path(f"/dev/shm/kvstore-property-{os.getpid()}-{next(_numbers)}.arena")
    return Arena(path, slots.PAGE_BYTES + SLABS * SLAB_BYTES, epoch=1, slab_bytes=SLAB_BYTES)


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena()
        self.live: dict[int, int] = {}  # offset to payload bytes
        self.written: dict[int, tuple[BlockKey, int, int | None]] = {}
        self.generations: dict[int, set[int]] = {}
        self.keys = itertools.count()

    def teardown(self) -> None:
        try:
            for offset in list(self.live):
                self.arena.free(offset)
            assert (self.arena.used_bytes, self.arena.empty_slabs) == (0, SLABS)
        finally:
            self.arena.close()

    @rule(size=st.sampled_from(SIZES))
    def allocate(self, size: int) -> None:
        fits = len(self.arena.slabs(size)) * (SLAB_BYTES // slots.slot_bytes(size))
        room = list(self.live.values()).count(size) < fits or self.arena.empty_slabs > 0
        offset = self.arena.allocate(size)
        assert (offset is not None) == room
        if offset is not None:
            assert offset not in self.live
            self.live[offset] = size

    @precondition(lambda self: self.live)
    @rule(data=st.data(), checksum=st.none() | st.integers(0, 2**64 - 1))
    def write(self, data: st.DataObject, checksum: int | None) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        key = BlockKey(next(self.keys).to_bytes(32, "little"))
        view = self.arena.begin(offset, key, self.live[offset])
        assert slots.read_generation(self.arena.buffer, offset) % 2 == 1
        view[:] = bytes([key[0]]) * len(view)
        generation = self.arena.publish(offset, checksum)
        assert generation % 2 == 0
        assert generation > 0
        assert generation not in self.generations.setdefault(offset, set())
        self.generations[offset].add(generation)
        self.written[offset] = (key, generation, checksum)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), checksum=st.integers(0, 2**64 - 1))
    def seal(self, data: st.DataObject, checksum: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.written)))
        self.arena.seal(offset, checksum)
        self.written[offset] = (*self.written[offset][:2], checksum)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.arena.free(offset)
        assert slots.read_generation(self.arena.buffer, offset) % 2 == 1
        del self.live[offset]
        self.written.pop(offset, None)

    @invariant()
    def no_two_slots_overlap_and_each_is_within_one_slab(self) -> None:
        end = slots.PAGE_BYTES
        for offset, size in sorted(self.live.items()):
            assert offset >= end
            assert offset % slots.ALIGNMENT_BYTES == 0
            end = offset + slots.slot_bytes(size)
            assert self.arena.slab_of(offset) == self.arena.slab_of(end - 1)
        assert end <= self.arena.mapping_bytes

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.arena.used_bytes == sum(self.live.values()) <= self.arena.capacity_bytes
        busy = {self.arena.slab_of(offset) for offset in self.live}
        assert self.arena.empty_slabs == SLABS - len(busy)
        for size in SIZES:
            slabs = {self.arena.slab_of(at) for at, taken in self.live.items() if taken == size}
            assert len(self.arena.slabs(size)) == len(slabs)

    @invariant()
    def what_was_written_is_still_there(self) -> None:
        for offset, (key, generation, checksum) in self.written.items():
            header = slots.read_header(self.arena.buffer, offset)
            assert header == (generation, key, self.live[offset], checksum)
            view = slots.payload(self.arena.buffer, offset, header.payload_bytes)
            assert view[0] == view[-1] == key[0]
            assert bytes(view).count(key[0]) == len(view)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_slot_whose_slab_served_another_size_meanwhile_never_repeats_a_generation() -> None:
    """Else a reader that was stopped in between would take another block for its own."""
    arena = new_arena()
    try:
        seen = set()
        for _ in range(3):
            offsets = [arena.allocate(1000) for _ in range(2)]
            for offset in offsets:
                assert offset is not None
                arena.begin(offset, BlockKey(bytes(32)), 1000)
                generation = arena.publish(offset, None)
                assert (offset, generation) not in seen
                seen.add((offset, generation))
            for offset in offsets:
                assert offset is not None
                arena.free(offset)
            # The same memory as one large block of zeros, which covers both headers.
            large = arena.allocate(SIZES[-1])
            assert large is not None
            assert arena.slab_of(large) == arena.slab_of(offsets[0] or 0)
            arena.begin(large, BlockKey(bytes(32)), SIZES[-1])[:] = bytes(SIZES[-1])
            arena.publish(large, None)
            arena.free(large)
    finally:
        arena.close()
