"""Why a block is absent, as far back as memory goes."""

from __future__ import annotations

from kvstore.history import ENTRIES_MAX, History
from kvstore.testing import FakeClock
from kvstore.types import BlockKey, MissReason


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big")[::-1])


def test_a_block_that_was_never_noted_was_never_seen() -> None:
    assert History(FakeClock()).reason(key_of(1)) is MissReason.NEVER_SEEN


def test_the_latest_reason_counts() -> None:
    history = History(FakeClock())
    history.note([key_of(1), key_of(2)], MissReason.REFUSED)
    history.note([key_of(1)], MissReason.EVICTED)
    assert history.reason(key_of(1)) is MissReason.EVICTED
    assert history.reason(key_of(2)) is MissReason.REFUSED


def test_a_block_that_is_here_again_has_no_reason() -> None:
    history = History(FakeClock())
    history.note([key_of(1)], MissReason.CLEARED)
    history.forget([key_of(1), key_of(2)])
    assert history.reason(key_of(1)) is MissReason.NEVER_SEEN


def test_what_another_tier_kept_for_a_time_has_expired_after_it() -> None:
    clock = FakeClock()
    history = History(clock)
    history.note([key_of(1)], MissReason.EVICTED, kept_s=60.0)
    clock.advance(59.9)
    assert history.reason(key_of(1)) is MissReason.EVICTED
    clock.advance(0.1)
    assert history.reason(key_of(1)) is MissReason.EXPIRED


def test_a_reason_without_a_time_never_expires() -> None:
    clock = FakeClock()
    history = History(clock)
    history.note([key_of(1)], MissReason.EVICTED)
    clock.advance(1e9)
    assert history.reason(key_of(1)) is MissReason.EVICTED


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    history = History(FakeClock())
    history.note([key_of(0), key_of(1)], MissReason.EVICTED)
    history.note([key_of(0)], MissReason.EVICTED)  # now the younger of the two
    history.note(map(key_of, range(2, ENTRIES_MAX + 1)), MissReason.EVICTED)
    assert history.reason(key_of(1)) is MissReason.NEVER_SEEN
    assert history.reason(key_of(0)) is MissReason.EVICTED
    assert history.reason(key_of(ENTRIES_MAX)) is MissReason.EVICTED
    assert len(history._entries) == ENTRIES_MAX
