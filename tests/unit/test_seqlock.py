"""A reader in another process than the writer never takes mixed bytes for a block (D3)."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore import slots
from kvstore.arena import Arena
from kvstore.client.copiers import Copiers
from kvstore.client.planes import Lease, SharedMemoryPlane
from kvstore.types import BlockKey, Fingerprint, MissReason, NamespaceInfo

SIZES = (64 << 10, 200_000)
SLAB_BYTES = 1 << 20
SLABS = 2
EPOCH = 12345
READS_MIN = 300
OVERWRITES_MIN = 20
DEADLINE_S = 40.0


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def rewrite(path: Path, ready: Event, done: Event) -> None:
    """Evicts and rewrites slots of two sizes, so that slabs change their size too."""
    arena = Arena(path, slots.PAGE_BYTES + SLABS * SLAB_BYTES, EPOCH, SLAB_BYTES)
    chance = random.Random(1)
    live: list[int] = []
    number = 0
    while not done.is_set():
        size = SIZES[(number // 300) % 2]
        number += 1
        offset = arena.allocate(size)
        while offset is None:
            arena.free(live.pop(chance.randrange(len(live))))
            offset = arena.allocate(size)
        view = arena.begin(offset, key_of(number), size)
        view[:] = bytes([number % 251]) * size
        arena.publish(offset, None)
        live.append(offset)
        ready.set()
    arena.close()


def test_no_read_that_passes_the_checks_has_mixed_bytes(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/kvstore-seqlock-{os.getpid()}.arena")
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    writer = context.Process(target=rewrite, args=(path, ready, done))
    writer.start()
    try:
        assert ready.wait(DEADLINE_S)
        mapping = slots.open_mapping(path, slots.PAGE_BYTES + SLABS * SLAB_BYTES, EPOCH)
        assert mapping is not None
        arena = memoryview(mapping)
        attached = cast(Any, SimpleNamespace(arena=arena, verify_always=False))
        plane = SharedMemoryPlane(attached, cast(Any, None), Copiers(1))
        copies: list[bytes] = []
        give_up_s = time.monotonic() + DEADLINE_S
        good = overwritten = 0
        chance = random.Random(2)
        while good < READS_MIN or overwritten < OVERWRITES_MIN:
            assert time.monotonic() < give_up_s, f"{good} good, {overwritten} overwritten"
            size = chance.choice(SIZES)
            stride = slots.slot_bytes(size)
            slab = slots.PAGE_BYTES + chance.randrange(SLABS) * SLAB_BYTES
            offset = slab + chance.randrange(SLAB_BYTES // stride) * stride
            header = slots.read_header(arena, offset)
            number = int.from_bytes(header.key, "little")
            if header.generation % 2 or header.payload_bytes != size or not 0 < number < 1 << 32:
                continue
            info = NamespaceInfo(Fingerprint(bytes(32)), size, 16)
            lease = Lease(1, [header.key], [True], [offset], [header.generation])

            def sink(index: int, view: memoryview) -> None:
                copies.append(bytes(view))

            copies.clear()
            result = plane._read(info, lease, 0, offset, header.generation, sink)
            if result is MissReason.OVERWRITTEN:
                overwritten += 1
                continue
            assert result is None
            good += 1
            assert copies[0].count(number % 251) == size, "bytes of another block"
        arena.release()
        mapping.close()
    finally:
        done.set()
        writer.join(DEADLINE_S)
        assert not writer.is_alive()
    assert writer.exitcode == 0


@pytest.fixture
def arena() -> Any:
    made = Arena(
        Path(f"/dev/shm/kvstore-seqlock-one-{os.getpid()}.arena"),
        slots.PAGE_BYTES + SLAB_BYTES,
        EPOCH,
        SLAB_BYTES,
    )
    yield made
    made.close()


def read_while(arena: Arena, during: Any) -> MissReason | None:
    """Reads a block of key 1 while something happens in the middle of the copy."""
    info = NamespaceInfo(Fingerprint(bytes(32)), 1000, 16)
    offset = arena.allocate(1000)
    assert offset is not None
    arena.begin(offset, key_of(1), 1000)
    generation = arena.publish(offset, None)
    attached = cast(Any, SimpleNamespace(arena=arena.buffer, verify_always=False))
    plane = SharedMemoryPlane(attached, cast(Any, None), Copiers(1))
    lease = Lease(1, [key_of(1)], [True], [offset], [generation])
    return plane._read(info, lease, 0, offset, generation, lambda *_: during(offset))


def test_a_read_that_nothing_disturbs_is_whole(arena: Arena) -> None:
    assert read_while(arena, lambda offset: None) is None


def test_sealing_a_block_does_not_disturb_its_readers(arena: Arena) -> None:
    assert read_while(arena, lambda offset: arena.seal(offset, 7)) is None


def test_a_block_that_goes_during_the_copy_is_overwritten(arena: Arena) -> None:
    assert read_while(arena, arena.free) is MissReason.OVERWRITTEN


def test_a_reader_stopped_while_the_slot_served_others_and_came_back_is_overwritten(
    arena: Arena,
) -> None:
    def reuse(offset: int) -> None:
        arena.free(offset)
        large = arena.allocate(500_000)  # the same slab as one of another size, and back
        assert large is not None
        arena.begin(large, key_of(2), 500_000)[:] = bytes(500_000)
        arena.publish(large, None)
        arena.free(large)
        assert arena.allocate(1000) == offset
        arena.begin(offset, key_of(3), 1000)
        arena.publish(offset, None)

    assert read_while(arena, reuse) is MissReason.OVERWRITTEN
