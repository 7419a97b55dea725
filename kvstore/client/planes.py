"""The two ways that tensors travel: shared memory on one host, streams between hosts (D1).

Both load through a `Sink` and store through a `Source`, which copy between a block's bytes and
wherever the engine wants them, so that a block is copied once on one host. A sink may be given
bytes that turn out wrong: then the block's outcome says so, and what the sink wrote is void. With
`copy_threads` above 1, sinks and sources are called from several threads at a time.
"""

from __future__ import annotations

import array
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import numpy as np

from kvstore import codec, slots
from kvstore.allocator import keep_large_buffers
from kvstore.client.connection import CALL_TIMEOUT_S, Attached
from kvstore.client.copiers import Copiers
from kvstore.errors import KVStoreError
from kvstore.types import BlockKey, MissReason, NamespaceInfo, SkipReason
from kvstore.wire import chunks, convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire._pb import kvstore_pb2_grpc as pb_grpc
from kvstore.wire.limits import CHUNK_BYTES

Sink = Callable[[int, memoryview], None]
"""Takes a block's position among the keys and its bytes: valid during the call, not to be
written to."""

Source = Callable[[int, memoryview], None]
"""Takes a block's position among the keys and where to write its bytes, valid during the call."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a lookup pinned, and where the blocks in the arena are."""

    id: int
    keys: Sequence[BlockKey]
    resident: Sequence[bool]
    offsets: Sequence[int]
    """One for each resident block, in order; likewise `generations`."""
    generations: Sequence[int]


@dataclass(slots=True)
class Stored:
    """What became of the blocks of a store. The counts add up to the blocks given."""

    stored: int = 0
    present: int = 0
    """The store had them, or another client was storing them."""
    skipped: dict[SkipReason, int] = field(default_factory=dict)

    def skip(self, reason: SkipReason, blocks: int) -> None:
        """Adds blocks that were not stored."""
        if blocks:
            self.skipped[reason] = self.skipped.get(reason, 0) + blocks


class DataPlane(Protocol):
    """One way of moving blocks, for one session."""

    def load(
        self, info: NamespaceInfo, lease: Lease, first: int, count: int, sink: Sink,
        timeout_s: float,
    ) -> list[MissReason | None]:  # fmt: skip
        """Hands leased blocks to the sink; None for each that was whole, else why it wasn't."""
        ...

    def store(
        self, info: NamespaceInfo, keys: Sequence[BlockKey], parent: BlockKey | None,
        source: Source, timeout_s: float,
    ) -> Stored:  # fmt: skip
        """Stores the blocks that are not there yet, with bytes from the source.

        Raises:
            grpc.RpcError, KVStoreError: nothing of this call was stored.
        """
        ...


class SharedMemoryPlane(DataPlane):
    """Copies in place, in the server's arena."""

    def __init__(self, attached: Attached, stub: pb_grpc.KVStoreStub, copiers: Copiers):
        assert attached.arena is not None
        self._copiers = copiers
        self._attached = attached
        self._arena = attached.arena
        self._stub = stub

    def load(
        self, info: NamespaceInfo, lease: Lease, first: int, count: int, sink: Sink,
        timeout_s: float,
    ) -> list[MissReason | None]:  # fmt: skip
        deadline_s = time.monotonic() + timeout_s
        results: list[MissReason | None] = [MissReason.TOO_SLOW] * count
        here = [index for index in range(first, first + count) if lease.resident[index]]
        slot = sum(lease.resident[:first])
        whole = True

        def read(number: int) -> bool:
            nonlocal whole
            index = here[number]
            where = lease.offsets[slot + number], lease.generations[slot + number]
            results[index - first] = self._read(info, lease, index, *where, sink)
            if results[index - first] is not None or time.monotonic() > deadline_s:
                whole = False  # what follows a lost block is of no use
            return whole

        self._copiers.each(len(here), info.block_bytes, read)
        if whole and len(here) < count:
            absent = next(i for i in range(first, first + count) if not lease.resident[i])
            self._fetch(info, lease, absent, first + count, sink, results, deadline_s)
        return results

    def _fetch(
        self, info: NamespaceInfo, lease: Lease, start: int, end: int, sink: Sink,
        results: list[MissReason | None], deadline_s: float,
    ) -> None:  # fmt: skip
        """Has the server bring blocks into the arena, and reads each as it arrives."""
        first = end - len(results)
        request = pb.FetchRequest(
            session=self._attached.session, lease=lease.id, first=start, count=end - start
        )
        timeout_s = max(deadline_s - time.monotonic(), 0.001)
        arrived = set()
        try:
            for response in self._stub.Fetch(request, timeout=timeout_s):
                index = response.index
                if lease.resident[index]:
                    continue
                arrived.add(index)
                if response.miss_reason:
                    results[index - first] = convert.MISS_FROM_WIRE[response.miss_reason]
                    continue
                where = response.slot
                results[index - first] = self._read(
                    info, lease, index, where.offset, where.generation, sink
                )
        except grpc.RpcError as error:
            reason = _miss_reason(error)
            for index in range(start, end):
                if not lease.resident[index] and index not in arrived:
                    results[index - first] = reason

    def _read(
        self, info: NamespaceInfo, lease: Lease, index: int, offset: int, generation: int,
        sink: Sink,
    ) -> MissReason | None:  # fmt: skip
        if not slots.PAGE_BYTES <= offset <= len(self._arena) - slots.slot_bytes(info.block_bytes):
            return MissReason.CORRUPT
        header = slots.read_header(self._arena, offset)
        if (header.generation, header.key) != (generation, lease.keys[index]):
            return MissReason.OVERWRITTEN
        if header.payload_bytes != info.block_bytes:
            return MissReason.CORRUPT
        view = slots.payload(self._arena, offset, info.block_bytes)
        sink(index, view)
        sound = True
        if self._attached.verify_always:
            sound = header.checksum == codec.checksum(view)
        if slots.read_generation(self._arena, offset) != generation:
            return MissReason.OVERWRITTEN
        return None if sound else MissReason.CORRUPT

    def store(
        self, info: NamespaceInfo, keys: Sequence[BlockKey], parent: BlockKey | None,
        source: Source, timeout_s: float,
    ) -> Stored:  # fmt: skip
        deadline_s = time.monotonic() + min(timeout_s, self._attached.store_lease_s / 2)
        request = pb.ReserveRequest(
            namespace=info.fingerprint,
            keys=convert.join_keys(keys),
            parent=parent or b"",
            block_bytes=info.block_bytes,
            release=self._attached.take_releases(),
        )
        reserved = self._attached.calls.reserve(request, CALL_TIMEOUT_S)
        positions = [
            index
            for index, answer in enumerate(reserved.answers)
            if answer == pb.ReserveResponse.ANSWER_RESERVED
        ]
        offsets = list(reserved.slot_offsets)
        failed: list[int] = []
        checksums = array.array("Q", bytes(8 * len(offsets) * self._attached.verify_always))

        def write(slot: int) -> bool:
            index, offset = positions[slot], offsets[slot]
            view = slots.payload(self._arena, offset, info.block_bytes)
            header = slots.read_header(self._arena, offset)
            # Past the deadline the slot may be another's.
            if time.monotonic() < deadline_s and header.key == keys[index]:
                source(index, view)
            else:
                failed.append(slot)
            if self._attached.verify_always:
                checksums[slot] = codec.checksum(view)
            return True

        try:
            self._copiers.each(len(offsets), info.block_bytes, write)
        except BaseException:
            if reserved.lease:
                abort = pb.AbortRequest(lease=reserved.lease)
                with contextlib.suppress(KVStoreError):  # the lease ends by itself
                    self._attached.calls.abort(abort, CALL_TIMEOUT_S)
            raise
        if positions:
            commit = pb.CommitRequest(
                lease=reserved.lease, checksums=checksums.tobytes(), failed=failed
            )
            self._attached.calls.commit(commit, CALL_TIMEOUT_S)
        stored = _count_answers(reserved.answers)
        stored.stored -= len(failed)
        stored.skip(SkipReason.FAILED, len(failed))
        return stored


class StreamPlane(DataPlane):
    """Sends blocks as chunks over gRPC, with a checksum each."""

    def __init__(self, attached: Attached, stub: pb_grpc.KVStoreStub, streams: chunks.Streams):
        keep_large_buffers()
        self._attached = attached
        self._stub = stub
        self._streams = streams

    def load(
        self, info: NamespaceInfo, lease: Lease, first: int, count: int, sink: Sink,
        timeout_s: float,
    ) -> list[MissReason | None]:  # fmt: skip
        results: list[MissReason | None] = [MissReason.TOO_SLOW] * count
        pending = set(range(first, first + count))
        request = pb.GetRequest(
            session=self._attached.session, lease=lease.id, first=first, count=count
        )
        buffer = np.empty(info.block_bytes, np.uint8)
        try:
            responses = iter(self._streams.get(request, timeout=timeout_s))
            for response in responses:
                if isinstance(response, memoryview):  # a chunk of no block
                    for index in pending:
                        results[index - first] = MissReason.CORRUPT
                    break
                result = response.result
                pending.discard(result.index)
                if result.miss_reason:
                    reason: MissReason | None = convert.MISS_FROM_WIRE[result.miss_reason]
                elif (block := self._receive(responses, buffer)) is not None and (
                    codec.checksum(block) == result.checksum
                ):
                    reason = None
                    sink(result.index, block)
                else:
                    reason = MissReason.CORRUPT
                results[result.index - first] = reason
        except grpc.RpcError as error:
            for index in pending:
                results[index - first] = _miss_reason(error)
        return results

    def _receive(
        self, responses: Iterator[chunks.Received], buffer: np.ndarray
    ) -> memoryview | None:
        """A block's bytes, in the buffer: PyTorch takes no memory that can't be written to."""
        filled = 0
        while filled < buffer.nbytes:
            chunk = next(responses, None)
            if not isinstance(chunk, memoryview) or not chunk:
                return None
            if filled + len(chunk) > buffer.nbytes:
                return None
            buffer[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
            filled += len(chunk)
        return buffer.data

    def store(
        self, info: NamespaceInfo, keys: Sequence[BlockKey], parent: BlockKey | None,
        source: Source, timeout_s: float,
    ) -> Stored:  # fmt: skip
        # Blocks that are there already would be sent for nothing, so look first.
        look = pb.LookupRequest(
            namespace=info.fingerprint,
            keys=convert.join_keys(keys),
            release=self._attached.take_releases(),
            again=True,
        )
        found = self._attached.calls.lookup(look, CALL_TIMEOUT_S)
        resident = found.tier_blocks[0] if list(found.tiers[:1]) == [pb.TIER_CPU] else 0
        if resident == len(keys):
            return Stored(present=resident)
        header = pb.PutHeader(
            namespace=info.fingerprint,
            keys=convert.join_keys(keys[resident:]),
            parent=(keys[resident - 1] if resident else parent) or b"",
            block_bytes=info.block_bytes,
            session=self._attached.session,
        )
        sending = _Sending(header, range(resident, len(keys)), info, source)
        try:
            answer = self._streams.put(sending.messages(), timeout=timeout_s)
        finally:
            sending.end()
        stored = _count_answers(answer.answers)
        stored.present += resident
        stored.stored -= answer.corrupt
        stored.skip(SkipReason.FAILED, answer.corrupt)
        return stored


class _Sending:
    """The messages of a Put, and their end. gRPC reads them on a thread of its own."""

    def __init__(self, header: pb.PutHeader, positions: range, info: NamespaceInfo, source: Source):
        self._header = header
        self._positions = positions
        self._block_bytes = info.block_bytes
        self._source = source
        self._lock = threading.Lock()
        self._ended = False
        self._raised: BaseException | None = None

    def messages(self) -> Iterator[pb.PutRequest | bytes]:
        """The header and the blocks; ends early if the source raises, so nothing is stored."""
        yield pb.PutRequest(header=self._header)
        # One buffer for all blocks: each chunk is copied when it is packed.
        buffer = np.empty(self._block_bytes, np.uint8).data
        for position in self._positions:
            if not self._fill(position, buffer):
                return
            for start in range(0, self._block_bytes, CHUNK_BYTES):
                yield chunks.pack(buffer[start : start + CHUNK_BYTES])
            yield pb.PutRequest(checksum=codec.checksum(buffer))

    def end(self) -> None:
        """Waits until the source is called no more, and raises what it raised, if anything."""
        with self._lock:
            self._ended = True
        if self._raised is not None:
            raise self._raised

    def _fill(self, position: int, buffer: memoryview) -> bool:
        with self._lock:
            if self._ended:
                return False
            try:
                self._source(position, buffer)
            except BaseException as error:
                self._raised = error
            return self._raised is None


def _count_answers(answers: Sequence[pb.ReserveResponse.Answer.ValueType]) -> Stored:
    stored = Stored()
    for answer in answers:
        if answer == pb.ReserveResponse.ANSWER_RESERVED:
            stored.stored += 1
        elif answer == pb.ReserveResponse.ANSWER_NO_SPACE:
            stored.skip(SkipReason.NO_SPACE, 1)
        else:
            stored.present += 1
    return stored


def _miss_reason(error: grpc.RpcError) -> MissReason:
    code = error.code() if isinstance(error, grpc.Call) else None
    # NOT_FOUND: the lease ended before the load did.
    late = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
    return MissReason.TOO_SLOW if code in late else MissReason.SERVER_DOWN
