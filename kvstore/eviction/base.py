"""The contract between the CPU tier and an eviction policy.

The caller guarantees
  - `insert` once for each block, before any other call with it, and `remove` once at its end;
  - `touch` gets the blocks of one prefix in order, parent before child, whenever a prefix is
    used, so that a block is never used without those before it.

The policy guarantees
  - `candidates` yields every block that it knows exactly once, the one to go first first;
  - it changes nothing but its own order. Whether a candidate may go (no lease, nothing after
    it) is the caller's to check, which takes the first candidate that may.

A policy sees neither bytes nor slots nor time: the order of calls is all it needs, so a trace
replays it exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvstore.index import Block


class EvictionPolicy(ABC):
    """An order of blocks, coldest first."""

    @abstractmethod
    def insert(self, block: Block) -> None:
        """Adds a block that was just stored."""

    @abstractmethod
    def touch(self, prefix: Sequence[Block]) -> None:
        """Notes that a prefix was used."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """Forgets a block."""

    @abstractmethod
    def candidates(self) -> Iterator[Block]:
        """Blocks in the order in which they should go. The policy mustn't change meanwhile."""

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks it knows."""
