"""How fast a tier is, from what its own work takes: latency of a question, bandwidth of a batch.

An engine that has not loaded from a far tier yet can't know whether that pays. The server can: it
writes blocks through, and asks what is there. Thread-safe; knows nothing of tiers.
"""

from __future__ import annotations

import threading

BATCHES_KEPT = 8
"""Measurements fade: so many of the last ones make up most of the answer."""


class Pace:
    """The speed of one tier, as measured lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._seconds = 0.0
        self._latency_s: float | None = None

    def note_answer(self, seconds: float) -> None:
        """A question without payload was answered."""
        with self._lock:
            last_s = seconds if self._latency_s is None else self._latency_s
            self._latency_s = last_s + (seconds - last_s) / BATCHES_KEPT

    def note_batch(self, size_bytes: int, seconds: float) -> None:
        """A batch of so many payload bytes went to the tier or came from it."""
        if size_bytes <= 0:
            return  # it failed, which says nothing of speed
        with self._lock:
            kept = 1 - 1 / BATCHES_KEPT
            self._bytes = self._bytes * kept + size_bytes
            self._seconds = self._seconds * kept + seconds

    @property
    def measured(self) -> tuple[float, float] | None:
        """Seconds until an answer, and bytes a second; None while either is unknown."""
        with self._lock:
            if self._latency_s is None or not self._seconds:
                return None
            return self._latency_s, self._bytes / self._seconds
