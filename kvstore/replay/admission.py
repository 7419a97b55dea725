"""Which of a request's new blocks are stored: the rules that a replay compares.

Each is asked once a request, after its lookup, and knows only what came before. A rule answers
with how many of the new blocks to store, from the first: only a prefix is useful.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.demand import ROOM_SHARE, Demand
from kvstore.first_sight import SEEN
from kvstore.replay.trace import RequestKeys
from kvstore.reuse import ReuseSketch
from kvstore.types import Fingerprint, NamespaceInfo

_NAMESPACE = NamespaceInfo(Fingerprint(bytes(32)), block_bytes=1, block_tokens=1)


class Admission(ABC):
    """Decides what is worth a write."""

    @abstractmethod
    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        """How many of the blocks after the first `hits`, which are present, to store.

        `free` is the share of the store that is free.
        """


class AdmitAll(Admission):
    """Stores whatever is new."""

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        return len(request.keys) - hits


class SecondSight(Admission):
    """Stores what was asked for before."""

    def __init__(self, clock: Clock):
        self._sketch = ReuseSketch(clock)

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        counts = self._sketch.counts(request.keys[hits:])
        self._sketch.note(request.keys)
        return _leading([count >= SEEN for count in counts])


class Gain(Admission):
    """The rule of servers and engines, where a block's KV saves the same wherever it stands.

    The server knows how likely each block is asked for again, and says 0 for what would displace
    better (`kvstore.demand`); an engine stores the new blocks up to the last one that has a
    chance (`decide_store`, in the engine's package). What only a running engine can tell, its
    measured costs, is left out: storing and loading cost nothing.
    """

    def __init__(self, clock: Clock, capacity_blocks: int):
        self._demand = Demand(clock, capacity_blocks)

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        chances, _ = self._demand.note(_NAMESPACE, request.keys, full=free < ROOM_SHARE)
        return max((at for at, chance in enumerate(chances[hits:], 1) if chance), default=0)


def _leading(wanted: Sequence[bool]) -> int:
    return next((at for at, one in enumerate(wanted) if not one), len(wanted))


ADMISSIONS: Mapping[str, Callable[[Clock, int], Admission]] = MappingProxyType(
    {
        "all": lambda clock, capacity_blocks: AdmitAll(),
        "second-sight": lambda clock, capacity_blocks: SecondSight(clock),
        "gain": Gain,
    }
)
"""Makes each rule, by its name, for a store of some capacity."""
