"""Reuse and pressure, learnt from what is asked for."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvstore.demand import DENSE_BLOCKS, PRIOR, Demand
from kvstore.reuse import ReuseSketch
from kvstore.testing import FakeClock
from kvstore.types import BlockKey, Fingerprint

ONE, TWO = Fingerprint(b"1" * 32), Fingerprint(b"2" * 32)


def chain(name: object, blocks: int) -> list[BlockKey]:
    return [
        BlockKey(hashlib.sha256(f"{name} {block}".encode()).digest()) for block in range(blocks)
    ]


@pytest.fixture
def demand() -> Demand:
    return Demand(ReuseSketch(FakeClock()))


def test_before_anything_is_known_storing_is_assumed_to_pay(demand: Demand) -> None:
    assert demand.note(ONE, chain("first", 4)) == pytest.approx([PRIOR] * 4, abs=0.05)


def test_what_is_never_asked_for_twice_is_not_expected_to_be(demand: Demand) -> None:
    for request in range(300):
        chances = demand.note(ONE, chain(request, 20))
    assert max(chances) < 0.05


def test_what_comes_a_second_time_is_expected_a_third_time(demand: Demand) -> None:
    """Of 300 documents, one is asked for again and again; the others never."""
    for request in range(300):
        fresh = demand.note(ONE, chain(request, 20))
        asked = demand.note(ONE, chain("again", 20))
    assert max(fresh) < 0.1
    assert min(asked) > 0.8


def test_the_share_that_comes_back_is_found(demand: Demand) -> None:
    chance = random.Random(1)
    for request in range(2000):
        chances = demand.note(ONE, chain(request, 10))
        if chance.random() < 0.3:
            demand.note(ONE, chain(request, 10))
    assert sum(chances) / 10 == pytest.approx(0.3, abs=0.05)


def test_depth_tells_apart_a_system_prompt_and_what_follows_it(demand: Demand) -> None:
    system = chain("system", 8)
    for request in range(200):
        chances = demand.note(ONE, [*system, *chain(request, 56)])
    assert min(chances[:8]) > 0.7
    assert max(chances[16:]) < 0.1


def test_each_namespace_has_a_history_of_its_own(demand: Demand) -> None:
    for request in range(200):
        demand.note(ONE, chain(request, 20))
    assert min(demand.note(TWO, chain("other", 20))) > 0.4


def test_a_long_prefix_is_answered_for_each_block(demand: Demand) -> None:
    keys = chain("long", 1000)
    for _ in range(50):
        chances = demand.note(ONE, keys)
    assert len(chances) == 1000
    assert min(chances) > 0.8


@pytest.mark.parametrize("first", [0, 1, DENSE_BLOCKS - 1, DENSE_BLOCKS, DENSE_BLOCKS + 5, 400])
def test_where_a_lookup_begins_does_not_matter(demand: Demand, first: int) -> None:
    """Some of an engine's own blocks it does not ask for."""
    keys = chain("pooled", 500)
    for turn in range(20):
        start = first if turn % 2 else 0
        chances = demand.note(ONE, keys[start:], start)
    assert len(chances) == 500 - first
    assert min(chances[:-8]) > 0.5


def test_a_run_between_two_counted_blocks_says_the_prior(demand: Demand) -> None:
    assert demand.note(ONE, chain("gap", 3), DENSE_BLOCKS) == [PRIOR] * 3


def test_pressure_is_the_share_of_evicted_blocks_that_are_missed(demand: Demand) -> None:
    assert demand.pressure == 0.0
    for _ in range(1000):
        demand.note_evicted()
    demand.note_regretted(400)
    assert demand.pressure == pytest.approx(0.4, abs=0.05)
    demand.note_regretted(4000)
    assert demand.pressure == 1.0


def test_pressure_fades_when_nothing_is_evicted_any_more(demand: Demand) -> None:
    """Else an arena full of what was worth much would stay as it is for ever."""
    for _ in range(1000):
        demand.note_evicted()
    demand.note_regretted(1000)
    assert demand.pressure > 0.9
    for request in range(4000):
        demand.note(ONE, chain(request, 32))
    assert demand.pressure < 0.5
