"""The gRPC service: messages in, messages out. Decides nothing.

Every handler reads its request strictly before it touches the store, so that a wrong request
changes nothing. Errors become status codes in one place, `_Answers`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvstore import codec, errors
from kvstore.calls import ANSWERS, Calls
from kvstore.index import Block
from kvstore.leases import LeaseId, SessionId
from kvstore.report.board import Board
from kvstore.store import FIND_TIMEOUT_S, STORE_LEASE_S, Store
from kvstore.tiers.cpu import Answer
from kvstore.types import MissReason, NamespaceInfo
from kvstore.watch import EventKind
from kvstore.wire import chunks, convert
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire._pb import kvstore_pb2_grpc as pb_grpc
from kvstore.wire.limits import CHUNK_BYTES, COSTS_CHARS_MAX, NAME_CHARS_MAX
from kvstore.wire.status import code_of, metadata_of

log = logging.getLogger("kvstore.service")

Context = grpc.aio.ServicerContext[Any, Any]
Q = TypeVar("Q")
R = TypeVar("R")

_KINDS = {
    EventKind.STORED: pb.WatchResponse.KIND_STORED,
    EventKind.EVICTED: pb.WatchResponse.KIND_EVICTED,
    EventKind.ASKED: pb.WatchResponse.KIND_ASKED,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What the server tells a client that attaches."""

    epoch: int
    version: str
    arena_path: str
    """Empty when the arena isn't shared."""
    arena_bytes: int


def unary(
    handler: Callable[[Service, Q], Awaitable[R]],
) -> Callable[[Service, Q, Context], Awaitable[R]]:
    """A handler whose errors become status codes."""

    async def answer(self: Service, request: Q, context: Context) -> R:
        self.calls[handler.__name__] += 1
        try:
            return await handler(self, request)
        except errors.KVStoreError as error:
            await context.abort(code_of(error), str(error), metadata_of(error))
            raise AssertionError("abort raises") from error

    return answer


def stream(
    handler: Callable[[Service, Q], AsyncIterator[R]],
) -> Callable[[Service, Q, Context], AsyncIterator[R]]:
    """The same for a handler that answers with a stream."""

    async def answer(self: Service, request: Q, context: Context) -> AsyncIterator[R]:
        self.calls[handler.__name__] += 1
        try:
            async for response in handler(self, request):
                yield response
        except errors.KVStoreError as error:
            await context.abort(code_of(error), str(error), metadata_of(error))

    return answer


class Service(pb_grpc.KVStoreServicer):
    """`protos/kvstore/v1/kvstore.proto`, where each method is explained."""

    def __init__(self, store: Store, board: Board, identity: Identity):
        self._store = store
        self._board = board
        self._identity = identity
        self._closing = asyncio.Event()
        self.calls: Counter[str] = Counter()
        """Calls by method, for metrics."""

    def close(self) -> None:
        """Ends the streams that have no end of their own."""
        self._closing.set()
        self._store.watchers.close()

    # -- sessions and namespaces

    async def Session(  # type: ignore[override]  # writes to the context, and yields nothing
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        self.calls["Session"] += 1
        session = None
        try:
            first = await anext(request_iterator, None)
            if first is None or first.WhichOneof("call") != "attach":
                raise errors.InvalidRequest("Session: the first message must be an attach")
            session = self._store.leases.open_session(first.attach.client[:NAME_CHARS_MAX])
            await context.write(pb.SessionResponse(id=first.id, attach=self._welcome(session)))
            calls = Calls(self._store, session, context.write, self.calls)
            await self._serve(calls, request_iterator)
        except errors.KVStoreError as error:
            await context.abort(code_of(error), str(error), metadata_of(error))
        finally:
            if session is not None:
                self._store.close_session(session)
                self._board.forget_engine(session)

    def _welcome(self, session: SessionId) -> pb.AttachResponse:
        return pb.AttachResponse(
            session=session,
            epoch=self._identity.epoch,
            version=self._identity.version,
            arena_path=self._identity.arena_path,
            arena_bytes=self._identity.arena_bytes,
            verify_always=self._store.verify_always,
            store_lease_ms=int(STORE_LEASE_S * 1000),
        )

    async def _serve(self, calls: Calls, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Answers a session's calls until the client ends it, or the server stops."""
        serving = asyncio.create_task(calls.serve(requests))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((serving, closing), return_when=asyncio.FIRST_COMPLETED)
            await calls.finish(FIND_TIMEOUT_S)
            if serving.done():
                serving.result()
        finally:
            calls.cancel()
            for task in (serving, closing):
                task.cancel()
            await asyncio.gather(serving, closing, return_exceptions=True)

    @unary
    async def OpenNamespace(self, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceResponse:
        fingerprint = convert.to_fingerprint(request.namespace)
        if request.block_tokens < 1:
            raise errors.InvalidRequest(f"block_tokens: {request.block_tokens} is not positive")
        for name in (request.model, request.tenant):
            if len(name) > NAME_CHARS_MAX:
                raise errors.InvalidRequest(
                    f"a name has {len(name)} characters, over {NAME_CHARS_MAX}"
                )
        self._store.open_namespace(
            NamespaceInfo(
                fingerprint,
                request.block_bytes,
                request.block_tokens,
                request.model or "unknown",
                request.tenant or "default",
            )
        )
        return pb.OpenNamespaceResponse(costs=self._board.costs_of(fingerprint))

    # -- reading

    @stream
    async def Fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        arrivals = self._store.fetch(
            SessionId(request.session), LeaseId(request.lease), request.first, request.count
        )
        async for index, arrived in arrivals:
            if isinstance(arrived, MissReason):
                yield pb.FetchResponse(index=index, miss_reason=convert.miss_to_wire(arrived))
            else:
                slot = pb.Slot(offset=arrived.offset, generation=arrived.generation)
                yield pb.FetchResponse(index=index, slot=slot)

    @stream
    async def Get(self, request: pb.GetRequest) -> AsyncIterator[Any]:
        """Messages, and packed chunks as they are (`wire/chunks.py`)."""
        arrivals = self._store.fetch(
            SessionId(request.session), LeaseId(request.lease), request.first, request.count
        )
        async for index, arrived in arrivals:
            if isinstance(arrived, MissReason):
                result = pb.GetResult(index=index, miss_reason=convert.miss_to_wire(arrived))
                yield pb.GetResponse(result=result)
                continue
            if not arrived.generation:
                # The lease has ended meanwhile, and the slot may hold another block by now.
                lost = convert.miss_to_wire(MissReason.OVERWRITTEN)
                yield pb.GetResponse(result=pb.GetResult(index=index, miss_reason=lost))
                continue
            arrived.pins += 1
            try:
                async for response in self._send_block(index, arrived):
                    yield response
            finally:
                arrived.pins -= 1

    async def _send_block(self, index: int, block: Block) -> AsyncIterator[pb.GetResponse | bytes]:
        """A pinned block's checksum and bytes."""
        view = self._store.cpu.view(block)
        checksum = block.checksum
        if checksum is None:
            checksum = await asyncio.to_thread(codec.checksum, view)
        yield pb.GetResponse(result=pb.GetResult(index=index, checksum=checksum))
        for start in range(0, len(view), CHUNK_BYTES):
            yield chunks.pack(view[start : start + CHUNK_BYTES])

    # -- writing

    async def Put(
        self, request_iterator: AsyncIterator[chunks.Received], context: Context
    ) -> pb.PutResponse:
        self.calls["Put"] += 1
        try:
            return await self._put(request_iterator)
        except errors.KVStoreError as error:
            await context.abort(code_of(error), str(error), metadata_of(error))
            raise AssertionError("abort raises") from error

    async def _put(self, requests: AsyncIterator[chunks.Received]) -> pb.PutResponse:
        first = await anext(requests, None)
        if not isinstance(first, pb.PutRequest) or first.WhichOneof("message") != "header":
            raise errors.InvalidRequest("Put: the first message must be a header")
        header = first.header
        session = SessionId(header.session)
        answers, blocks, lease = self._store.reserve(
            convert.to_fingerprint(header.namespace),
            convert.split_keys(header.keys),
            convert.to_parent(header.parent),
            header.block_bytes,
            session,
        )
        checksums: list[int] = []
        failed: list[int] = []
        try:
            reserved = iter(blocks)
            for answer in answers:
                block = next(reserved) if answer is Answer.RESERVED else None
                expected = await self._receive_block(requests, block, header.block_bytes)
                if block is None:
                    continue
                actual = await asyncio.to_thread(codec.checksum, self._store.cpu.view(block))
                if actual != expected:
                    failed.append(len(checksums))
                checksums.append(actual)
            if lease is not None:
                self._store.commit(session, lease, checksums, failed)
                lease = None
        finally:
            if lease is not None:
                self._store.release(session, [lease])
        return pb.PutResponse(answers=[ANSWERS[answer] for answer in answers], corrupt=len(failed))

    async def _receive_block(
        self, requests: AsyncIterator[chunks.Received], block: Block | None, block_bytes: int
    ) -> int:
        """Writes one block's chunks to its slot, if it has one; returns the checksum sent."""
        view = self._store.cpu.view(block) if block is not None else None
        filled = 0
        async for request in requests:
            chunk = request if isinstance(request, memoryview) else None
            kind = "chunk" if chunk is not None else request.WhichOneof("message")
            if kind == "checksum" and filled == block_bytes:
                return int(request.checksum)
            if chunk is None or filled + len(chunk) > block_bytes:
                raise errors.InvalidRequest(
                    f"Put: a {kind} after {filled} of a block's {block_bytes} bytes"
                )
            end = filled + len(chunk)
            if block is not None and view is not None:
                if not block.namespace.is_storing(block):
                    raise errors.UnknownLease("Put: took longer than its lease; nothing is stored")
                view[filled:end] = chunk
            filled = end
        raise errors.InvalidRequest(f"Put: ended after {filled} of a block's {block_bytes} bytes")

    # -- the rest

    @unary
    async def RecordUsage(self, request: pb.RecordUsageRequest) -> pb.RecordUsageResponse:
        info = self._store.namespace(convert.to_fingerprint(request.namespace)).info
        usage = convert.usage_from_wire(request.usage)
        refused = convert.split_keys(request.refused_keys) if request.refused_keys else []
        if request.gpu_capacity_bytes < 0 or request.gpu_used_bytes < 0:
            raise errors.InvalidRequest("gpu_capacity_bytes, gpu_used_bytes: negative")
        if len(request.costs) > COSTS_CHARS_MAX:
            raise errors.InvalidRequest(f"costs: {len(request.costs)} characters are too many")
        decisions = [convert.decision_from_wire(one) for one in request.decisions]
        session = SessionId(request.session)
        if session:
            self._store.leases.check_session(session)
        self._board.record(info, usage, decisions, request.costs)
        self._store.history.note(refused, MissReason.REFUSED)
        if session:
            self._board.note_engine(session, request.gpu_capacity_bytes, request.gpu_used_bytes)
        return pb.RecordUsageResponse()

    @unary
    async def Report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        return pb.ReportResponse(json=json.dumps(self._board.snapshot()))

    @unary
    async def Explain(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        if request.last < 0:
            raise errors.InvalidRequest(f"last: {request.last} is negative")
        return pb.ExplainResponse(json=json.dumps(self._board.explain(request.last)))

    @unary
    async def Clear(self, request: pb.ClearRequest) -> pb.ClearResponse:
        fingerprint = convert.to_fingerprint(request.namespace) if request.namespace else None
        blocks, remote = await self._store.clear(fingerprint, arena_only=request.arena_only)
        return pb.ClearResponse(blocks=blocks, redis_blocks=remote)

    @stream
    async def Watch(self, request: pb.WatchRequest) -> AsyncIterator[pb.WatchResponse]:
        fingerprint = convert.to_fingerprint(request.namespace) if request.namespace else None
        async for event in self._store.watchers.subscribe(fingerprint, request.asked):
            yield pb.WatchResponse(
                kind=_KINDS[event.kind],
                namespace=event.namespace,
                keys=convert.join_keys(event.keys),
                tier=convert.TIER_TO_WIRE[event.tier] if event.tier else pb.TIER_UNSPECIFIED,
            )
