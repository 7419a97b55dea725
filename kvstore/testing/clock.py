"""A clock that stands still until it is told to go on."""

from __future__ import annotations


class FakeClock:
    """A `kvstore.clock.Clock` set by hand."""

    def __init__(self, wall_s: float = 1_700_000_000.0):
        self._wall_s = wall_s
        self._monotonic_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds advanced so far."""
        return self._monotonic_s

    def wall_s(self) -> float:
        """The start, and the seconds advanced since."""
        return self._wall_s + self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self._monotonic_s += seconds
