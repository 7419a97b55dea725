"""A tier's speed, from what its work takes."""

from __future__ import annotations

import pytest

from kvstore.pace import Pace


def test_latency_and_bandwidth_are_known_once_both_were_measured() -> None:
    pace = Pace()
    assert pace.measured is None
    pace.note_batch(1000, 0.5)
    assert pace.measured is None
    pace.note_answer(0.01)
    assert pace.measured == (0.01, 2000.0)


def test_a_tier_that_gets_slow_is_noticed_within_some_batches() -> None:
    pace = Pace()
    for speed in [1e9] * 50 + [2e7] * 20:
        pace.note_answer(1e-3 if speed > 1e8 else 5e-2)
        pace.note_batch(1 << 24, (1 << 24) / speed)
    assert pace.measured is not None
    latency_s, bytes_per_s = pace.measured
    assert latency_s == pytest.approx(0.05, rel=0.1)
    assert bytes_per_s == pytest.approx(2e7, rel=0.1)


def test_a_batch_that_failed_says_nothing() -> None:
    pace = Pace()
    pace.note_answer(0.001)
    pace.note_batch(0, 0.0)
    assert pace.measured is None
