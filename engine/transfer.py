"""Does the copying: loads, measured, and stores in the background, bounded, in order.

Stores wait in a queue that is bounded in bytes, so that an engine which produces KV faster than
it can be kept drops it and says so, rather than holding on to its memory. Knows nothing of
plans, costs, or what the bytes are.

Where an engine decides in one process and computes in others, each of these has a `Transfer` of
its own, and the deciding one a `Storing` that sends them its jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from kvstore.client import Found, Loaded, Namespace, Sink, Source, Stored
from kvstore.types import BlockKey, SkipReason, TierName

log = logging.getLogger("kvstore.engine")

QUEUE_BYTES_MAX = 2 << 30
LOADERS = 2


SourceT = TypeVar("SourceT")


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a load brought, and what it took."""

    loaded: Loaded
    load_s: float
    """Seconds from the call to the last block."""
    tiers: tuple[tuple[TierName, int, float], ...] = ()
    """Each tier's part: bytes, and seconds that went by until the last of them came."""


@dataclass(frozen=True, slots=True)
class StoreJob(Generic[SourceT]):
    """Consecutive blocks of a sequence to store, for each rank of an engine."""

    keys: tuple[Sequence[BlockKey], ...]
    """By rank."""
    parents: tuple[BlockKey | None, ...]
    """By rank: the key before the first one."""
    first: int
    """The first block's position in its sequence."""
    source: SourceT
    """Where the bytes are; readable until `done` is called."""
    size_bytes: int
    """Payload bytes at most, over all ranks."""
    done: Callable[[Stored], None]
    """Called on another thread, once, whatever happens."""


class Storing(Protocol[SourceT]):
    """Who carries out stores: a `Transfer`, or one that sends them to other processes."""

    def store(self, job: StoreJob[SourceT]) -> bool:
        """Queues a store; False when it is refused, and then `done` has been called."""
        ...

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything queued is stored; False when that takes longer."""
        ...

    def close(self) -> None:
        """Stores what is queued, and ends the threads."""
        ...


def load(namespace: Namespace, found: Found, sink: Sink, count: int, timeout_s: float) -> Arrived:
    """Hands the first `count` found blocks to the sink, and measures each tier.

    The lookup's lease is released.
    """
    started_s = previous_s = time.perf_counter()
    last_s: dict[TierName, float] = {}
    tiers = [tier for tier, blocks in found.runs for _ in range(blocks)]

    def timed(position: int, view: memoryview) -> None:
        sink(position, view)
        last_s[tiers[position]] = time.perf_counter()

    loaded = namespace.load(found, timed, count=count, timeout_s=timeout_s)
    measured = []
    # Tiers are read one after the other, but not always in the order of the prefix.
    for tier in sorted({tier for tier, _ in loaded.runs}, key=last_s.__getitem__):
        blocks = sum(count for name, count in loaded.runs if name is tier)
        measured.append((tier, blocks * namespace.info.block_bytes, last_s[tier] - previous_s))
        previous_s = last_s[tier]
    return Arrived(loaded, time.perf_counter() - started_s, tuple(measured))


class Transfer:
    """Threads that copy between one rank of an engine and the store. Close it to end them."""

    def __init__(self, namespace: Namespace, queue_bytes_max: int = QUEUE_BYTES_MAX):
        self._namespace = namespace
        self._queue_bytes_max = queue_bytes_max
        self._jobs: deque[StoreJob[Source]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvstore-load")
        self._storer = threading.Thread(target=self._store_all, name="kvstore-store", daemon=True)
        self._storer.start()

    def load(self, keys: Sequence[BlockKey], sink: Sink, timeout_s: float) -> Future[Arrived]:
        """Starts to look these blocks up again and to hand them to the sink, on another thread."""
        return self._loaders.submit(self._load, keys, sink, timeout_s)

    def _load(self, keys: Sequence[BlockKey], sink: Sink, timeout_s: float) -> Arrived:
        started_s = time.perf_counter()
        found = self._namespace.lookup(keys, again=True)
        arrived = load(self._namespace, found, sink, found.blocks, timeout_s)
        loaded = arrived.loaded
        if loaded.blocks < len(keys) and loaded.miss_reason is None:
            loaded = replace(loaded, miss_reason=found.miss_reason)
        return replace(arrived, loaded=loaded, load_s=time.perf_counter() - started_s)

    def store(self, job: StoreJob[Source]) -> bool:
        """Queues a store; False when the queue is full, and then `done` has been called.

        An empty queue takes a job of any size: else one long prompt could never be stored, and
        its KV is in the engine's memory anyway.
        """
        with self._changed:
            queued_bytes = self._queued_bytes + job.size_bytes
            fits = not self._queued_bytes or queued_bytes <= self._queue_bytes_max
            if fits and not self._closing:
                self._jobs.append(job)
                self._queued_bytes += job.size_bytes
                self._changed.notify_all()
                return True
        refused = Stored()
        refused.skip(SkipReason.QUEUE_FULL, len(job.keys[0]))
        job.done(refused)
        return False

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything queued is stored; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_bytes == 0, timeout_s)

    def close(self) -> None:
        """Stores what is queued, and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._storer.join()
        self._loaders.shutdown()

    def _store_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            (keys,), (parent,) = job.keys, job.parents
            stored = Stored()

            def source(position: int, view: memoryview, job: StoreJob[Source] = job) -> None:
                job.source(job.first + position, view)

            try:
                stored = self._namespace.store(keys, source, parent)
            except Exception:
                # A source that fails is the engine's fault; it must neither end this thread nor
                # go unseen: the blocks count as failed, and the trace names the culprit.
                log.exception("storing %d blocks failed", len(keys))
                stored.skip(SkipReason.FAILED, len(keys))
            finally:
                # First, so that whoever has flushed finds what was stored accounted for.
                self._tell(job, stored)
                with self._changed:
                    self._queued_bytes -= job.size_bytes
                    self._changed.notify_all()

    def _tell(self, job: StoreJob[Source], stored: Stored) -> None:
        try:
            job.done(stored)
        except Exception:
            log.exception("reporting a store failed")
