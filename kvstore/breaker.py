"""A circuit breaker: stops asking a tier that fails, and asks again by itself.

Closed: calls pass. After `FAILURES_MAX` failures in a row it opens: calls are refused at once, so
that a dead tier costs nothing. After a pause one call passes as a probe: its success closes the
breaker, its failure doubles the pause, up to `PAUSE_S_MAX`. Thread-safe.
"""

from __future__ import annotations

import threading

from kvstore.clock import Clock

FAILURES_MAX = 3
PAUSE_S_MIN = 0.5
PAUSE_S_MAX = 15.0
PROBE_S_MAX = 10.0
"""A probe that has not answered by then counts as failed: its caller may have died."""


class Breaker:
    """Whether to ask a tier."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = PAUSE_S_MIN
        self._closed_again_s = 0.0
        self._probing = False
        self.opened = 0
        """How often it opened."""

    @property
    def open(self) -> bool:
        """Whether calls are refused, but for a probe now and then."""
        return self._failures >= FAILURES_MAX

    def allow(self) -> bool:
        """Whether a call may pass now. True while open makes the caller the probe."""
        with self._lock:
            if not self.open:
                return True
            now_s = self._clock.monotonic_s()
            if now_s < self._closed_again_s:
                return False
            self._closed_again_s = now_s + PROBE_S_MAX
            self._probing = True
            return True

    def succeeded(self) -> None:
        """Notes an answer: closes the breaker."""
        with self._lock:
            self._failures = 0
            self._pause_s = PAUSE_S_MIN
            self._probing = False

    def failed(self) -> None:
        """Notes a failure: may open the breaker, or open it for longer."""
        with self._lock:
            was_open = self.open
            self._failures += 1
            if not self.open or (was_open and not self._probing):
                return  # a call that passed before it opened says nothing new
            if was_open:
                self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)
            else:
                self.opened += 1
            self._probing = False
            self._closed_again_s = self._clock.monotonic_s() + self._pause_s
