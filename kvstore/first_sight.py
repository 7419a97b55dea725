"""Whether a block is worth storing when it is seen for the first time, or only at the second.

Nobody can tell which new block comes back, but which habit pays can be tried. Two ghosts, which
are keys in order of last use, compete on one block in sixteen, at the store's capacity scaled
down: one takes every block, the other those that were asked for before. Taking at first sight
pays where what the first ghost hits more is at least `GAIN_MIN` of what it writes more. It is
set dueling (Qureshi et al., ISCA 2007) on a spatial sample (Waldspurger et al., FAST 2015).

Until the first ghost is full there is nothing that new blocks could displace, so a cold store
takes all. The ghosts go on whatever is decided, so that no decision is for ever.

The sample is taken by the keys' last byte, so keys must be hashes, as block keys are. Knows
nothing of prefixes, leases, tiers or engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.reuse import ReuseSketch
from kvstore.types import BlockKey

GAIN_MIN = 0.05
"""Hits that a write must earn. A hit saves the prefill of a block, a write costs its copy, and a
later load another: with less than one hit in twenty writes, memory and bandwidth are spent for
nothing that anybody would notice."""

SAMPLED = 16
"""One block in so many is watched."""

FADE_USES = 8192
"""Uses of watched blocks after which what was counted weighs half."""

SEEN = 0.25
"""A count above which a block was seen before: one use that faded for two half-lives."""


class FirstSight:
    """Watches what is asked for. Not thread-safe."""

    def __init__(self, sketch: ReuseSketch, capacity_blocks: int):
        self._sketch = sketch
        capacity = max(1, capacity_blocks // SAMPLED)
        self._first = _Ghost(capacity)
        self._second = _Ghost(capacity)
        self._uses = 0

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Notes that a request asked for these blocks."""
        watched = [key for key in keys if key[-1] % SAMPLED == 0]
        for key, count in zip(watched, self._sketch.counts(watched), strict=True):
            self._first.use(key, True)
            self._second.use(key, count >= SEEN)
        self._sketch.note(watched)
        self._uses += len(watched)
        if self._uses >= FADE_USES:
            self._uses //= 2
            self._first.fade()
            self._second.fade()

    @property
    def pays(self) -> bool:
        """Whether to store what was never seen before."""
        writes = self._first.writes - self._second.writes
        return not self._first.full or self._first.hits - self._second.hits > GAIN_MIN * writes


class _Ghost:
    """What a small store with one habit would hold: keys alone."""

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
