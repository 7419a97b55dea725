"""How likely blocks are asked for again, learnt from what is asked for, misses included (D8).

Each lookup that stands for a request is noted here, whether it hit or not. Of every namespace,
so of every model and tenant, it is counted how many blocks were asked for that had been asked
for n times before, by how deep they stand in their prefix. What share of those asked for once
comes back a second time is the ratio of two of these counts, and is the probability that a block
just seen for the first time will be of use; likewise for the second time, and so on. While
little was seen, the answer is the optimistic `PRIOR`: what is stored without need costs a copy,
what is missing costs a prefill.

When the arena is full, a block that is stored displaces another. Whether blocks that nobody asked
for before are worth that, is tried on a sample (`kvstore.first_sight`). Where they aren't, the
answer for them is 0, until somebody asks a second time.

Counts fade, so that conditions may change. Knows nothing of tiers, tensors or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.clock import Clock
from kvstore.first_sight import SEEN, FirstSight
from kvstore.reuse import ReuseSketch
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

PRIOR = 0.5
"""Laplace's rule for an event never tried: (0 + 1) / (0 + 2)."""

PRIOR_BLOCKS = 64
"""How many blocks have to be seen until what was seen counts as much as the prior."""

DENSE_BLOCKS = 32
STRIDE = 8
"""Of the blocks from `DENSE_BLOCKS` on, only the last of each eight is counted, and stands for all:
they are mostly asked for together, and a lookup must stay cheap."""

TIMES_MAX = 4
DEPTHS = 16
WATCHED_WIDTH = 1 << 14
"""Of the sketch of the blocks that are watched, one in sixteen."""

FADE_BLOCKS = 1 << 14
"""After so many counted blocks, those before them count half."""

ROOM_SHARE = 0.02
"""Share of the arena that is free while blocks displace nothing."""

Counts = npt.NDArray[np.float64]


class Demand:
    """What was asked for. Not thread-safe."""

    def __init__(self, clock: Clock, capacity_bytes: int):
        """`capacity_bytes` is the arena's."""
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._sketch = ReuseSketch(clock)
        self._asked: dict[Fingerprint, Counts] = {}
        self._first_sight: dict[int, FirstSight] = {}
        """By size of block: as if that size had the arena alone."""

    def note(
        self, info: NamespaceInfo, keys: Sequence[BlockKey], first: int = 0, full: bool = False
    ) -> tuple[list[float], bool]:
        """Counts one request for these blocks, which begin at position `first` of a prefix.

        Returns for each the probability that it is asked for again, and whether the arena is
        crowded: `full`, and with better than what nobody asked for before, which then has 0.
        """
        first_sight = self._watching(info.block_bytes)
        first_sight.note(keys)
        crowded = full and not first_sight.pays
        positions = _counted(first, first + len(keys))
        if not len(positions):
            return [PRIOR] * len(keys), crowded
        chosen = [keys[position - first] for position in positions.tolist()]
        counts = np.array(self._sketch.counts(chosen))
        self._sketch.note(chosen)
        before = counts.round().astype(np.intp)
        depths = _depth_classes(positions)
        asked = self._asked.setdefault(info.fingerprint, np.zeros((DEPTHS, TIMES_MAX + 1)))
        chances = _chances(asked)[depths, np.minimum(before, TIMES_MAX - 1)]
        # Afterwards: these had no chance yet to be asked for again.
        np.add.at(asked, (depths, np.minimum(before, TIMES_MAX)), 1.0)
        if asked.sum() > FADE_BLOCKS:
            asked /= 2
        if crowded:
            chances[counts < SEEN] = 0.0
        # Each block that was not counted is like the next one that was.
        nearest = np.searchsorted(positions, np.arange(first, first + len(keys)))
        spread: list[float] = chances[np.minimum(nearest, len(positions) - 1)].tolist()
        return spread, crowded

    def _watching(self, block_bytes: int) -> FirstSight:
        if block_bytes not in self._first_sight:
            capacity_blocks = self._capacity_bytes // block_bytes
            watching = FirstSight(ReuseSketch(self._clock, width=WATCHED_WIDTH), capacity_blocks)
            self._first_sight[block_bytes] = watching
        return self._first_sight[block_bytes]


def _counted(first: int, end: int) -> npt.NDArray[np.intp]:
    """The positions among `first` to `end` that are counted. Always the same ones of a prefix."""
    dense = np.arange(first, min(end, DENSE_BLOCKS))
    start = max(first, DENSE_BLOCKS)
    sparse = np.arange(start + (STRIDE - 1 - start) % STRIDE, end, STRIDE)
    return np.concatenate((dense, sparse)).astype(np.intp)


def _depth_classes(positions: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """By powers of two."""
    return np.minimum(np.log2(positions + 1).astype(np.intp), DEPTHS - 1)


def _chances(asked: Counts) -> Counts:
    """Probability of one more request, by depth class and by how often was asked before this one.

    At a depth that was seen little, what holds for all depths is the prior.
    """
    overall = asked.sum(axis=0)
    general = (overall[1:] + PRIOR * PRIOR_BLOCKS) / (overall[:-1] + PRIOR_BLOCKS)
    chances = (asked[:, 1:] + general * PRIOR_BLOCKS) / (asked[:, :-1] + PRIOR_BLOCKS)
    capped: Counts = np.minimum(chances, 1.0)
    return capped
