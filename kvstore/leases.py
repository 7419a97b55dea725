"""Who holds what until when (D6).

A session is a client that is attached. A lease belongs to one session, carries what it pins,
and ends by release, by expiry, or with its session. Expired leases are returned by `expire` for
their holder to undo; nothing here knows what a lease pins.

A *late* lease is one whose time is up while its session lives, and whose holder may still be
writing (a stopped process that will go on, say). What it holds must not be given to others, so
it is kept aside until its session ends or its holder speaks up.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Generic, NewType, TypeVar

from kvstore.clock import Clock
from kvstore.errors import TooMany, UnknownLease

SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)

SESSIONS_MAX = 4096
LEASES_PER_SESSION_MAX = 4096
EXPIRIES_MIN = 1024
"""From so many on, the expiries of leases that have ended are forgotten before their time."""

P = TypeVar("P")


@dataclass(slots=True, eq=False)
class Lease(Generic[P]):
    """One lease. `pinned` is its holder's business."""

    id: LeaseId
    session: SessionId
    pinned: P
    expires_s: float
    late: bool = False


@dataclass(slots=True)
class _Session(Generic[P]):
    client: str
    leases: dict[LeaseId, Lease[P]] = field(default_factory=dict)


class Leases(Generic[P]):
    """All sessions and their leases."""

    def __init__(self, clock: Clock, chance: random.Random):
        self._clock = clock
        self._chance = chance
        self._sessions: dict[SessionId, _Session[P]] = {}
        # Of leases that have ended too, so without what they pinned.
        self._expiries: list[tuple[float, LeaseId, SessionId]] = []
        self._expiries_max = EXPIRIES_MIN

    def __len__(self) -> int:
        return sum(len(session.leases) for session in self._sessions.values())

    @property
    def sessions(self) -> int:
        """How many clients are attached."""
        return len(self._sessions)

    @property
    def late(self) -> list[Lease[P]]:
        """Leases kept aside because their holder may still write."""
        return [
            lease
            for session in self._sessions.values()
            for lease in session.leases.values()
            if lease.late
        ]

    def open_session(self, client: str) -> SessionId:
        """Attaches a client.

        Raises:
            TooMany: `SESSIONS_MAX` clients are attached already.
        """
        if len(self._sessions) >= SESSIONS_MAX:
            raise TooMany(f"{SESSIONS_MAX} clients are attached; no more are taken")
        # Ids are not guessable, so that a client that makes one up does not hit another's.
        session = SessionId(self._chance.getrandbits(63) | 1)
        self._sessions[session] = _Session(client)
        return session

    def close_session(self, session: SessionId) -> list[Lease[P]]:
        """Detaches a client; returns the leases that end with it."""
        closed = self._sessions.pop(session, None)
        return list(closed.leases.values()) if closed else []

    def check_session(self, session: SessionId) -> None:
        """Raises UnknownLease when no such client is attached."""
        if session not in self._sessions:
            raise UnknownLease(
                f"session {session:#x} is not attached: its stream ended, or the server restarted"
            )

    def grant(self, session: SessionId, pinned: P, duration_s: float) -> LeaseId:
        """Starts a lease.

        Raises:
            UnknownLease: the session is not attached.
            TooMany: the session holds `LEASES_PER_SESSION_MAX` leases.
        """
        self.check_session(session)
        held = self._sessions[session].leases
        if len(held) >= LEASES_PER_SESSION_MAX:
            raise TooMany(f"the session holds {LEASES_PER_SESSION_MAX} leases; release some first")
        expires_s = self._clock.monotonic_s() + duration_s
        lease = Lease(LeaseId(self._chance.getrandbits(63) | 1), session, pinned, expires_s)
        held[lease.id] = lease
        heapq.heappush(self._expiries, (expires_s, lease.id, session))
        if len(self._expiries) > self._expiries_max:
            self._forget_ended()
        return lease.id

    def get(self, session: SessionId, lease_id: LeaseId) -> Lease[P]:
        """The live or late lease.

        Raises:
            UnknownLease: it has ended, never existed, or is another session's.
        """
        self.check_session(session)
        lease = self._sessions[session].leases.get(lease_id)
        if lease is None:
            raise UnknownLease(f"lease {lease_id:#x} has expired, was released, or never existed")
        return lease

    def end(self, session: SessionId, lease_id: LeaseId) -> Lease[P] | None:
        """Ends a lease and returns it; None when it has ended already."""
        held = self._sessions.get(session)
        return held.leases.pop(lease_id, None) if held else None

    def keep_aside(self, lease: Lease[P]) -> None:
        """Turns an expired lease into a late one, which its session still holds."""
        lease.late = True
        self._sessions[lease.session].leases[lease.id] = lease

    def expire(self) -> list[Lease[P]]:
        """Ends the leases whose time is up, and returns them."""
        now_s = self._clock.monotonic_s()
        expired = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, lease_id, session = heapq.heappop(self._expiries)
            lease = self.end(session, lease_id)
            if lease is not None:
                expired.append(lease)
        return expired

    def _forget_ended(self) -> None:
        self._expiries = [
            (lease.expires_s, lease.id, lease.session)
            for session in self._sessions.values()
            for lease in session.leases.values()
            if not lease.late
        ]
        heapq.heapify(self._expiries)
        self._expiries_max = EXPIRIES_MIN + 2 * len(self._expiries)
