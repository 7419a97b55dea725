"""Written through in the background: committed blocks on their way to the remote tier.

A block that waits here is pinned in the arena. The queue is bounded in bytes; when it is full, or
the remote tier is down, blocks stay in the arena alone, and are counted. The checksum is
computed here too, off the path of the request that stored the block.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvstore import codec
from kvstore.clock import Clock
from kvstore.index import Block
from kvstore.pace import Pace
from kvstore.tiers.base import RemoteTier
from kvstore.tiers.cpu import CpuTier
from kvstore.types import Outcome

BATCH_BYTES_MAX = 16 << 20
BATCH_BLOCKS_MAX = 64


@dataclass(slots=True)
class OutboxCounters:
    """What became of committed blocks."""

    written: int = 0
    dropped_full: int = 0
    """The queue was full."""
    failed: int = 0
    """The remote tier was down, full, or too slow."""


class Outbox:
    """A bounded queue and the task that empties it. Used within one event loop."""

    def __init__(
        self,
        cpu: CpuTier,
        remote: RemoteTier,
        executor: Executor,
        queue_bytes_max: int,
        pace: Pace,
        clock: Clock,
    ):
        self.counters = OutboxCounters()
        self._cpu = cpu
        self._remote = remote
        self._executor = executor
        self._queue_bytes_max = queue_bytes_max
        self._pace = pace
        self._clock = clock
        self._queue: deque[Block] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, block: Block) -> None:
        """Takes a block that was just committed, or counts it as dropped."""
        block_bytes = block.namespace.info.block_bytes
        if self._queued_bytes + block_bytes > self._queue_bytes_max:
            self.counters.dropped_full += 1
            return
        block.pins += 1
        self._queue.append(block)
        self._queued_bytes += block_bytes
        self._idle.clear()
        self._wake.set()

    async def drained(self) -> None:
        """Waits until nothing is queued or being written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Writes batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            while self._queue:
                batch = self._next_batch()
                # Shielded by its own future: the thread reads the blocks' slots, so they stay
                # pinned until it is done, also when this task is cancelled.
                write = loop.run_in_executor(self._executor, self._write, batch)
                try:
                    await asyncio.shield(write)
                finally:
                    if not write.done():
                        await asyncio.wait([write])
                    self._finish(batch, write)
            self._wake.clear()
            self._idle.set()

    def _next_batch(self) -> list[Block]:
        """Consecutive blocks of one prefix, from the queue's head."""
        batch = [self._queue.popleft()]
        block_bytes = batch[0].namespace.info.block_bytes
        limit = min(max(1, BATCH_BYTES_MAX // block_bytes), BATCH_BLOCKS_MAX)
        while self._queue and len(batch) < limit and self._queue[0].parent_key == batch[-1].key:
            batch.append(self._queue.popleft())
        return batch

    def _write(self, batch: Sequence[Block]) -> list[tuple[int, Outcome]]:
        views = [self._cpu.view(block) for block in batch]
        checksums = [
            block.checksum if block.checksum is not None else codec.checksum(view)
            for block, view in zip(batch, views, strict=True)
        ]
        info = batch[0].namespace.info
        started_s = self._clock.monotonic_s()
        outcomes = self._remote.put_summed(
            info,
            [block.key for block in batch],
            views,
            checksums,
            batch[0].parent_key,
        )
        size_bytes = outcomes.count(Outcome.OK) * info.block_bytes
        self._pace.note_batch(size_bytes, self._clock.monotonic_s() - started_s)
        return list(zip(checksums, outcomes, strict=True))

    def _finish(
        self, batch: Sequence[Block], write: asyncio.Future[list[tuple[int, Outcome]]]
    ) -> None:
        """Unpins the blocks, whatever became of the write."""
        written = not write.cancelled() and write.exception() is None
        results: Sequence[tuple[int | None, Outcome]] = (
            write.result() if written else [(None, Outcome.FAILED)] * len(batch)
        )
        for block, (checksum, outcome) in zip(batch, results, strict=True):
            if block.checksum is None and checksum is not None:
                self._cpu.seal(block, checksum)
            block.pins -= 1
            self._queued_bytes -= block.namespace.info.block_bytes
            if outcome in (Outcome.OK, Outcome.PRESENT):
                self.counters.written += 1
            else:
                self.counters.failed += 1
