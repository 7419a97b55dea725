"""The gpu tier: a bounded pool of blocks on the engine's own device, in the engine's process.

Asked before the server, because a copy within device memory costs next to nothing. Each block is
one flat tensor of bytes; the device's allocator reuses the memory of dropped ones. On a machine
without an accelerator the device is "cpu", and everything else is the same.

Thread-safe. Eviction is by the same index and policy as the CPU tier's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from kvstore.errors import InvalidRequest
from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.lru import LRU
from kvstore.index import Block, Namespace
from kvstore.tiers.base import Tier, check_batch
from kvstore.types import (
    BlockKey,
    Fingerprint,
    NamespaceInfo,
    Outcome,
    TierName,
    TierState,
    TierStatus,
)

TensorSink = Callable[[int, torch.Tensor], None]
"""Takes a block's position among the keys and its bytes: uint8, flat, not to be written to."""

TensorSource = Callable[[int, torch.Tensor], None]
"""Takes a block's position among the keys and where to write its bytes: uint8, flat."""


class GpuTier(Tier[torch.Tensor]):
    """Blocks as tensors on one device. Buffers are contiguous tensors of the block's bytes."""

    name = TierName.GPU

    def __init__(
        self,
        device: torch.device | str,
        capacity_bytes: int,
        policy: Callable[[], EvictionPolicy] = LRU,
    ):
        """Takes memory as blocks come, `capacity_bytes` at most."""
        self.device = torch.device(device)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.RLock()
        self._policy = policy()
        self._namespaces: dict[Fingerprint, Namespace] = {}
        self._tensors: dict[Block, torch.Tensor] = {}
        self._counters = {"stored": 0, "loaded": 0, "evicted": 0, "no_space": 0}

    def longest_prefix(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        """How many blocks from the start of `keys` are here."""
        with self._lock:
            return len(self._index(namespace).longest_prefix(keys))

    def read(self, namespace: NamespaceInfo, keys: Sequence[BlockKey], sink: TensorSink) -> int:
        """Hands the present blocks from the start of `keys` to the sink; returns how many."""
        with self._lock:
            found = self._index(namespace).longest_prefix(keys)
            for position, block in enumerate(found):
                sink(position, self._tensors[block])
            self._policy.touch(_with_ancestors(found))
            self._counters["loaded"] += len(found)
            return len(found)

    def write(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        source: TensorSource,
        parent: BlockKey | None = None,
    ) -> list[Outcome]:
        """Keeps the blocks that are not here yet, with bytes from the source.

        Blocks after one that found no room are not tried: they could not be reached.
        """
        with self._lock:
            index = self._index(namespace)
            outcomes: list[Outcome] = []
            path: list[Block] = []
            before = index.get(parent) if parent is not None else None
            for position, key in enumerate(keys):
                block = index.get(key)
                if block is not None:
                    outcomes.append(Outcome.PRESENT)
                elif Outcome.NO_SPACE in outcomes[-1:] or not self._make_room(namespace, before):
                    outcomes.append(Outcome.NO_SPACE)
                    self._counters["no_space"] += 1
                    continue
                else:
                    block = self._insert(index, namespace, key, parent, position, source)
                    outcomes.append(Outcome.OK)
                path.append(block)
                before, parent = block, key
            self._policy.touch(_with_ancestors(path))
            return outcomes

    # -- the contract

    def contains(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            index = self._index(namespace)
            return [index.get(key) is not None for key in keys]

    def get(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[torch.Tensor],
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        check_batch(namespace, keys, [buffer.nbytes for buffer in into])
        if not all(buffer.is_contiguous() for buffer in into):
            raise InvalidRequest("a buffer is not contiguous")
        with self._lock:
            index = self._index(namespace)
            outcomes = []
            for key, buffer in zip(keys, into, strict=True):
                block = index.get(key)
                if block is not None:
                    _flat(buffer).copy_(self._tensors[block])
                    self._counters["loaded"] += 1
                outcomes.append(Outcome.ABSENT if block is None else Outcome.OK)
            self._policy.touch(_with_ancestors(index.longest_prefix(keys)))
            return outcomes

    def put(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[torch.Tensor],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        check_batch(namespace, keys, [block.nbytes for block in blocks])

        def source(position: int, into: torch.Tensor) -> None:
            into.copy_(_flat(blocks[position]))

        return self.write(namespace, keys, source, parent)

    def evict(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            index = self._index(namespace)
            found = (index.get(key) for key in reversed(keys))
            return sum(self._drop(block) for block in found if block is not None)

    def clear(self, namespace: NamespaceInfo | None = None) -> int:
        with self._lock:
            doomed = [
                block
                for block in self._tensors
                if namespace is None or block.namespace.info.fingerprint == namespace.fingerprint
            ]
            for block in reversed(doomed):  # what comes after a block mostly goes before it
                self._forget(block)
            return len(doomed)

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                TierName.GPU,
                TierState.UP,
                self.capacity_bytes,
                self.used_bytes,
                len(self._tensors),
                dict(self._counters),
            )

    # -- parts

    def _index(self, info: NamespaceInfo) -> Namespace:
        return self._namespaces.setdefault(info.fingerprint, Namespace(info))

    def _insert(
        self,
        index: Namespace,
        info: NamespaceInfo,
        key: BlockKey,
        parent: BlockKey | None,
        position: int,
        source: TensorSource,
    ) -> Block:
        tensor = torch.empty(info.block_bytes, dtype=torch.uint8, device=self.device)
        source(position, tensor)
        block = Block(index, key, parent, 0)
        index.begin(block)
        index.commit(block)
        block.generation = 1
        self._policy.insert(block)
        self._tensors[block] = tensor
        self.used_bytes += info.block_bytes
        self._counters["stored"] += 1
        return block

    def _make_room(self, info: NamespaceInfo, before: Block | None) -> bool:
        """Evicts until a block of this size fits; never what the new block comes after."""
        if info.block_bytes > self.capacity_bytes:
            return False
        if before is not None:
            before.pins += 1
        try:
            while self.used_bytes + info.block_bytes > self.capacity_bytes:
                candidates = self._policy.candidates()
                victim = next((block for block in candidates if block.evictable), None)
                if victim is None:
                    return False
                self._drop(victim)
                self._counters["evicted"] += 1
            return True
        finally:
            if before is not None:
                before.pins -= 1

    def _drop(self, block: Block) -> bool:
        if not block.evictable:
            return False
        self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        self._policy.remove(block)
        block.namespace.remove(block)
        self.used_bytes -= self._tensors.pop(block).nbytes


def _with_ancestors(path: list[Block]) -> list[Block]:
    """The path, with the blocks before its first one in front."""
    return [*(path[0].ancestors() if path else []), *path]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)
