"""Does the copying: loads and stores in the background, bounded, in order.

Stores wait in a queue that is bounded in bytes, so that an engine which produces KV faster than
it can be kept drops it and says so, rather than holding on to its memory. Knows nothing of
plans, costs, or what the bytes are.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.client import Found, Loaded, Namespace, Sink, Source, Stored
from kvstore.types import BlockKey, SkipReason

log = logging.getLogger("kvstore.engine")

QUEUE_BYTES_MAX = 2 << 30
LOADERS = 2


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks to store. The source must stay readable until `done` is called."""

    namespace: Namespace
    keys: Sequence[BlockKey]
    source: Source
    parent: BlockKey | None
    done: Callable[[Stored], None]
    """Called on the storing thread, once, whatever happens."""

    @property
    def size_bytes(self) -> int:
        """Payload bytes at most."""
        return len(self.keys) * self.namespace.info.block_bytes


class Transfer:
    """Threads that copy between an engine and the store. Close it to end them."""

    def __init__(self, queue_bytes_max: int = QUEUE_BYTES_MAX):
        self._queue_bytes_max = queue_bytes_max
        self._jobs: deque[StoreJob] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvstore-load")
        self._storer = threading.Thread(target=self._store_all, name="kvstore-store", daemon=True)
        self._storer.start()

    def load(
        self,
        namespace: Namespace,
        found: Found,
        sink: Sink,
        count: int,
        timeout_s: float,
    ) -> Future[Loaded]:
        """Starts to hand the first `count` found blocks to the sink, on another thread."""
        return self._loaders.submit(namespace.load, found, sink, count=count, timeout_s=timeout_s)

    def store(self, job: StoreJob) -> bool:
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
        refused.skip(SkipReason.QUEUE_FULL, len(job.keys))
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
            stored = Stored()
            try:
                stored = job.namespace.store(job.keys, job.source, job.parent)
            except Exception:
                # A source that fails is the engine's fault; it must neither end this thread nor
                # go unseen: the blocks count as failed, and the trace names the culprit.
                log.exception("storing %d blocks failed", len(job.keys))
                stored.skip(SkipReason.FAILED, len(job.keys))
            finally:
                # First, so that whoever has flushed finds what was stored accounted for.
                self._tell(job, stored)
                with self._changed:
                    self._queued_bytes -= job.size_bytes
                    self._changed.notify_all()

    def _tell(self, job: StoreJob, stored: Stored) -> None:
        try:
            job.done(stored)
        except Exception:
            log.exception("reporting a store failed")
