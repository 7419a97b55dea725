"""The contract between a tier and an eviction policy.

The caller guarantees
  - `insert` once for each block, before any other call with it, and `remove` once at its end,
    be it evicted or cleared;
  - `touch` gets the blocks of one prefix in order, parent before child, whenever a prefix is
    used, so that a block is never used without those before it. Blocks are touched a first time
    right after they were inserted, at the end of the prefix that they extend: that touch is part
    of storing them.

The policy guarantees
  - `candidates` yields every block that it knows exactly once, the one to go first first, and
    what follows a block before that block. It is lazy, and its first answers are cheap however
    many blocks there are: a tier asks for each eviction anew;
  - looking at the candidates changes nothing. Whether a candidate may go (no lease, nothing
    after it) is the caller's to check, which takes the first candidate that may;
  - what it remembers of blocks that are gone is bounded by how many it knows.

A policy sees neither bytes nor slots, and time only through a clock that it was given: the calls
and their times are all it needs, so a trace replays it exactly.
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
        """Notes that a prefix was used, or stored at its end."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """Drops a block from the order; its key may be remembered."""

    @abstractmethod
    def candidates(self) -> Iterator[Block]:
        """Blocks in the order in which they should go. The policy mustn't change meanwhile."""

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks it knows."""
