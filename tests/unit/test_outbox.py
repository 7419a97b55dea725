"""Write-through in the background: bounded, counted, and nothing stays pinned."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore import codec, slots
from kvstore.arena import Arena
from kvstore.eviction.lru import LRU
from kvstore.index import Block
from kvstore.outbox import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX, Outbox
from kvstore.pace import Pace
from kvstore.testing import FakeClock
from kvstore.tiers.base import RemoteTier
from kvstore.tiers.cpu import CpuTier
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo, Outcome

BLOCK_BYTES = 1000
INFO = NamespaceInfo(Fingerprint(b"n" * 32), BLOCK_BYTES, 16)


class Remote:
    """Takes batches as it is told to."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[BlockKey], BlockKey | None]] = []
        self.checksums: list[int] = []
        self.outcome: Outcome | Exception = Outcome.OK
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()

    def put_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        checksums: Sequence[int],
        parent: BlockKey | None = None,
    ) -> list[Outcome]:
        self.entered.set()
        assert self.go_on.wait(20)
        for block, checksum in zip(blocks, checksums, strict=True):
            assert codec.checksum(block) == checksum
        self.batches.append((list(keys), parent))
        self.checksums.extend(checksums)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome] * len(keys)


@pytest.fixture
def cpu() -> Iterator[CpuTier]:
    path = Path(f"/dev/shm/kvstore-outbox-{os.getpid()}.arena")
    tier = CpuTier(Arena(path, slots.PAGE_BYTES + (1 << 20), 1, 1 << 20), LRU)
    yield tier
    tier.arena.close()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def store(cpu: CpuTier, first: int, count: int, parent: BlockKey | None = None) -> list[Block]:
    """Blocks of one prefix, committed."""
    keys = [key_of(number) for number in range(first, first + count)]
    blocks = cpu.reserve(cpu.open(INFO), keys, parent).blocks
    for block in blocks:
        cpu.view(block)[:] = block.key[-1:] * BLOCK_BYTES
        cpu.commit(block)
    return blocks


def run(outbox: Outbox, test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test beside the outbox's task."""

    async def both() -> None:
        task = asyncio.create_task(outbox.run())
        try:
            async with asyncio.timeout(20):
                await test()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(both())


def make(cpu: CpuTier, remote: Remote, executor: ThreadPoolExecutor, blocks: int = 100) -> Outbox:
    limit = blocks * BLOCK_BYTES
    return Outbox(cpu, cast(RemoteTier, remote), executor, limit, Pace(), FakeClock())


def test_blocks_of_one_prefix_go_as_one_batch_with_their_checksums(
    cpu: CpuTier, executor: ThreadPoolExecutor
) -> None:
    remote = Remote()
    outbox = make(cpu, remote, executor)

    async def test() -> None:
        blocks = store(cpu, 0, 3) + store(cpu, 10, 2, parent=key_of(9))
        for block in blocks:
            outbox.add(block)
        assert [block.pins for block in blocks] == [1] * 5
        await outbox.drained()
        assert remote.batches == [
            ([key_of(0), key_of(1), key_of(2)], None),
            ([key_of(10), key_of(11)], key_of(9)),
        ]
        assert [block.pins for block in blocks] == [0] * 5
        assert [block.checksum for block in blocks] == remote.checksums
        header = slots.read_header(cpu.arena.buffer, blocks[0].offset)
        assert header.checksum == blocks[0].checksum
        assert outbox.counters.written == 5
        assert len(outbox) == 0

    run(outbox, test)


def test_a_batch_is_bounded(cpu: CpuTier, executor: ThreadPoolExecutor) -> None:
    remote = Remote()
    outbox = make(cpu, remote, executor, 1000)

    async def test() -> None:
        for block in store(cpu, 0, 2 * BATCH_BLOCKS_MAX + 5):
            outbox.add(block)
        await outbox.drained()
        sizes = [len(keys) for keys, _ in remote.batches]
        assert sizes == [BATCH_BLOCKS_MAX, BATCH_BLOCKS_MAX, 5]
        assert max(sizes) * BLOCK_BYTES <= BATCH_BYTES_MAX

    run(outbox, test)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_whatever_the_remote_tier_says_the_pins_are_released_and_it_is_counted(
    cpu: CpuTier, executor: ThreadPoolExecutor, outcome: Outcome
) -> None:
    remote = Remote()
    remote.outcome = outcome
    outbox = make(cpu, remote, executor, blocks=4)

    async def test() -> None:
        for first in (0, 10):  # twice, so that the queue's bytes are seen to be given back
            blocks = store(cpu, first, 4)
            for block in blocks:
                outbox.add(block)
            await outbox.drained()
            assert [block.pins for block in blocks] == [0] * 4
        written = 8 if outcome in (Outcome.OK, Outcome.PRESENT) else 0
        counters = outbox.counters
        assert (counters.written, counters.failed) == (written, 8 - written)
        assert counters.dropped_full == 0

    run(outbox, test)


def test_a_full_queue_drops_counts_and_pins_nothing(
    cpu: CpuTier, executor: ThreadPoolExecutor
) -> None:
    remote = Remote()
    remote.go_on.clear()
    outbox = make(cpu, remote, executor, blocks=3)

    async def test() -> None:
        blocks = store(cpu, 0, 5)
        for block in blocks:
            outbox.add(block)
        assert [block.pins for block in blocks] == [1, 1, 1, 0, 0]
        assert outbox.counters.dropped_full == 2
        remote.go_on.set()
        await outbox.drained()
        outbox.add(blocks[3])
        await outbox.drained()
        assert outbox.counters.written == 4

    run(outbox, test)


def test_an_error_of_the_remote_tier_ends_the_task_and_leaves_nothing_pinned(
    cpu: CpuTier, executor: ThreadPoolExecutor
) -> None:
    remote = Remote()
    remote.outcome = ValueError("a bug")
    outbox = make(cpu, remote, executor)

    async def test() -> None:
        blocks = store(cpu, 0, 3)
        for block in blocks:
            outbox.add(block)
        with pytest.raises(ValueError, match="a bug"):
            await outbox.run()
        assert [block.pins for block in blocks] == [0] * 3
        assert outbox.counters.failed == 3

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_cancelled_write_keeps_its_blocks_pinned_until_the_thread_is_done(
    cpu: CpuTier, executor: ThreadPoolExecutor
) -> None:
    remote = Remote()
    remote.go_on.clear()
    outbox = make(cpu, remote, executor)

    async def test() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(outbox.run())
        blocks = store(cpu, 0, 2)
        for block in blocks:
            outbox.add(block)
        await asyncio.to_thread(remote.entered.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        assert [block.pins for block in blocks] == [1, 1]
        remote.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [block.pins for block in blocks] == [0, 0]
        assert outbox.counters.written == 2

    asyncio.run(asyncio.wait_for(test(), 20))
