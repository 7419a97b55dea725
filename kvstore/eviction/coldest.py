"""The rule by which room is made: the first candidate that may go.

The CPU tier and the replay both make room by it, so that a replay tells what the tier would do.
"""

from __future__ import annotations

from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block


def coldest(policy: EvictionPolicy) -> Block | None:
    """The block to evict: the policy's first that nothing needs; None if all are needed."""
    return next((block for block in policy.candidates() if block.evictable), None)
