"""How often each block was asked for lately: an estimate in bounded memory.

A count-min sketch with conservative update: it never says less than the truth (but for decay and
rounding), and more only when several blocks share a cell in every row. What it counts fades by
half every `half_life_s` seconds, and also by half every `width / 2` keys, so that the cells can't
fill up under any load: most blocks never asked for read as 0.

The keys' first 16 bytes pick the cells, so keys must be hashes, as block keys are. Nothing is
kept of a key but the cells it was added to. Knows nothing of tiers, engines, or what the counts
are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.clock import Clock
from kvstore.types import BlockKey

ROWS = 4
WIDTH = 1 << 17
"""Cells a row: 2 MiB in all."""

HALF_LIFE_S = 3600.0
"""In traces of chats nearly all reuse comes within ten minutes; of an hour ago, a trace remains."""

_KEY_BYTES = 4 * ROWS
_HALVINGS_MAX = 64
"""Halvings between two rescalings of the cells; a float32 has room for twice as many."""


class ReuseSketch:
    """Counts by key that fade. Not thread-safe."""

    def __init__(self, clock: Clock, half_life_s: float = HALF_LIFE_S, width: int = WIDTH):
        """`width` must be a power of two."""
        assert width.bit_count() == 1
        self._clock = clock
        self._half_life_s = half_life_s
        self._half_life_keys = width / 2
        self._cells = np.zeros((ROWS, width), np.float32)
        self._rows = np.arange(ROWS)[:, None]
        self._halvings = 0.0
        """Since the last rescaling. Instead of all cells fading, what is added grows: a use now
        weighs `2 ** _halvings`."""
        self._seen_s = clock.monotonic_s()

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Counts one use of each of these keys, which are distinct."""
        if not keys:
            return
        self._fade(len(keys))
        at = self._rows, self._columns(keys)
        grown = self._cells[at].min(axis=0) + np.float32(2.0**self._halvings)
        np.maximum.at(self._cells, at, grown)

    def count(self, key: BlockKey) -> float:
        """How often it was noted, each time fading since; 0 if never."""
        return self.counts([key])[0]

    def counts(self, keys: Sequence[BlockKey]) -> list[float]:
        """`count` of each key, in one go."""
        if not keys:
            return []
        self._fade(0)
        lowest = self._cells[self._rows, self._columns(keys)].min(axis=0)
        counts: list[float] = (lowest.astype(np.float64) / 2.0**self._halvings).tolist()
        return counts

    def _columns(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.uint32]:
        words = np.frombuffer(b"".join([key[:_KEY_BYTES] for key in keys]), "<u4")
        return words.reshape(len(keys), ROWS).T & np.uint32(self._cells.shape[1] - 1)

    def _fade(self, keys: int) -> None:
        now_s = self._clock.monotonic_s()
        self._halvings += (now_s - self._seen_s) / self._half_life_s + keys / self._half_life_keys
        self._seen_s = now_s
        if self._halvings > _HALVINGS_MAX:
            self._cells *= np.float32(2.0 ** -min(self._halvings, 149.0))
            self._halvings = 0.0
