"""What an engine calls: connect, open a namespace, look up, load, store.

The server's absence is an answer here, never an exception: lookups miss with SERVER_DOWN, stores
are skipped with it, and both work again as soon as the server is back. Exceptions are for calls
that are wrong wherever the server is. Thread-safe.
"""

from __future__ import annotations

import array
import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType

import grpc

from kvstore.client.connection import CALL_TIMEOUT_S, Attached, Connection
from kvstore.client.copiers import Copiers
from kvstore.client.planes import (
    DataPlane,
    Lease,
    SharedMemoryPlane,
    Sink,
    Source,
    Stored,
    StreamPlane,
)
from kvstore.config import default_state_dir
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    RequestError,
    TooMany,
    UnknownLease,
    UnknownNamespace,
)
from kvstore.types import (
    BlockKey,
    Decision,
    MissReason,
    NamespaceInfo,
    Outlook,
    SkipReason,
    TierName,
    Usage,
)
from kvstore.wire import convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.status import error_of

log = logging.getLogger("kvstore.client")

CONNECT_WAIT_S = 2.0
LEASE_S = 30.0
LOAD_TIMEOUT_S = 30.0
STORE_TIMEOUT_S = 30.0
DECISIONS_MAX = 256
"""Decisions that wait to be sent; the latest ones."""
REFUSED_KEYS_MAX = 4096
"""Refused keys that wait to be reported; the rest will count as never seen."""


NOTHING_KNOWN = Outlook()


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found. Give it to `load`, or to `release`."""

    runs: tuple[tuple[TierName, int], ...]
    """The tiers of the present prefix in order, with how many blocks each has."""
    miss_reason: MissReason | None
    """Why the block after it is absent; None when every block is present."""
    lease: Lease | None = None
    attached: Attached | None = None
    outlook: Outlook = NOTHING_KNOWN

    @property
    def blocks(self) -> int:
        """Length of the present prefix."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far a load came."""

    runs: tuple[tuple[TierName, int], ...]
    """The tiers of the blocks that were loaded, in order."""
    miss_reason: MissReason | None
    """Why the next one was not; None when all that were asked for were loaded."""

    @property
    def blocks(self) -> int:
        """How many blocks, from the first one asked for, are whole."""
        return sum(count for _, count in self.runs)


class Namespace:
    """One namespace of one store. Made by `Store.open`."""

    def __init__(self, store: Store, info: NamespaceInfo):
        self.info = info
        self._store = store
        self._lock = threading.Lock()
        self._usage = Usage()
        self._refused: list[BlockKey] = []
        self._pool = (0, 0)
        self._decisions: list[Decision] = []
        self._costs = ""
        self.last_costs = ""
        """What the server had from an earlier engine when it was first reached; see `keep`."""

    def lookup(
        self,
        keys: Sequence[BlockKey],
        lease_s: float = LEASE_S,
        *,
        first: int = 0,
        again: bool = False,
        near_only: bool = False,
    ) -> Found:
        """The longest present prefix of these keys, pinned for `lease_s` seconds.

        Load it or release it; the lease ends by itself otherwise. With `lease_s` 0 nothing is
        pinned and nothing can be loaded. At most 65,536 keys. `first` is the position of the
        first one in its prefix; `again` says that this request has asked for them before, maybe
        in another process, so that the server counts it once. With `near_only`, Redis is not
        asked, and what only Redis has counts as not worth loading.

        Raises:
            InvalidRequest: a key has the wrong length, or there are too many.
        """
        joined = convert.join_keys(keys)
        if not keys:
            return Found((), None)
        try:
            attached = self._store._opened(self)
            request = pb.LookupRequest(
                namespace=self.info.fingerprint,
                keys=joined,
                lease_ms=int(lease_s * 1000),
                release=attached.take_releases(),
                first=first,
                again=again,
                near_only=near_only,
            )
            answer = attached.calls.lookup(request, CALL_TIMEOUT_S)
        except (grpc.RpcError, KVStoreError) as error:
            self._store._note(error, self)
            return Found((), MissReason.SERVER_DOWN)
        except _Away:
            return Found((), MissReason.SERVER_DOWN)
        runs = tuple(
            (convert.TIER_FROM_WIRE[tier], count)
            for tier, count in zip(answer.tiers, answer.tier_blocks, strict=True)
        )
        reason = convert.MISS_FROM_WIRE[answer.miss_reason] if answer.miss_reason else None
        lease = None
        if answer.lease:
            resident: list[bool] = []
            for tier, count in runs:
                resident += [tier is TierName.CPU] * count
            lease = Lease(
                answer.lease,
                keys[: answer.present],
                resident,
                _unpacked(answer.slot_offsets),
                _unpacked(answer.slot_generations),
            )
        return Found(runs, reason, lease, attached, convert.outlook_from_wire(answer.outlook))

    def load(
        self,
        found: Found,
        sink: Sink,
        first: int = 0,
        count: int | None = None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> Loaded:
        """Hands the found blocks from `first` on to the sink, and releases the lease.

        Blocks may come in any order; those after the first lost one are void, as is what the
        sink was given of them.
        """
        lease, attached = found.lease, found.attached
        count = found.blocks - first if count is None else count
        if not 0 <= first <= first + count <= found.blocks:
            raise InvalidRequest(f"blocks {first} to {first + count} of {found.blocks} found ones")
        if lease is None or attached is None or count == 0:
            self.release(found)
            return Loaded((), None if count == 0 else found.miss_reason or MissReason.SERVER_DOWN)
        try:
            with self._store._copying(attached) as plane:
                outcomes = plane.load(self.info, lease, first, count, sink, timeout_s)
        except _Away:
            return Loaded((), MissReason.SERVER_DOWN)
        finally:
            self.release(found)
        good = next((i for i, reason in enumerate(outcomes) if reason is not None), count)
        tiers = [
            TierName.CPU if resident else TierName.REDIS
            for resident in lease.resident[first : first + good]
        ]
        runs = tuple((tier, len(list(group))) for tier, group in groupby(tiers))
        return Loaded(runs, outcomes[good] if good < count else None)

    def release(self, found: Found) -> None:
        """Ends the lookup's lease; the server hears of it with the next call, or soon."""
        if found.lease is not None and found.attached is not None:
            found.attached.add_release(found.lease.id)
            self._store._connection.wake()

    def store(
        self,
        keys: Sequence[BlockKey],
        source: Source,
        parent: BlockKey | None = None,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> Stored:
        """Stores consecutive blocks; `parent` is the key before the first, if any.

        The source is called once for each block that is not there yet, in order.

        Raises:
            InvalidRequest: a key has the wrong length, or there are too many.
            Exception: whatever the source raises; then nothing was stored.
        """
        convert.join_keys(keys)
        result = Stored()
        if not keys:
            return result
        try:
            with self._store._copying(self._store._opened(self)) as plane:
                return plane.store(self.info, keys, parent, source, timeout_s)
        except _Away:
            result.skip(SkipReason.SERVER_DOWN, len(keys))
        except (grpc.RpcError, KVStoreError) as error:
            self._store._note(error, self)
            lost = isinstance(error_of(error), UnknownLease | UnknownNamespace)
            result.skip(SkipReason.FAILED if lost else SkipReason.SERVER_DOWN, len(keys))
        return result

    def record(
        self,
        usage: Usage,
        refused: Iterable[BlockKey] = (),
        pool: tuple[int, int] | None = None,
        decision: Decision | None = None,
    ) -> None:
        """Adds what the engine saw to the report; sent soon, in the background.

        `refused` are keys that admission decided not to store; `pool` is the capacity and use,
        in bytes, of the engine's own pool of blocks.
        """
        with self._lock:
            self._usage += usage
            if decision is not None:
                self._decisions.append(decision)
                del self._decisions[:-DECISIONS_MAX]
            self._refused.extend(refused)
            del self._refused[REFUSED_KEYS_MAX:]
            self._pool = pool or self._pool
        self._store._connection.wake()

    def keep(self, costs: str) -> None:
        """Has the server keep what the engine has measured, for `last_costs` at its next start."""
        with self._lock:
            self._costs = costs
        self._store._connection.wake()

    def _send_usage(self) -> None:
        with self._lock:
            usage, refused, decisions = self._usage, self._refused, self._decisions
            costs, self._costs = self._costs, ""
            if usage == Usage() and not (refused or decisions or costs):
                return
            self._usage, self._refused, self._decisions = Usage(), [], []
        try:
            attached = self._store._opened(self)
            request = pb.RecordUsageRequest(
                namespace=self.info.fingerprint,
                usage=convert.usage_to_wire(usage),
                refused_keys=b"".join(refused),
                gpu_capacity_bytes=self._pool[0],
                gpu_used_bytes=self._pool[1],
                session=attached.session,
                costs=costs,
                decisions=map(convert.decision_to_wire, decisions),
            )
            self._store._stub.RecordUsage(request, timeout=CALL_TIMEOUT_S)
        except _Away:
            self._keep_usage(usage, refused)
        except grpc.RpcError as error:
            self._store._note(error, self)
            # A call that timed out may have been counted. Counting it twice would be worse.
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._keep_usage(usage, refused)

    def _keep_usage(self, usage: Usage, refused: list[BlockKey]) -> None:
        with self._lock:
            self._usage = usage + self._usage
            self._refused = (refused + self._refused)[:REFUSED_KEYS_MAX]


class _Away(Exception):
    """No server is attached now."""


class _Copying(AbstractContextManager[DataPlane]):
    """Counts copies that are under way, so that a session outlives them."""

    def __init__(self, store: Store, plane: DataPlane):
        self._store = store
        self._plane = plane

    def __enter__(self) -> DataPlane:
        with self._store._idle:
            if self._store._closing:
                raise _Away
            self._store._copies += 1
        return self._plane

    def __exit__(self, *error: object) -> None:
        with self._store._idle:
            self._store._copies -= 1
            self._store._idle.notify_all()


class Store:
    """A connection to a server. Close it, or use it as a context manager."""

    def __init__(self, target: str, share_memory: bool = True, copy_threads: int = 1):
        """See `connect`."""
        if copy_threads < 1:
            raise InvalidRequest(f"copy_threads: {copy_threads}; the calling thread is the first")
        self.target = target
        self._copiers = Copiers(copy_threads)
        self._namespaces: dict[bytes, Namespace] = {}
        self._idle = threading.Condition()
        self._copies = 0
        self._closing = False
        self._warned_epoch: int | None = None
        self._connection = Connection(target, share_memory, self._flush)
        self._stub = self._connection.stub

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def attached(self) -> bool:
        """Whether the server is there now."""
        return self._connection.attached is not None

    @property
    def shares_memory(self) -> bool:
        """Whether blocks go through shared memory now; else they go through streams."""
        attached = self._connection.attached
        return attached is not None and attached.arena is not None

    def wait_attached(self, timeout_s: float = CONNECT_WAIT_S) -> bool:
        """Waits until the server is there, if it is at all; whether it is."""
        return self._connection.wait_attached(timeout_s)

    def open(self, info: NamespaceInfo) -> Namespace:
        """The namespace; the same object for the same fingerprint.

        Raises:
            NamespaceConflict: the server has it open with another block size.
            InvalidRequest: the server's slabs are too small for its blocks.
        """
        namespace = self._namespaces.setdefault(info.fingerprint, Namespace(self, info))
        try:
            self._opened(namespace)
        except _Away:
            pass  # opened when the server appears
        except grpc.RpcError as call:
            error = error_of(call)
            if isinstance(error, RequestError):
                raise error from call
        return namespace

    def report(self) -> str:
        """The server's report, a JSON document.

        Raises:
            Unavailable: the server is not there.
        """
        try:
            return self._stub.Report(pb.ReportRequest(), timeout=CALL_TIMEOUT_S).json
        except grpc.RpcError as error:
            raise error_of(error) from error

    def explain(self, last: int = 0) -> str:
        """The last decisions of engines, the latest first: a JSON list. 0: all that are kept.

        Raises:
            Unavailable: the server is not there.
        """
        try:
            return self._stub.Explain(pb.ExplainRequest(last=last), timeout=CALL_TIMEOUT_S).json
        except grpc.RpcError as error:
            raise error_of(error) from error

    def clear(
        self, namespace: NamespaceInfo | None = None, *, arena_only: bool = False
    ) -> tuple[int, int]:
        """Drops blocks; returns how many from the arena, and from Redis.

        With `arena_only`, Redis keeps its blocks, and what waits to be written there is written
        first.

        Raises:
            Unavailable: the server is not there.
        """
        self._connection.release()  # or our own leases would keep blocks
        request = pb.ClearRequest(
            namespace=namespace.fingerprint if namespace is not None else b"",
            arena_only=arena_only,
        )
        try:
            answer = self._stub.Clear(request, timeout=60.0)
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer.blocks, answer.redis_blocks

    def close(self) -> None:
        """Sends what waits, detaches, and ends the threads. Waits for copies under way."""
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: self._copies == 0)
        self._copiers.close()
        self._connection.close()

    def _opened(self, namespace: Namespace) -> Attached:
        """The session, with this namespace open in it. Raises _Away or grpc.RpcError."""
        attached = self._connection.attached
        if attached is None or attached.calls.silent:
            raise _Away
        info = namespace.info
        if info.fingerprint not in attached.opened:
            request = pb.OpenNamespaceRequest(
                namespace=info.fingerprint,
                block_bytes=info.block_bytes,
                block_tokens=info.block_tokens,
                model=info.model,
                tenant=info.tenant,
            )
            answer = self._stub.OpenNamespace(request, timeout=CALL_TIMEOUT_S)
            attached.opened.add(info.fingerprint)
            namespace.last_costs = namespace.last_costs or answer.costs
        return attached

    def _copying(self, attached: Attached) -> _Copying:
        """Keeps the session for a copy. Raises _Away when it is not the current one any more."""
        if self._connection.attached is not attached:
            raise _Away
        plane: DataPlane
        if attached.arena is not None:
            plane = SharedMemoryPlane(attached, self._stub, self._copiers)
        else:
            plane = StreamPlane(attached, self._stub, self._connection.streams)
        return _Copying(self, plane)

    def _note(self, call: grpc.RpcError | KVStoreError, namespace: Namespace) -> None:
        """Reacts to a failed call: forgets what the server forgot, raises what is our fault."""
        error = error_of(call)
        attached = self._connection.attached
        timed_out = isinstance(call, grpc.RpcError) and (
            call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        if attached is not None and timed_out:
            attached.calls.note_silence()
        if isinstance(error, UnknownNamespace) and attached is not None:
            attached.opened.discard(namespace.info.fingerprint)
        elif isinstance(error, RequestError) and not isinstance(error, UnknownLease | TooMany):
            raise error from call
        elif attached is not None and attached.epoch != self._warned_epoch:
            self._warned_epoch = attached.epoch
            log.warning("kvstore at %s: %s; going on without it", self.target, error)

    def _flush(self) -> None:
        for namespace in list(self._namespaces.values()):
            try:
                namespace._send_usage()
            except RequestError as error:
                log.error("the server refused a usage report: %s", error)


def connect(
    target: str | None = None,
    *,
    share_memory: bool = True,
    copy_threads: int = 1,
    wait_s: float = CONNECT_WAIT_S,
    quiet: bool = False,
) -> Store:
    """Connects to a server: "host:port" or "unix:/path"; by default the one on this host.

    Waits up to `wait_s` for it. When it is not there, the store is returned all the same: it
    misses until the server appears, and connects by itself. With `share_memory` False, blocks
    go through streams even on one host. With `copy_threads` above 1, so many threads share the
    copies of a large batch through shared memory, and call its sink or source at the same time:
    faster where cores would be idle meanwhile, slower for all where an engine computes on them.
    `quiet` is for those beside whom another one warns that the server is not there.
    """
    if target is None:
        socket = default_state_dir() / "kvstore.sock"
        target = f"unix:{socket}" if socket.exists() else "127.0.0.1:7700"
    store = Store(target, share_memory, copy_threads)
    if not store.wait_attached(wait_s) and not quiet:
        log.warning("no kvstore server at %s yet; going on without it", target)
    return store


def _unpacked(raw: bytes) -> Sequence[int]:
    numbers = array.array("Q")
    numbers.frombytes(raw)
    return numbers
