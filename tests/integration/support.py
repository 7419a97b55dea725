"""Blocks with known contents, and short ways to store, load and ask, for the integration tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc

from kvstore.client import Found, Loaded, Store, Stored
from kvstore.client.store import Namespace
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo, TierName
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire._pb import kvstore_pb2_grpc as pb_grpc
from kvstore.wire.limits import CHANNEL_OPTIONS

BLOCK_BYTES = 64 << 10
BLOCK_TOKENS = 16


def info_of(name: str, block_bytes: int = BLOCK_BYTES, **names: str) -> NamespaceInfo:
    """A namespace of this name, the same in every process."""
    fingerprint = Fingerprint(hashlib.sha256(name.encode()).digest())
    return NamespaceInfo(fingerprint, block_bytes, BLOCK_TOKENS, **names)


def chain(name: str, count: int, parent: BlockKey | None = None) -> list[BlockKey]:
    """The keys of consecutive blocks of one prefix."""
    keys = []
    for _ in range(count):
        parent = BlockKey(hashlib.sha256((parent or b"") + name.encode()).digest())
        keys.append(parent)
    return keys


def content(key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes of a block: every key's are different."""
    return hashlib.shake_128(key).digest(block_bytes)


def store(namespace: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> Stored:
    """Stores the blocks with their contents."""

    def source(index: int, into: memoryview) -> None:
        into[:] = content(keys[index], len(into))

    return namespace.store(keys, source, parent)


class Checked(NamedTuple):
    """A lookup and a load whose bytes were all compared."""

    found: Found
    loaded: Loaded

    @property
    def blocks(self) -> int:
        """How many were loaded, right in every byte."""
        return self.loaded.blocks


def load(
    namespace: Namespace, keys: Sequence[BlockKey], found: Found | None = None, **options: Any
) -> Checked:
    """Looks up and loads; fails when a byte of a block that counts as loaded is wrong."""
    found = found or namespace.lookup(keys)
    got: dict[int, bytes] = {}
    loaded = namespace.load(found, lambda index, view: got.update({index: bytes(view)}), **options)
    first = options.get("first", 0)
    for index in range(first, first + loaded.blocks):
        assert got[index] == content(keys[index], namespace.info.block_bytes), f"block {index}"
    return Checked(found, loaded)


def tiers(runs: Sequence[tuple[TierName, int]]) -> dict[TierName, int]:
    """Runs as counts."""
    counts: dict[TierName, int] = {}
    for name, count in runs:
        counts[name] = counts.get(name, 0) + count
    return counts


def report(store: Store) -> dict[str, Any]:
    """The report's document."""
    document: dict[str, Any] = json.loads(store.report())
    return document


def control(store: Store) -> dict[str, int]:
    """Leases and slots that are held now."""
    held = report(store)["control"]
    return {name: held[name] for name in ("leases", "reserved_slots", "quarantined_slots")}


NOTHING_HELD = {"leases": 0, "reserved_slots": 0, "quarantined_slots": 0}


def tier(store: Store, name: str) -> dict[str, Any]:
    """One tier of the report."""
    return next(tier for tier in report(store)["tiers"] if tier["name"] == name)


class Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """An error that came as an answer on a session's stream, as if the call had one of its own."""

    def __init__(self, error: pb.Error):
        super().__init__(error.message)
        self._error = error

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self._error.code)

    def details(self) -> str:
        return self._error.message


class RawStub(pb_grpc.KVStoreStub):
    """The stub, with a session, whose calls can be made like the others."""

    def __init__(self, channel: grpc.Channel):
        super().__init__(channel)
        self._requests: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        sending = iter(self._requests.get, None)
        self.stream = self.Session(sending, wait_for_ready=True)

    def send(self, call: pb.SessionRequest) -> None:
        """Sends a message; its answer is still to be read."""
        self._requests.put(call)

    def ask(self, call: pb.SessionRequest) -> pb.SessionResponse:
        """Sends a message and reads one."""
        self.send(call)
        answer: pb.SessionResponse = next(self.stream)
        assert answer.id == call.id
        if answer.HasField("error"):
            raise Refused(answer.error)
        return answer

    def end(self) -> None:
        """Ends the session."""
        self.stream.cancel()
        self._requests.put(None)

    def Lookup(self, request: pb.LookupRequest) -> pb.LookupResponse:
        return self.ask(pb.SessionRequest(id=1, lookup=request)).lookup

    def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        return self.ask(pb.SessionRequest(id=2, reserve=request)).reserve

    def Commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        return self.ask(pb.SessionRequest(id=3, commit=request)).commit

    def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        return self.ask(pb.SessionRequest(id=4, abort=request)).abort

    def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        return self.ask(pb.SessionRequest(id=5, release=request)).release


class Raw:
    """The stub itself, and a session on it, for what the client would never send."""

    def __init__(self, target: str):
        self.target = target
        self._channel = grpc.insecure_channel(
            target, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = RawStub(self._channel)
        attach = pb.SessionRequest(attach=pb.AttachRequest(client="raw"))
        self.answer = self.stub.ask(attach).attach
        self.session = self.answer.session

    def detach(self) -> None:
        """Ends the session, but not the connection."""
        self.stub.end()

    def open(self, info: NamespaceInfo) -> None:
        """Opens a namespace."""
        self.stub.OpenNamespace(
            pb.OpenNamespaceRequest(
                namespace=info.fingerprint,
                block_bytes=info.block_bytes,
                block_tokens=info.block_tokens,
                model=info.model,
                tenant=info.tenant,
            )
        )

    def reserve(self, info: NamespaceInfo, keys: Sequence[BlockKey]) -> pb.ReserveResponse:
        """Reserves slots."""
        return self.stub.Reserve(
            pb.ReserveRequest(
                namespace=info.fingerprint,
                keys=b"".join(keys),
                block_bytes=info.block_bytes,
            )
        )

    def lookup(
        self, info: NamespaceInfo, keys: Sequence[BlockKey], lease_ms: int = 30_000
    ) -> pb.LookupResponse:
        """Looks up, with a lease."""
        return self.stub.Lookup(
            pb.LookupRequest(
                namespace=info.fingerprint,
                keys=b"".join(keys),
                lease_ms=lease_ms,
            )
        )

    def close(self) -> None:
        """Ends the session and the connection."""
        self.stub.end()
        self._channel.close()


@contextmanager
def raw(target: str) -> Iterator[Raw]:
    """A raw client, closed at the end."""
    client = Raw(target)
    try:
        yield client
    finally:
        client.close()
