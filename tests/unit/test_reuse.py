"""The sketch of how often blocks were asked for: exact when few, bounded when many."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvstore.reuse import ROWS, ReuseSketch
from kvstore.testing import FakeClock
from kvstore.types import BlockKey


def keys(count: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey(sha256(str(first + index).encode()).digest()) for index in range(count)]


def test_counts_each_use_of_each_key() -> None:
    sketch = ReuseSketch(FakeClock())
    rare, often, never = keys(3)
    sketch.note([rare, often])
    sketch.note([often])
    sketch.note([often])
    assert sketch.count(never) == 0
    assert sketch.count(rare) == pytest.approx(1, rel=1e-3)
    assert sketch.counts([often, never, rare]) == pytest.approx([3, 0, 1], rel=1e-3)


def test_nothing_asked_is_nothing_answered() -> None:
    sketch = ReuseSketch(FakeClock())
    sketch.note([])
    assert sketch.counts([]) == []


def test_fades_by_half_in_its_half_life() -> None:
    clock = FakeClock()
    sketch = ReuseSketch(clock, half_life_s=60)
    (key,) = keys(1)
    sketch.note([key])
    clock.advance(60)
    assert sketch.count(key) == pytest.approx(0.5, rel=1e-3)
    sketch.note([key])
    clock.advance(120)
    assert sketch.count(key) == pytest.approx(1.5 / 4, rel=1e-3)


@pytest.mark.parametrize("pause_s", [20.0, 63.9, 64.1, 1000.0, 1e9])
def test_a_long_time_neither_overflows_nor_comes_back(pause_s: float) -> None:
    clock = FakeClock()
    sketch = ReuseSketch(clock, half_life_s=1)
    old, new = keys(2)
    for _ in range(20):
        sketch.note([old])
        clock.advance(pause_s)
        sketch.note([new])
        assert sketch.counts([new, old]) == pytest.approx([1, 0], abs=1e-3)


def test_never_says_less_than_the_truth_and_seldom_more() -> None:
    width = 1 << 10
    sketch = ReuseSketch(FakeClock(), half_life_s=1e12, width=width)
    twice, once, never = keys(100), keys(100, 1000), keys(1000, 10_000)
    for batch in (twice, once, twice):
        sketch.note(batch)
    faded = 2.0 ** -(300 / (width / 2))
    assert min(sketch.counts(twice)) >= 2 * faded * 0.999
    assert min(sketch.counts(once)) >= faded * 0.999
    assert sum(count > 0 for count in sketch.counts(never)) < 0.05 * len(never)


def test_a_flood_of_new_keys_does_not_fill_it() -> None:
    sketch = ReuseSketch(FakeClock(), half_life_s=1e12, width=1 << 10)
    for batch in range(200):
        sketch.note(keys(100, batch * 100))
    never = sketch.counts(keys(1000, 1_000_000))
    assert sum(count > 0.5 for count in never) < 0.2 * len(never)


def test_its_memory_does_not_grow() -> None:
    sketch = ReuseSketch(FakeClock(), width=1 << 10)
    for batch in range(50):
        sketch.note(keys(100, batch * 100))
    assert sketch._cells.nbytes == ROWS * (1 << 10) * 4
