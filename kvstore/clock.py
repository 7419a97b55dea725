"""Time as a parameter: everything that waits or expires asks a clock that it was given (D12).

Knows nothing of the store. Tests pass `kvstore.testing.FakeClock`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time, both in seconds."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back. For deadlines and durations."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970. For what people read and for what other hosts compare."""
        ...


class SystemClock(Clock):
    """The clock of the machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
