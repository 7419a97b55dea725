"""What was stored, evicted and asked for, for those who want to know: routers, recorders, tests.

Each watcher has a bounded queue. One that falls behind loses its place, rather than holding
back the store or missing events without knowing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.errors import FellBehind
from kvstore.types import BlockKey, Fingerprint, TierName

EVENTS_MAX = 65536
KEYS_MAX = 1 << 20
"""Keys in the events that wait: a lookup may have thousands, and the events keep them alive."""


class EventKind(Enum):
    """What happened to the blocks."""

    STORED = "stored"
    EVICTED = "evicted"
    ASKED = "asked"
    """A request looked for the blocks, whether they were there or not."""


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks that came into, or left, a tier, or were asked for."""

    kind: EventKind
    namespace: Fingerprint
    keys: tuple[BlockKey, ...]
    tier: TierName | None
    """None when they were asked for."""


class _Watcher:
    def __init__(self, namespace: Fingerprint | None, asked: bool):
        self.namespace = namespace
        self.asked = asked
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.keys_waiting = 0
        self.behind = False


class Watchers:
    """Everyone who watches. Used within one event loop."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()

    def publish(
        self,
        kind: EventKind,
        namespace: Fingerprint,
        keys: Sequence[BlockKey],
        tier: TierName | None = None,
    ) -> None:
        """Tells the watchers of this namespace."""
        if not self._watchers:
            return
        event = Event(kind, namespace, tuple(keys), tier)
        for watcher in self._watchers:
            if watcher.behind or watcher.namespace not in (None, namespace):
                continue
            if watcher.asked != (kind is EventKind.ASKED):
                continue
            waiting = watcher.keys_waiting + len(event.keys)
            if watcher.queue.qsize() >= EVENTS_MAX or waiting > KEYS_MAX:
                watcher.behind = True
            else:
                watcher.keys_waiting = waiting
                watcher.queue.put_nowait(event)

    def subscribe(self, namespace: Fingerprint | None, asked: bool = False) -> AsyncIterator[Event]:
        """Events from this call on, of one namespace or of all.

        Either what is stored and evicted, or what is `asked` for.

        Raises, while iterated:
            FellBehind: too many events waited to be read.
        """
        watcher = _Watcher(namespace, asked)
        self._watchers.add(watcher)
        return self._events(watcher)

    async def _events(self, watcher: _Watcher) -> AsyncIterator[Event]:
        try:
            while not watcher.behind:
                event = await watcher.queue.get()
                if event is None:
                    return
                watcher.keys_waiting -= len(event.keys)
                yield event
            raise FellBehind(
                f"more than {EVENTS_MAX} events, or {KEYS_MAX} keys, waited; look again at what "
                "is there"
            )
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Ends all subscriptions, after what they have not read yet."""
        for watcher in self._watchers:
            watcher.queue.put_nowait(None)
