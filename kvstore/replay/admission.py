"""Which of a request's new blocks are stored: the rules that a replay compares.

Each is asked once a request, after its lookup, and knows only what came before. A rule answers
with how many of the new blocks to store, from the first: only a prefix is useful.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.demand import ROOM_SHARE, Demand
from kvstore.first_sight import SEEN, FirstSight
from kvstore.history import History
from kvstore.replay.trace import RequestKeys
from kvstore.reuse import ReuseSketch
from kvstore.types import BlockKey, Fingerprint, MissReason

_NAMESPACE = Fingerprint(bytes(32))


class Admission(ABC):
    """Decides what is worth a write."""

    @abstractmethod
    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        """How many of the blocks after the first `hits`, which are present, to store.

        `free` is the share of the store that is free.
        """

    def evicted(self, key: BlockKey) -> None:
        """Hears of each block that made room. Only what learns from it needs to listen."""
        return


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

    The server knows how likely each block is asked for again, and how likely that is of what it
    would displace (`kvstore.demand`); an engine stores the beginning of the new blocks for which
    the sum of the differences is highest (`decide_store`, in the engine's package). What only a
    running engine can tell, its measured costs, is left out: storing and loading cost nothing.
    """

    def __init__(self, clock: Clock):
        self._demand = Demand(ReuseSketch(clock))
        self._history = History(clock)

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        chances = self._demand.note(_NAMESPACE, request.keys)[hits:]
        evicted = takewhile(self._was_evicted, request.keys[hits:])
        self._demand.note_regretted(sum(1 for _ in evicted))
        pressure = self._demand.pressure if free < ROOM_SHARE else 0.0
        gains = list(accumulate(chance - pressure for chance in chances))
        best = max(gains, default=0.0)
        wanted = len(gains) - gains[::-1].index(best) if best > 0 else 0
        self._history.note(request.keys[hits + wanted :], MissReason.REFUSED)
        return wanted

    def evicted(self, key: BlockKey) -> None:
        self._demand.note_evicted()
        self._history.note([key], MissReason.EVICTED)

    def _was_evicted(self, key: BlockKey) -> bool:
        return self._history.reason(key) is MissReason.EVICTED


class Duel(Admission):
    """Stores at first sight where that earns its writes, else at second sight."""

    def __init__(self, clock: Clock, capacity_blocks: int):
        self._first_sight = FirstSight(ReuseSketch(clock), capacity_blocks)

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        seen = self._first_sight.note(request.keys)[hits:]
        return len(seen) if self._first_sight.pays else _leading(seen)


def _leading(wanted: Sequence[bool]) -> int:
    return next((at for at, one in enumerate(wanted) if not one), len(wanted))


ADMISSIONS: Mapping[str, Callable[[Clock, int], Admission]] = MappingProxyType(
    {
        "all": lambda clock, capacity_blocks: AdmitAll(),
        "second-sight": lambda clock, capacity_blocks: SecondSight(clock),
        "gain": lambda clock, capacity_blocks: Gain(clock),
        "duel": Duel,
    }
)
"""Makes each rule, by its name, for a store of some capacity."""
