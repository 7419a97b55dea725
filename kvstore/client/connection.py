"""A connection that comes back by itself.

One thread keeps the session open: it attaches, notes what the server said, hands out the answers
to the session's calls, and starts over when the stream ends. Another sends what can wait:
releases that no later call has carried, and usage.
While the server is away, `attached` is None and callers go on without it, at once.

Knows nothing of blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvstore import slots
from kvstore.client.calls import Calls
from kvstore.errors import KVStoreError
from kvstore.wire import chunks
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire._pb import kvstore_pb2_grpc as pb_grpc
from kvstore.wire.limits import CHANNEL_OPTIONS

RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.0
ATTACH_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 2.0
MADV_POPULATE_READ = 22
"""Of Linux's madvise; Python has no name for it."""

POPULATE_BYTES = 64 << 20
"""At a time: the call holds the GIL."""

RELEASE_DELAY_S = 0.05
"""How long a release waits for a call that carries it."""

_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Each Store has its own connection, so that closing one is seen by the server.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(eq=False)
class Attached:
    """One session with one server process. Void when the connection's `attached` is another."""

    calls: Calls
    session: int
    epoch: int
    version: str
    arena: memoryview | None
    """The server's arena, when this process can map it."""
    verify_always: bool
    store_lease_s: float
    mapping: mmap.mmap | None = None
    opened: set[bytes] = field(default_factory=set)
    """Namespaces that this session has opened."""
    _releases: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_release(self, lease: int) -> None:
        """Notes a lease to release with the next call."""
        with self._lock:
            self._releases.append(lease)

    def take_releases(self) -> list[int]:
        """The leases to release now; the caller sends them."""
        with self._lock:
            taken, self._releases = self._releases, []
            return taken


class Connection:
    """A channel to one server, and the session on it."""

    def __init__(self, target: str, share_memory: bool, flush: Callable[[], None]):
        """`flush` is called on the sending thread, soon after each `wake`."""
        self.target = target
        self.attached: Attached | None = None
        self._share_memory = share_memory
        self._flush = flush
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self.stub = pb_grpc.KVStoreStub(self._channel)
        self.streams = chunks.Streams(self._channel)
        self._first_try = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._stream: Any = None
        self._threads = [
            threading.Thread(target=self._stay_attached, name="kvstore-session", daemon=True),
            threading.Thread(target=self._send_later, name="kvstore-sender", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait_attached(self, timeout_s: float) -> bool:
        """Waits for the first try to attach; whether it worked."""
        self._first_try.wait(timeout_s)
        return self.attached is not None

    def wake(self) -> None:
        """Something waits to be sent."""
        self._wake.set()

    def release(self) -> None:
        """Sends the releases that wait for a call to carry them, now."""
        attached = self.attached
        leases = attached.take_releases() if attached is not None else []
        if attached is None or not leases:
            return
        with contextlib.suppress(KVStoreError):  # unreleased leases expire by themselves
            attached.calls.release(pb.ReleaseRequest(leases=leases), CALL_TIMEOUT_S)

    def close(self) -> None:
        """Detaches. Call when no copy to or from the arena is under way."""
        self._closed.set()
        self._wake.set()
        self._threads[1].join()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._threads[0].join()
        self._channel.close()

    def _stay_attached(self) -> None:
        pause_s = RECONNECT_S_MIN
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                self._attach()
            except grpc.RpcError:
                pass  # away, or gone: `attached` says so
            finally:
                self.attached = None
                self._first_try.set()
            lasted = time.monotonic() - started_s > RECONNECT_S_MAX
            pause_s = RECONNECT_S_MIN if lasted else min(pause_s * 2, RECONNECT_S_MAX)
            self._closed.wait(pause_s)

    def _attach(self) -> None:
        calls = Calls(self._unclaimed)
        request = pb.AttachRequest(client=f"pid {os.getpid()} on {socket.gethostname()}")
        stream = self.stub.Session(calls.requests(request))
        self._stream = stream
        # The stream itself has no deadline; its first message has one.
        timer = threading.Timer(ATTACH_TIMEOUT_S, self._stream.cancel)
        timer.daemon = True
        timer.start()
        try:
            for answer in stream:
                if answer.WhichOneof("answer") != "attach":
                    calls.answered(answer)
                    continue
                timer.cancel()
                self.attached = self._accept(answer.attach, calls)
                self._first_try.set()
                self.wake()  # usage may have waited for the server
                if self._closed.is_set():
                    self._stream.cancel()
        finally:
            timer.cancel()
            calls.end()

    def _accept(self, answer: pb.AttachResponse, calls: Calls) -> Attached:
        mapping = None
        if self._share_memory and answer.arena_path:
            mapping = slots.open_mapping(Path(answer.arena_path), answer.arena_bytes, answer.epoch)
        return Attached(
            calls,
            answer.session,
            answer.epoch,
            answer.version,
            memoryview(mapping) if mapping is not None else None,
            answer.verify_always,
            answer.store_lease_ms / 1000,
            mapping,
        )

    def _unclaimed(self, lease: int) -> None:
        attached = self.attached
        if attached is not None:
            attached.add_release(lease)
            self.wake()

    def _populate(self, attached: Attached) -> None:
        """Has the arena's pages entered into this process's page table, while others work.

        Without that, the first copy to or from each page pays for a page fault, and runs at a
        fraction of the speed of the second one.
        """
        mapping = attached.mapping
        size = len(mapping) if mapping is not None else 0
        with contextlib.suppress(OSError):  # Linux before 5.14 can't
            for start in range(0, size, POPULATE_BYTES):
                if mapping is None or self._closed.is_set():
                    return
                mapping.madvise(MADV_POPULATE_READ, start, min(POPULATE_BYTES, size - start))

    def _send_later(self) -> None:
        populated = None
        while True:
            self._wake.wait()
            attached = self.attached
            if attached is not None and attached is not populated:
                self._populate(attached)
                populated = attached
            if not self._closed.is_set():
                self._closed.wait(RELEASE_DELAY_S)
            self._wake.clear()
            last = self._closed.is_set()  # before sending, so that nothing comes in between
            self.release()
            self._flush()
            if last:
                return
