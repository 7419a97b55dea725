"""How likely blocks come back, learnt from what is asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest

from kvstore.demand import DENSE_BLOCKS, PRIOR, Demand
from kvstore.testing import FakeClock
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

ONE, TWO = Fingerprint(b"1" * 32), Fingerprint(b"2" * 32)
INFO = NamespaceInfo(ONE, block_bytes=1, block_tokens=16)


def chain(name: object, blocks: int) -> list[BlockKey]:
    return [
        BlockKey(hashlib.sha256(f"{name} {block}".encode()).digest()) for block in range(blocks)
    ]


@pytest.fixture
def demand() -> Demand:
    return Demand(FakeClock(), capacity_bytes=1 << 20)


def note(
    demand: Demand, fingerprint: Fingerprint, keys: list[BlockKey], first: int = 0
) -> list[float]:
    return demand.note(dataclasses.replace(INFO, fingerprint=fingerprint), keys, first)[0]


def test_before_anything_is_known_storing_is_assumed_to_pay(demand: Demand) -> None:
    assert note(demand, ONE, chain("first", 4)) == pytest.approx([PRIOR] * 4, abs=0.05)


def test_what_is_never_asked_for_twice_is_not_expected_to_be(demand: Demand) -> None:
    for request in range(300):
        chances = note(demand, ONE, chain(request, 20))
    assert max(chances) < 0.05


def test_what_comes_a_second_time_is_expected_a_third_time(demand: Demand) -> None:
    """Of 300 documents, one is asked for again and again; the others never."""
    for request in range(300):
        fresh = note(demand, ONE, chain(request, 20))
        asked = note(demand, ONE, chain("again", 20))
    assert max(fresh) < 0.1
    assert min(asked) > 0.8


def test_the_share_that_comes_back_is_found(demand: Demand) -> None:
    chance = random.Random(1)
    for request in range(2000):
        chances = note(demand, ONE, chain(request, 10))
        if chance.random() < 0.3:
            note(demand, ONE, chain(request, 10))
    assert sum(chances) / 10 == pytest.approx(0.3, abs=0.05)


def test_depth_tells_apart_a_system_prompt_and_what_follows_it(demand: Demand) -> None:
    system = chain("system", 8)
    for request in range(200):
        chances = note(demand, ONE, [*system, *chain(request, 56)])
    assert min(chances[:8]) > 0.7
    assert max(chances[16:]) < 0.1


def test_each_namespace_has_a_history_of_its_own(demand: Demand) -> None:
    for request in range(200):
        note(demand, ONE, chain(request, 20))
    assert min(note(demand, TWO, chain("other", 20))) > 0.4


def test_a_long_prefix_is_answered_for_each_block(demand: Demand) -> None:
    keys = chain("long", 1000)
    for _ in range(50):
        chances = note(demand, ONE, keys)
    assert len(chances) == 1000
    assert min(chances) > 0.8


@pytest.mark.parametrize("first", [0, 1, DENSE_BLOCKS - 1, DENSE_BLOCKS, DENSE_BLOCKS + 5, 400])
def test_where_a_lookup_begins_does_not_matter(demand: Demand, first: int) -> None:
    """Some of an engine's own blocks it does not ask for."""
    keys = chain("pooled", 500)
    for turn in range(20):
        start = first if turn % 2 else 0
        chances = note(demand, ONE, keys[start:], start)
    assert len(chances) == 500 - first
    assert min(chances[:-8]) > 0.5


def test_a_run_between_two_counted_blocks_says_the_prior(demand: Demand) -> None:
    assert note(demand, ONE, chain("gap", 3), DENSE_BLOCKS) == [PRIOR] * 3


def test_in_a_full_arena_a_scan_is_worth_nothing_until_it_comes_a_second_time() -> None:
    demand = Demand(FakeClock(), capacity_bytes=1000)
    for request in range(300):
        _, crowded = demand.note(INFO, chain("hot", 32), full=True)
        scan, crowded = demand.note(INFO, chain(request, 32), full=True)
    assert crowded
    assert scan == [0.0] * 32
    again, _ = demand.note(INFO, chain(request, 32), full=True)
    assert min(again) > 0
    assert min(demand.note(INFO, chain("hot", 32), full=True)[0]) > 0.8
    # While there is room, a scan displaces nothing.
    room, crowded = demand.note(INFO, chain("new", 32))
    assert (min(room) > 0, crowded) == (True, False)


def test_a_full_arena_whose_new_blocks_come_back_takes_them() -> None:
    """However hot it is: else a small one would stay as it is for ever."""
    demand = Demand(FakeClock(), capacity_bytes=500)
    for request in range(400):
        for _ in range(2):
            chances, crowded = demand.note(INFO, chain(request, 32), full=True)
    assert not crowded
    assert min(chances) > 0
