"""The breaker, on a clock set by hand."""

from __future__ import annotations

import pytest

from kvstore.breaker import FAILURES_MAX, PAUSE_S_MAX, PAUSE_S_MIN, PROBE_S_MAX, Breaker
from kvstore.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def opened(clock: FakeClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(FAILURES_MAX):
        assert breaker.allow()
        breaker.failed()
    assert breaker.open
    return breaker


def test_failures_that_are_not_in_a_row_do_not_open_it(clock: FakeClock) -> None:
    breaker = Breaker(clock)
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            breaker.failed()
        breaker.succeeded()
    assert not breaker.open
    assert breaker.opened == 0


def test_open_it_refuses_until_the_pause_is_over_and_then_passes_one(clock: FakeClock) -> None:
    breaker = opened(clock)
    assert not breaker.allow()
    clock.advance(PAUSE_S_MIN - 0.001)
    assert not breaker.allow()
    clock.advance(0.001)
    assert breaker.allow()
    assert not breaker.allow()


def test_a_probe_that_succeeds_closes_it(clock: FakeClock) -> None:
    breaker = opened(clock)
    clock.advance(PAUSE_S_MIN)
    assert breaker.allow()
    breaker.succeeded()
    assert not breaker.open
    assert all(breaker.allow() for _ in range(5))
    assert breaker.opened == 1


def test_each_probe_that_fails_doubles_the_pause_up_to_a_bound(clock: FakeClock) -> None:
    breaker = opened(clock)
    pause_s = PAUSE_S_MIN
    for _ in range(10):
        clock.advance(pause_s - 0.001)
        assert not breaker.allow()
        clock.advance(0.002)
        assert breaker.allow()
        breaker.failed()
        pause_s = min(pause_s * 2, PAUSE_S_MAX)
    assert pause_s == PAUSE_S_MAX
    assert breaker.opened == 1
    clock.advance(PAUSE_S_MAX)
    assert breaker.allow()
    breaker.succeeded()
    for _ in range(FAILURES_MAX):
        breaker.failed()
    clock.advance(PAUSE_S_MIN)
    assert breaker.allow()  # the pause is short again


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_pause(
    clock: FakeClock,
) -> None:
    breaker = opened(clock)
    for _ in range(8):
        breaker.failed()
    clock.advance(PAUSE_S_MIN)
    assert breaker.allow()


def test_a_probe_that_never_answers_does_not_keep_it_open_for_ever(clock: FakeClock) -> None:
    breaker = opened(clock)
    clock.advance(PAUSE_S_MIN)
    assert breaker.allow()
    clock.advance(PROBE_S_MAX - 0.001)
    assert not breaker.allow()
    clock.advance(0.002)
    assert breaker.allow()
    breaker.succeeded()
    assert not breaker.open
