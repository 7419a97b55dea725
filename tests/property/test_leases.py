"""Leases against a plain model: they end by release, by time, or with their session."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import TooMany, UnknownLease
from kvstore.leases import (
    LEASES_PER_SESSION_MAX,
    SESSIONS_MAX,
    LeaseId,
    Leases,
    SessionId,
)
from kvstore.testing import FakeClock


class LeasesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.leases: Leases[str] = Leases(self.clock, random.Random(5))
        self.sessions: dict[SessionId, dict[LeaseId, tuple[str, float]]] = {}
        self.late: dict[LeaseId, SessionId] = {}
        self.granted = 0
        self.open_session()

    @rule()
    def open_session(self) -> None:
        session = self.leases.open_session("client")
        assert session not in self.sessions
        self.sessions[session] = {}

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        held = self.sessions.pop(session)
        ended = self.leases.close_session(session)
        assert {lease.id: lease.pinned for lease in ended} == {
            lease_id: pinned for lease_id, (pinned, _) in held.items()
        }
        self.late = {lease: at for lease, at in self.late.items() if at != session}
        with pytest.raises(UnknownLease):
            self.leases.check_session(session)
        assert self.leases.close_session(session) == []

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), duration_s=st.sampled_from([0.5, 1.0, 1.0, 3.0, 10.0]))
    def grant(self, data: st.DataObject, duration_s: float) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.granted += 1
        pinned = f"pinned {self.granted}"
        lease = self.leases.grant(session, pinned, duration_s)
        self.sessions[session][lease] = (pinned, self.clock.monotonic_s() + duration_s)

    @precondition(lambda self: any(self.sessions.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(s for s, held in self.sessions.items() if held)))
        lease = data.draw(st.sampled_from(sorted(self.sessions[session])))
        pinned, _ = self.sessions[session].pop(lease)
        self.late.pop(lease, None)
        ended = self.leases.end(session, lease)
        assert ended is not None
        assert ended.pinned == pinned
        assert self.leases.end(session, lease) is None
        with pytest.raises(UnknownLease):
            self.leases.get(session, lease)

    @precondition(lambda self: len(self.sessions) > 1 and any(self.sessions.values()))
    @rule(data=st.data())
    def a_session_cannot_touch_anothers_lease(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(s for s, held in self.sessions.items() if held)))
        other = data.draw(st.sampled_from(sorted(set(self.sessions) - {owner})))
        lease = next(iter(self.sessions[owner]))
        assert self.leases.end(other, lease) is None
        with pytest.raises(UnknownLease):
            self.leases.get(other, lease)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0]), keep=st.booleans())
    def time_passes(self, seconds: float, keep: bool) -> None:
        self.clock.advance(seconds)
        now_s = self.clock.monotonic_s()
        expected = {
            lease: pinned
            for held in self.sessions.values()
            for lease, (pinned, expires_s) in held.items()
            if expires_s <= now_s and lease not in self.late
        }
        expired = self.leases.expire()
        assert {lease.id: lease.pinned for lease in expired} == expected
        for lease in expired:
            if keep:
                self.leases.keep_aside(lease)
                self.late[lease.id] = lease.session
            else:
                del self.sessions[lease.session][lease.id]
        assert self.leases.expire() == []

    @invariant()
    def counts_and_lookups_agree(self) -> None:
        assert self.leases.sessions == len(self.sessions)
        assert len(self.leases) == sum(map(len, self.sessions.values()))
        assert {lease.id for lease in self.leases.late} == set(self.late)
        for session, held in self.sessions.items():
            self.leases.check_session(session)
            for lease_id, (pinned, _) in held.items():
                lease = self.leases.get(session, lease_id)
                assert (lease.pinned, lease.late) == (pinned, lease_id in self.late)


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class Pinned:
    """Stands for the blocks of a lease."""


def test_a_lease_that_was_released_lets_go_of_what_it_pinned_at_once() -> None:
    leases: Leases[Pinned] = Leases(FakeClock(), random.Random(5))
    session = leases.open_session("client")
    pinned = Pinned()
    watched = weakref.ref(pinned)
    lease = leases.grant(session, pinned, 600.0)
    leases.end(session, lease)
    del pinned
    gc.collect()
    assert watched() is None


def test_many_short_loads_under_long_leases_leave_nothing_behind() -> None:
    leases: Leases[str] = Leases(FakeClock(), random.Random(5))
    session = leases.open_session("client")
    for _ in range(20_000):
        leases.end(session, leases.grant(session, "", 600.0))
    assert len(leases._expiries) < 5000


def test_sessions_and_the_leases_of_one_session_are_bounded() -> None:
    leases: Leases[str] = Leases(FakeClock(), random.Random(5))
    session = leases.open_session("client")
    for _ in range(LEASES_PER_SESSION_MAX):
        leases.grant(session, "", 1.0)
    with pytest.raises(TooMany, match="release"):
        leases.grant(session, "", 1.0)
    assert len(leases) == LEASES_PER_SESSION_MAX
    for _ in range(SESSIONS_MAX - 1):
        leases.open_session("client")
    with pytest.raises(TooMany):
        leases.open_session("client")
    leases.close_session(session)
    leases.open_session("client")
