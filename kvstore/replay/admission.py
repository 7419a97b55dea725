"""Which of a request's new blocks are stored: three rules that a replay compares.

Each is asked once a request, after its lookup, and knows only what came before. A rule answers
with how many of the new blocks to store, from the first: only a prefix is useful.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.clock import Clock
from kvstore.replay.trace import RequestKeys
from kvstore.reuse import ReuseSketch


class Admission(ABC):
    """Decides what is worth a write."""

    @abstractmethod
    def admit(self, request: RequestKeys, hits: int) -> int:
        """How many of the blocks after the first `hits`, which are present, to store."""


class AdmitAll(Admission):
    """Stores whatever is new."""

    def admit(self, request: RequestKeys, hits: int) -> int:
        return len(request.keys) - hits


SEEN = 0.25
"""A count above which a block was seen before: one use that faded for two half-lives."""


class SecondSight(Admission):
    """Stores what was asked for before."""

    def __init__(self, clock: Clock):
        self._sketch = ReuseSketch(clock)

    def admit(self, request: RequestKeys, hits: int) -> int:
        new = request.keys[hits:]
        counts = self._sketch.counts(new)
        self._sketch.note(request.keys)
        return next((at for at, count in enumerate(counts) if count < SEEN), len(new))


ADMISSIONS: Mapping[str, Callable[[Clock], Admission]] = MappingProxyType(
    {"all": lambda clock: AdmitAll(), "second-sight": SecondSight}
)
"""Makes each rule, by its name."""
