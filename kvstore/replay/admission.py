"""Which of a request's new blocks are stored: the rules that a replay compares.

Each is asked once a request, after its lookup, and knows only what came before. A rule answers
with how many of the new blocks to store, from the first: only a prefix is useful.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import accumulate, takewhile
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.demand import Demand
from kvstore.history import History
from kvstore.replay.trace import RequestKeys
from kvstore.reuse import ReuseSketch
from kvstore.store import ROOM_SHARE
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


SEEN = 0.25
"""A count above which a block was seen before: one use that faded for two half-lives."""


class SecondSight(Admission):
    """Stores what was asked for before."""

    def __init__(self, clock: Clock):
        self._sketch = ReuseSketch(clock)

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        new = request.keys[hits:]
        counts = self._sketch.counts(new)
        self._sketch.note(request.keys)
        return next((at for at, count in enumerate(counts) if count < SEEN), len(new))


GAIN_MIN = 0.05
"""Hits that a write must earn. A hit saves the prefill of a block, a write costs its copy, and a
later load another: with less than one hit in twenty writes, memory and bandwidth are spent for
nothing that anybody would notice."""

SAMPLED = 16
"""One block in so many is watched."""

WATCHED_USES = 8192
"""Uses of watched blocks after which what was counted weighs half."""


class _Ghost:
    """Keys alone, in order of last use: what a small store with some rule would hold."""

    def __init__(self, capacity: int):
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self._capacity = capacity
        self.hits = 0.0
        self.writes = 0.0
        self.full = False

    def use(self, key: BlockKey, wanted: bool) -> None:
        if key in self._keys:
            self.hits += 1
            self._keys.move_to_end(key)
        elif wanted:
            self.writes += 1
            self._keys[key] = None
            if len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
                self.full = True

    def fade(self) -> None:
        self.hits /= 2
        self.writes /= 2


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
        return len(gains) - gains[::-1].index(best) if best > 0 else 0

    def evicted(self, key: BlockKey) -> None:
        self._demand.note_evicted()
        self._history.note([key], MissReason.EVICTED)

    def _was_evicted(self, key: BlockKey) -> bool:
        return self._history.reason(key) is MissReason.EVICTED


class Duel(Admission):
    """Stores at first sight where that earns its writes, else at second sight.

    Two ghosts compete on a sample of the blocks, at the store's capacity scaled down: one stores
    all, one at second sight. What the first one hits more must be `GAIN_MIN` of what it writes
    more. Until its ghost is full there is nothing that new blocks could displace, so a cold store
    takes all; and as the ghosts go on whatever is decided, no decision is for ever.
    """

    def __init__(self, clock: Clock, capacity_blocks: int):
        self._sketch = ReuseSketch(clock)
        capacity = max(1, capacity_blocks // SAMPLED)
        self._all = _Ghost(capacity)
        self._second = _Ghost(capacity)
        self._uses = 0

    def admit(self, request: RequestKeys, hits: int, free: float) -> int:
        counts = self._sketch.counts(request.keys)
        self._sketch.note(request.keys)
        for key, count in zip(request.keys, counts, strict=True):
            if key[-1] % SAMPLED == 0:
                self._all.use(key, True)
                self._second.use(key, count >= SEEN)
                self._uses += 1
        if self._uses >= WATCHED_USES:
            self._uses //= 2
            self._all.fade()
            self._second.fade()
        new = counts[hits:]
        if self._first_sight_pays:
            return len(new)
        return next((at for at, count in enumerate(new) if count < SEEN), len(new))

    @property
    def _first_sight_pays(self) -> bool:
        writes = self._all.writes - self._second.writes
        return not self._all.full or self._all.hits - self._second.hits > GAIN_MIN * writes


ADMISSIONS: Mapping[str, Callable[[Clock, int], Admission]] = MappingProxyType(
    {
        "all": lambda clock, capacity_blocks: AdmitAll(),
        "second-sight": lambda clock, capacity_blocks: SecondSight(clock),
        "gain": lambda clock, capacity_blocks: Gain(clock),
        "duel": Duel,
    }
)
"""Makes each rule, by its name, for a store of some capacity."""
