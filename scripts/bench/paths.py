"""The ways by which a batch of blocks gets from one process's memory to a store and back.

All copy from the same source buffer and to the same target buffer, with `numpy.copyto` on one
thread. Both are larger than any cache, and each batch is another part of them.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count
from pathlib import Path as File

import numpy as np
import redis

from kvstore.client import Store
from kvstore.tiers.redis import RedisTier
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo, Outcome
from scripts.bench.grpc_bytes import Bytes, BytesService


@dataclass(frozen=True)
class Batch:
    """Consecutive blocks, where they come from, and where they go to."""

    keys: Sequence[BlockKey]
    block_bytes: int
    source: Bytes
    """The blocks, one after the other; likewise `target`."""
    target: Bytes

    def block(self, buffer: Bytes, index: int) -> Bytes:
        """One block's part of `source` or `target`."""
        return buffer[index * self.block_bytes : (index + 1) * self.block_bytes]

    def views(self, buffer: Bytes) -> list[memoryview]:
        """All blocks of `source` or `target`."""
        return [self.block(buffer, index).data for index in range(len(self.keys))]

    def write(self, index: int, view: memoryview) -> None:
        """Copies a block to a store: a `kvstore.client.Source`."""
        np.copyto(np.frombuffer(view, np.uint8), self.block(self.source, index))

    def read(self, index: int, view: memoryview) -> None:
        """Copies a block from a store: a `kvstore.client.Sink`."""
        np.copyto(self.block(self.target, index), np.frombuffer(view, np.uint8))


class Buffers:
    """The source and the target, and batches of them with keys that were never used before."""

    def __init__(self, working_bytes: int, folder: File | None = None):
        """In `folder`, if one is given, as the two `files`, which other processes can map."""
        self.source = np.random.default_rng(0).integers(0, 256, working_bytes, np.uint8)
        self.target = np.ones(working_bytes, np.uint8)  # ones, not zeros: so its pages are there
        self.files: list[File] = []
        if folder is not None:
            self.files = [folder / "source", folder / "target"]
            self.source.tofile(self.files[0])
            self.target.tofile(self.files[1])
            self.source, self.target = (
                np.memmap(file, np.uint8, "r+").view(np.ndarray) for file in self.files
            )
        self._start = 0
        self._names = count()

    def batch(self, blocks: int, block_bytes: int) -> Batch:
        """The next part of the buffers."""
        size = blocks * block_bytes
        if self._start + size > self.source.nbytes:
            self._start = 0
        part = slice(self._start, self._start + size)
        self._start = part.stop
        keys = [BlockKey(sha256(b"%d" % next(self._names)).digest()) for _ in range(blocks)]
        return Batch(keys, block_bytes, self.source[part], self.target[part])


class Path(ABC):
    """One way. `store` and `load` are what is timed."""

    name: str

    @abstractmethod
    def store(self, batch: Batch) -> None:
        """Brings a batch there."""

    @abstractmethod
    def load(self, batch: Batch) -> None:
        """Brings a stored batch to its target."""

    def settle(self) -> None:  # noqa: B027
        """Waits for work that `store` left to the background, if it leaves any."""

    def clear(self) -> None:  # noqa: B027
        """Drops everything, before the block size changes."""

    def forget(self) -> None:  # noqa: B027
        """Drops what earlier rounds stored, when it does not make room by itself."""


class Copy(Path):
    """A copy between the two buffers: the limit of one core."""

    name = "copy"

    def store(self, batch: Batch) -> None:
        for index in range(len(batch.keys)):
            np.copyto(batch.block(batch.target, index), batch.block(batch.source, index))

    def load(self, batch: Batch) -> None:
        self.store(batch)


class Client(Path):
    """The product's client, by whichever of its data planes the connection has."""

    def __init__(self, name: str, store: Store):
        self.name = name
        self._store = store

    def _info(self, block_bytes: int) -> NamespaceInfo:
        fingerprint = sha256(b"%s %d" % (self.name.encode(), block_bytes)).digest()
        return NamespaceInfo(Fingerprint(fingerprint), block_bytes, 16, model="bench")

    def store(self, batch: Batch) -> None:
        stored = self._store.open(self._info(batch.block_bytes)).store(batch.keys, batch.write)
        assert stored.stored == len(batch.keys), stored

    def load(self, batch: Batch) -> None:
        namespace = self._store.open(self._info(batch.block_bytes))
        loaded = namespace.load(namespace.lookup(batch.keys), batch.read)
        assert loaded.blocks == len(batch.keys), loaded

    def settle(self) -> None:
        """Waits until the server has written through to its redis tier."""
        nothing = replace(self._info(1), fingerprint=Fingerprint(bytes(32)))
        self._store.open(nothing)
        self._store.clear(nothing, arena_only=True)

    def clear(self) -> None:
        """Drops everything: taking memory over from another block size has a price of its own."""
        self._store.clear()

    def fill(self, buffers: Buffers, arena_bytes: int, block_bytes: int, blocks: int) -> None:
        """Fills the arena once, so that later stores meet memory that was in use before."""
        for _ in range(arena_bytes // (blocks * block_bytes)):
            self.store(buffers.batch(blocks, block_bytes))


class TierAlone(Path):
    """The product's redis tier, used from this process."""

    name = "redis_tier"

    def __init__(self, tier: RedisTier):
        self._tier = tier

    def _info(self, block_bytes: int) -> NamespaceInfo:
        return NamespaceInfo(Fingerprint(sha256(b"%d" % block_bytes).digest()), block_bytes, 16)

    def store(self, batch: Batch) -> None:
        outcomes = self._tier.put(
            self._info(batch.block_bytes), batch.keys, batch.views(batch.source)
        )
        assert set(outcomes) == {Outcome.OK}, outcomes

    def load(self, batch: Batch) -> None:
        outcomes = self._tier.get(
            self._info(batch.block_bytes), batch.keys, batch.views(batch.target)
        )
        assert set(outcomes) == {Outcome.OK}, outcomes

    def forget(self) -> None:
        """Drops everything in that Redis, also what the server has written through."""
        self._tier.clear()


class RedisPy(Path):
    """redis-py as its documentation shows it: pipelines of SET and GET."""

    name = "redis_py"

    def __init__(self, client: redis.Redis):
        self._client = client

    def store(self, batch: Batch) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, view in zip(batch.keys, batch.views(batch.source), strict=True):
            pipeline.set(key, view)
        pipeline.execute()

    def load(self, batch: Batch) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in batch.keys:
            pipeline.get(key)
        for index, value in enumerate(pipeline.execute()):
            batch.read(index, value)

    def forget(self) -> None:
        self._client.flushdb()


class RawResp(Path):
    """SET and GET on a bare socket: payloads sent from where they are and received in place.

    No pool, no ledger, no checksum: the limit of what a client in Python reaches with one Redis.
    """

    name = "raw_resp"

    def __init__(self, path: File):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        # A database of its own, so that forgetting leaves redis-py's blocks alone.
        self._socket.sendall(b"SELECT 1\r\n")
        self._take(memoryview(bytearray(5)))

    def store(self, batch: Batch) -> None:
        for key, view in zip(batch.keys, batch.views(batch.source), strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$32\r\n%b\r\n$%d\r\n" % (key, batch.block_bytes)
            parts = [memoryview(head), view, memoryview(b"\r\n")]
            sent = self._socket.sendmsg(parts)
            for part in parts:
                if sent < len(part):
                    self._socket.sendall(part[sent:])
                sent = max(sent - len(part), 0)
        self._take(memoryview(bytearray(5 * len(batch.keys))))

    def load(self, batch: Batch) -> None:
        asks = [b"*2\r\n$3\r\nGET\r\n$32\r\n%b\r\n" % key for key in batch.keys]
        self._socket.sendall(b"".join(asks))
        head = memoryview(bytearray(len(b"$%d\r\n" % batch.block_bytes)))
        end = memoryview(bytearray(2))
        for view in batch.views(batch.target):
            self._take(head)
            self._take(view)
            self._take(end)

    def forget(self) -> None:
        self._socket.sendall(b"FLUSHDB\r\n")
        self._take(memoryview(bytearray(5)))

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _take(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            assert count, "Valkey closed the connection"
            into = into[count:]


class GrpcBytes(Path):
    """Streamed gRPC messages of 1 MiB, with nothing around the bytes."""

    name = "grpc_bytes"

    def __init__(self, service: BytesService):
        self._service = service

    def store(self, batch: Batch) -> None:
        self._service.put(batch.keys[0], batch.source)

    def load(self, batch: Batch) -> None:
        self._service.take(batch.keys[0], batch.target)
