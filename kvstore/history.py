"""Why a block that was here is not: the reason behind a miss (D10).

Remembers the last `ENTRIES_MAX` blocks that left or were refused, by the first 8 bytes of their
keys; a miss beyond that memory is NEVER_SEEN. Knows nothing of tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.clock import Clock
from kvstore.types import BlockKey, MissReason

ENTRIES_MAX = 1 << 16


class History:
    """Reasons by key. Not thread-safe."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[MissReason, float]] = OrderedDict()

    def note(
        self, keys: Iterable[BlockKey], reason: MissReason, kept_s: float | None = None
    ) -> None:
        """Remembers why blocks are gone.

        With `kept_s`, another tier still has them for so many seconds: absent after that, they
        have EXPIRED; absent before, `reason` holds.
        """
        expires_s = float("inf") if kept_s is None else self._clock.monotonic_s() + kept_s
        for key in keys:
            short = bytes(key[:8])
            self._entries.pop(short, None)
            self._entries[short] = (reason, expires_s)
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are here again."""
        for key in keys:
            self._entries.pop(bytes(key[:8]), None)

    def reason(self, key: BlockKey) -> MissReason:
        """Why this absent block is absent."""
        reason, expires_s = self._entries.get(key[:8], (MissReason.NEVER_SEEN, float("inf")))
        return MissReason.EXPIRED if self._clock.monotonic_s() >= expires_s else reason
