"""One client's stream: its session, and the calls on it. See `Session` in kvstore.proto.

The session is open while the stream is. A call is read strictly before it touches the store, so
that a wrong one changes nothing; a call that fails is answered with its error, and the stream goes
on. Calls that never wait are answered at once, in the order they came; lookups, which may wait
for the remote tier, hold up nobody.

Decides nothing. Knows nothing of the methods that are not on the stream.
"""

from __future__ import annotations

import array
import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial

from google.protobuf.message import DecodeError

from kvstore import errors
from kvstore.leases import LeaseId, SessionId
from kvstore.store import Store
from kvstore.tiers.cpu import Answer
from kvstore.wire import convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.limits import POSITION_MAX
from kvstore.wire.status import error_to_wire

log = logging.getLogger("kvstore.calls")

LOOKUPS_MAX = 256
"""Lookups of one client that are under way. The next one waits, and what comes after it."""

ANSWERS = {
    Answer.RESERVED: pb.ReserveResponse.ANSWER_RESERVED,
    Answer.PRESENT: pb.ReserveResponse.ANSWER_PRESENT,
    Answer.BUSY: pb.ReserveResponse.ANSWER_BUSY,
    Answer.NO_SPACE: pb.ReserveResponse.ANSWER_NO_SPACE,
}


class Calls:
    """The calls of one session."""

    def __init__(
        self,
        store: Store,
        session: SessionId,
        write: Callable[[pb.SessionResponse], Awaitable[None]],
        counts: Counter[str],
    ):
        """`counts` gets the calls by name."""
        self._store = store
        self._session = session
        self._write = write
        self._counts = counts
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._room = asyncio.Semaphore(LOOKUPS_MAX)
        self._lookups: set[asyncio.Task[None]] = set()

    async def serve(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Answers until the client ends the stream. Cancel it when the stream breaks.

        Raises:
            InvalidRequest: what came is no message.
        """
        try:
            async for request in requests:
                # Without a remote tier a lookup never waits, and needs no task of its own.
                if self._store.remote is not None and request.WhichOneof("call") == "lookup":
                    await self._room.acquire()
                    task = asyncio.create_task(self._answer(request))
                    self._lookups.add(task)
                    task.add_done_callback(self._looked_up)
                else:
                    await self._answer(request)
        except DecodeError as error:
            raise errors.InvalidRequest("Session: bytes that are no message") from error

    async def finish(self, timeout_s: float) -> None:
        """Waits for the calls under way, no longer than so many seconds."""
        if self._lookups:
            await asyncio.wait(self._lookups, timeout=timeout_s)

    def cancel(self) -> None:
        """Gives up the calls under way."""
        for task in self._lookups:
            task.cancel()

    def _looked_up(self, task: asyncio.Task[None]) -> None:
        self._lookups.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            log.debug("a lookup's answer was lost with its stream: %s", task.exception())

    async def _answer(self, request: pb.SessionRequest) -> None:
        try:
            response = await self._do(request)
        except errors.KVStoreError as error:
            response = pb.SessionResponse(error=error_to_wire(error))
        except Exception as error:  # ours: the client's other calls must not suffer for it
            log.exception("a call failed")
            response = pb.SessionResponse(error=error_to_wire(error))
        response.id = request.id
        async with self._writing:
            await self._write(response)

    async def _do(self, request: pb.SessionRequest) -> pb.SessionResponse:
        kind = request.WhichOneof("call")
        match kind:
            case "lookup":
                self._counts["Lookup"] += 1
                return pb.SessionResponse(lookup=await self._lookup(request.lookup))
            case "reserve":
                self._counts["Reserve"] += 1
                return pb.SessionResponse(reserve=self._reserve(request.reserve))
            case "commit":
                self._counts["Commit"] += 1
                return pb.SessionResponse(commit=self._commit(request.commit))
            case "abort":
                self._counts["Abort"] += 1
                self._store.abort(self._session, LeaseId(request.abort.lease))
                return pb.SessionResponse(abort=pb.AbortResponse())
            case "release":
                self._counts["Release"] += 1
                self._release(request.release.leases)
                return pb.SessionResponse(release=pb.ReleaseResponse())
            case "attach":
                raise errors.InvalidRequest("Session: it is attached already")
            case _:
                raise errors.InvalidRequest("Session: a message without a call of this version")

    async def _lookup(self, request: pb.LookupRequest) -> pb.LookupResponse:
        keys = convert.split_keys(request.keys)
        fingerprint = convert.to_fingerprint(request.namespace)
        if request.lease_ms < 0:
            raise errors.InvalidRequest(f"lease_ms: {request.lease_ms} is negative")
        if not 0 <= request.first <= POSITION_MAX:
            raise errors.InvalidRequest(f"first: {request.first} is no position of a block")
        self._release(request.release)
        found = await self._store.lookup(
            fingerprint, keys, self._session, request.lease_ms / 1000, request.near_only
        )
        resident = list(filter(None, found.blocks))
        outlook = None
        if not request.again:
            note = partial(self._store.outlook, fingerprint, keys, request.first, found)
            if len(resident) == len(keys):  # nothing is to be decided, so the answer goes first
                asyncio.get_running_loop().call_soon(note)
            else:
                outlook = convert.outlook_to_wire(note())
        runs = found.runs
        return pb.LookupResponse(
            present=len(found.blocks),
            tiers=[convert.TIER_TO_WIRE[name] for name, _ in runs],
            tier_blocks=[count for _, count in runs],
            miss_reason=convert.miss_to_wire(found.miss_reason),
            lease=found.lease or 0,
            slot_offsets=_packed([block.offset for block in resident]),
            slot_generations=_packed([block.generation for block in resident]),
            outlook=outlook,
        )

    def _reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        keys = convert.split_keys(request.keys)
        fingerprint = convert.to_fingerprint(request.namespace)
        parent = convert.to_parent(request.parent)
        self._release(request.release)
        answers, blocks, lease = self._store.reserve(
            fingerprint, keys, parent, request.block_bytes, self._session
        )
        return pb.ReserveResponse(
            answers=[ANSWERS[answer] for answer in answers],
            lease=lease or 0,
            slot_offsets=[block.offset for block in blocks],
        )

    def _commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        if len(request.checksums) % 8:
            raise errors.InvalidRequest(
                f"checksums: {len(request.checksums)} bytes are not a whole number of 8-byte sums"
            )
        committed = self._store.commit(
            self._session,
            LeaseId(request.lease),
            _unpacked(request.checksums) if request.checksums else None,
            request.failed,
        )
        return pb.CommitResponse(committed=committed)

    def _release(self, leases: Iterable[int]) -> None:
        self._store.release(self._session, [LeaseId(lease) for lease in leases])


def _packed(numbers: list[int]) -> bytes:
    packed = array.array("Q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(raw: bytes) -> list[int]:
    numbers = array.array("Q")
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
