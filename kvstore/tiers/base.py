"""The contract of a tier: batches of blocks in, one outcome a block out (D7).

What every tier guarantees
  - A block that `get` calls OK is the one that `put` was given under that namespace and key,
    whole; anything else is another outcome, and then the buffer's content means nothing.
  - Outcomes are independent: one block's failure is not its neighbour's.
  - Used bytes never exceed the capacity; `put` makes room itself, and never at the cost of a
    block that is needed by one that stays.
  - Nothing raises for what can happen in operation: a tier that is down says FAILED.

Callers pass the keys of one prefix in order, parent before child. A tier is used by one thread
at a time, unless it says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvstore.errors import InvalidRequest
from kvstore.types import BlockKey, NamespaceInfo, Outcome, TierName, TierStatus

Buffer = TypeVar("Buffer")
"""What a tier copies to and from: `memoryview` for cpu and redis, `torch.Tensor` for gpu."""


class Tier(ABC, Generic[Buffer]):
    """Blocks of KV by namespace and key."""

    name: TierName

    @abstractmethod
    def contains(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is here."""

    @abstractmethod
    def get(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[Buffer],
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Copies blocks into buffers of the namespace's block size.

        Blocks that are not there by the timeout are TIMED_OUT. The buffers stay the caller's.

        Raises:
            InvalidRequest: a buffer has another size than the namespace's blocks.
        """

    @abstractmethod
    def put(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[Buffer],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Keeps copies of blocks; `parent` is the key before the first of them, if any.

        Raises:
            InvalidRequest: a block has another size than the namespace's.
        """

    @abstractmethod
    def evict(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        """Drops blocks, last first; returns how many. Leased blocks and those before them stay."""

    @abstractmethod
    def clear(self, namespace: NamespaceInfo | None = None) -> int:
        """Drops all blocks that nobody has leased, of one namespace or of all."""

    @abstractmethod
    def status(self) -> TierStatus:
        """The tier as it is now. Must not block."""


class RemoteTier(Tier[memoryview]):
    """A tier that other hosts share: thread-safe, verified on the way in and out, may be down."""

    @abstractmethod
    def find(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Like `contains`, but None when the tier could not be asked."""

    @abstractmethod
    def get_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        timeout_s: float | None = None,
    ) -> list[tuple[Outcome, int]]:
        """Like `get`, with the verified checksum of each block that is OK (else 0)."""

    @abstractmethod
    def put_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        checksums: Sequence[int],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Like `put`, for blocks whose checksums are known."""

    @abstractmethod
    def refresh(self) -> None:
        """Asks the tier how full it is, for `status`; finds out whether it is back."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections."""


def check_batch(namespace: NamespaceInfo, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
    """Raises InvalidRequest unless there is one buffer a key, each of the block size."""
    if len(keys) != len(sizes):
        raise InvalidRequest(f"{len(keys)} keys, but {len(sizes)} buffers")
    for index, size in enumerate(sizes):
        if size != namespace.block_bytes:
            raise InvalidRequest(
                f"buffer {index} has {size} bytes; a block of this namespace has "
                f"{namespace.block_bytes}"
            )
