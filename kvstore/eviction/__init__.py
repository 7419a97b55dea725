"""Which block goes first when room is needed: one policy a file, under the contract in `base`.

`POLICIES` makes a policy of each name; `DEFAULT` is the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.continuation import Continuation
from kvstore.eviction.cost import CostAware
from kvstore.eviction.fifo import FIFO
from kvstore.eviction.lfu import LFU
from kvstore.eviction.lru import LRU
from kvstore.eviction.s3fifo import S3FIFO
from kvstore.eviction.slru import SLRU

POLICIES: Mapping[str, Callable[[Clock], EvictionPolicy]] = MappingProxyType(
    {
        "lru": lambda clock: LRU(),
        "fifo": lambda clock: FIFO(),
        "lfu": lambda clock: LFU(),
        "slru": lambda clock: SLRU(),
        "s3fifo": lambda clock: S3FIFO(),
        "cost": lambda clock: CostAware(),
        "continuation": lambda clock: Continuation(),
    }
)

DEFAULT = "lru"

__all__ = ["DEFAULT", "POLICIES", "EvictionPolicy"]
