"""How likely blocks are asked for again, learnt from what is asked for, misses included (D8).

Each lookup that stands for a request is noted here, whether it hit or not. Of every namespace,
so of every model and tenant, it is counted how many blocks were asked for that had been asked
for n times before, by how deep they stand in their prefix. What share of those asked for once
comes back a second time is the ratio of two of these counts, and is the probability that a block
just seen for the first time will be of use; likewise for the second time, and so on. While
little was seen, the answer is the optimistic `PRIOR`: what is stored without need costs a copy,
what is missing costs a prefill.

When the arena is full, a block that is stored displaces another. What that one was worth is the
share of evicted blocks that are asked for again: `pressure`.

Counts fade, so that conditions may change. Knows nothing of tiers, tensors or time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.reuse import ReuseSketch
from kvstore.types import BlockKey, Fingerprint

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
FADE_BLOCKS = 1 << 14
"""After so many counted blocks, those before them count half."""

ROOM_SHARE = 0.02
"""Share of the arena that is free while blocks displace nothing."""

Counts = npt.NDArray[np.float64]


class Demand:
    """What was asked for. Not thread-safe."""

    def __init__(self, sketch: ReuseSketch):
        self._sketch = sketch
        self._asked: dict[Fingerprint, Counts] = {}
        self._evicted = self._regretted = 0.0

    def note(self, namespace: Fingerprint, keys: Sequence[BlockKey], first: int = 0) -> list[float]:
        """Counts one request for these blocks, which begin at position `first` of a prefix.

        Returns for each the probability that it is asked for again.
        """
        positions = _counted(first, first + len(keys))
        if not len(positions):
            return [PRIOR] * len(keys)
        chosen = [keys[position - first] for position in positions.tolist()]
        before = np.array(self._sketch.counts(chosen)).round().astype(np.intp)
        self._sketch.note(chosen)
        times = np.minimum(before, TIMES_MAX - 1)
        depths = _depth_classes(positions)
        asked = self._asked.setdefault(namespace, np.zeros((DEPTHS, TIMES_MAX + 1)))
        chances = _chances(asked)[depths, times]
        # Afterwards: these had no chance yet to be asked for again.
        np.add.at(asked, (depths, np.minimum(before, TIMES_MAX)), 1.0)
        if asked.sum() > FADE_BLOCKS:
            asked /= 2
        self._fade(len(chosen))
        # Each block that was not counted is like the next one that was.
        nearest = np.searchsorted(positions, np.arange(first, first + len(keys)))
        spread: list[float] = chances[np.minimum(nearest, len(positions) - 1)].tolist()
        return spread

    def note_evicted(self, blocks: int = 1) -> None:
        """So many blocks made room for others."""
        self._evicted += blocks

    def note_regretted(self, blocks: int) -> None:
        """So many blocks were asked for after they had made room."""
        self._regretted += blocks

    def _fade(self, blocks: int) -> None:
        """What was evicted counts less with everything that is asked for, regretted or not."""
        kept = 0.5 ** (blocks / FADE_BLOCKS)
        self._evicted *= kept
        self._regretted *= kept

    @property
    def pressure(self) -> float:
        """The share of evicted blocks that were asked for again: what a displaced one is worth."""
        return min(self._regretted / (self._evicted + PRIOR_BLOCKS), 1.0)


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
