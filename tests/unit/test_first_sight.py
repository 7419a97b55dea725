"""Storing at first sight pays while there is room, and where new blocks come back in time."""

from __future__ import annotations

from hashlib import sha256

from kvstore.first_sight import FirstSight
from kvstore.reuse import ReuseSketch
from kvstore.testing import FakeClock
from kvstore.types import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(sha256(str(number).encode()).digest())


def watching(capacity_blocks: int) -> FirstSight:
    return FirstSight(ReuseSketch(FakeClock()), capacity_blocks)


def test_a_cold_store_takes_all() -> None:
    first_sight = watching(100_000)
    for number in range(50_000):
        assert first_sight.pays
        first_sight.note([key(number)])


def test_a_scan_that_never_comes_back_does_not_pay() -> None:
    first_sight = watching(1000)
    hot = [key(-number) for number in range(1, 500)]
    for number in range(200):
        first_sight.note([key(number * 100 + each) for each in range(100)])
        first_sight.note(hot)
    assert not first_sight.pays


def test_what_comes_back_once_and_soon_pays() -> None:
    first_sight = watching(2000)
    for number in range(200):
        new = [key(number * 100 + each) for each in range(100)]
        first_sight.note(new)
        first_sight.note(new)
    assert first_sight.pays


def test_it_changes_its_mind_with_the_traffic() -> None:
    first_sight = watching(1000)
    number = 0
    for comes_back in (False, True, False):
        for _ in range(4000):
            number += 100
            new = [key(number + each) for each in range(100)]
            first_sight.note(new)
            if comes_back:
                first_sight.note(new)
        assert first_sight.pays == comes_back
