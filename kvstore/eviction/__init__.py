"""Which block goes first when room is needed: one policy a file, under the contract in `base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.lru import LRU

POLICIES: Mapping[str, Callable[[Clock], EvictionPolicy]] = MappingProxyType(
    {"lru": lambda clock: LRU()}
)
"""Makes each policy, by its name."""

DEFAULT = "lru"
"""The server's."""
