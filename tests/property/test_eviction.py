"""Eviction policies: one suite for all under their contract, and each against its own rule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import POLICIES
from kvstore.eviction.base import EvictionPolicy
from kvstore.index import Block, Namespace
from kvstore.testing import FakeClock
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

INFO = NamespaceInfo(Fingerprint(bytes(32)), block_bytes=64, block_tokens=4096)
BRANCH_AT = 2
"""How many blocks all branches have in common."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "use", "drop", "wait", "clear"]),
        st.integers(0, 3),
        st.integers(1, 6),
    ),
    max_size=60,
)


class Paths:
    """Four prefixes with a common head in a real index, and a policy that hears of them."""

    def __init__(self, name: str):
        self.clock = FakeClock()
        self.policy: EvictionPolicy = POLICIES[name](self.clock)
        self.index = Namespace(INFO)

    @staticmethod
    def keys(branch: int, length: int) -> list[BlockKey]:
        names = [(branch if depth >= BRANCH_AT else 0, depth) for depth in range(length)]
        return [BlockKey(hashlib.sha256(bytes(name)).digest()) for name in names]

    def present(self, branch: int, length: int) -> list[Block]:
        return self.index.longest_prefix(self.keys(branch, length))

    def use(self, branch: int, length: int) -> list[Block]:
        path = self.present(branch, length)
        if path:
            self.policy.touch(path)
        return path

    def store(self, branch: int, length: int) -> list[Block]:
        """As a server does: used, then what lacks stored, then touched with it."""
        path = self.use(branch, length)
        keys = self.keys(branch, length)
        for at in range(len(path), length):
            block = Block(self.index, keys[at], keys[at - 1] if at else None, offset=0)
            self.index.begin(block)
            self.index.commit(block)
            path.append(block)
            self.policy.insert(block)
        self.policy.touch(path)
        return path

    def drop(self, block: Block) -> None:
        self.policy.remove(block)
        self.index.remove(block)

    def evict(self) -> Block | None:
        """What a tier does: the first candidate that may go."""
        victim = next((block for block in self.policy.candidates() if block.evictable), None)
        if victim is not None:
            self.drop(victim)
        return victim

    def clear(self, count: int) -> None:
        """Drops leaves in an order that isn't the policy's."""
        for block in [block for block in self.index if block.evictable][:count]:
            self.drop(block)

    def run(self, steps: list[tuple[str, int, int]]) -> Iterator[tuple[str, list[Block]]]:
        """Does each step; yields it with the path that it touched."""
        for action, branch, count in steps:
            path: list[Block] = []
            if action == "store":
                path = self.store(branch, count)
            elif action == "use":
                path = self.use(branch, count)
            elif action == "wait":
                self.clock.advance(10.0**branch)
            elif action == "drop":
                for _ in range(count):
                    self.evict()
            else:
                self.clear(count)
            yield action, path


EACH_POLICY = pytest.mark.parametrize("name", POLICIES)


@EACH_POLICY
@given(steps=STEPS)
def test_candidates_are_exactly_the_blocks_known_each_once(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    paths = Paths(name)
    for _ in paths.run(steps):
        candidates = list(paths.policy.candidates())
        assert len(candidates) == len(set(candidates)) == len(paths.policy)
        assert set(candidates) == set(paths.index)


@EACH_POLICY
@given(steps=STEPS)
def test_looking_changes_nothing(name: str, steps: list[tuple[str, int, int]]) -> None:
    paths = Paths(name)
    for _ in paths.run(steps):
        order = list(paths.policy.candidates())
        next(paths.policy.candidates(), None)
        assert list(paths.policy.candidates()) == order


@EACH_POLICY
@given(steps=STEPS)
def test_the_same_calls_at_the_same_times_give_the_same_order(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    first, second = Paths(name), Paths(name)
    for _ in zip(first.run(steps), second.run(steps), strict=True):
        orders = [[block.key for block in paths.policy.candidates()] for paths in (first, second)]
        assert orders[0] == orders[1]


@EACH_POLICY
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_block_that_a_client_names_twice_stays_one_block(name: str, order: list[int]) -> None:
    """Keys that were made up: no prefix has a block twice, or a child before its parent."""
    paths = Paths(name)
    path = paths.store(0, 6)
    paths.policy.touch([path[at] for at in order])
    known = list(islice(paths.policy.candidates(), 100))
    assert sorted(map(id, known)) == sorted(map(id, path))


@EACH_POLICY
@given(steps=STEPS)
def test_a_block_may_always_go_while_there_are_any(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    paths = Paths(name)
    for _ in paths.run(steps):
        pass
    while len(paths.index):
        assert paths.evict() is not None
    assert len(paths.policy) == 0
    assert list(paths.policy.candidates()) == []


@EACH_POLICY
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_what_follows_a_block_comes_before_it(name: str, lengths: list[int]) -> None:
    paths = Paths(name)
    for branch, length in enumerate(lengths):
        paths.store(branch, length)
        order = {block: at for at, block in enumerate(paths.policy.candidates())}
        for block in order:
            assert block.parent is None or order[block] < order[block.parent]


@EACH_POLICY
def test_memory_of_blocks_that_are_gone_is_bounded(name: str) -> None:
    """Ten thousand blocks through a hundred slots leave about a hundred blocks' worth."""
    paths = Paths(name)
    for number in range(10_000):
        block = Block(paths.index, BlockKey(number.to_bytes(32, "big")), None, 0)
        paths.index.begin(block)
        paths.index.commit(block)
        paths.policy.insert(block)
        paths.policy.touch([block])
        if len(paths.index) > 100:
            paths.evict()
        paths.clock.advance(0.5)
    assert _entries(vars(paths.policy)) < 3_000


def _entries(value: object, seen: set[int] | None = None) -> int:
    """How many entries all containers within hold together; one held twice counts once."""
    seen = set() if seen is None else seen
    if not isinstance(value, dict | list | tuple | set) or id(value) in seen:
        return 0
    seen.add(id(value))
    inner = value.values() if isinstance(value, dict) else value
    return len(value) + sum(_entries(item, seen) for item in inner)


# -- each against its own rule


@given(steps=STEPS)
def test_lru_is_ordered_by_last_use_tails_first(steps: list[tuple[str, int, int]]) -> None:
    paths = Paths("lru")
    last_use: dict[Block, tuple[int, int]] = {}
    for now, (_, path) in enumerate(paths.run(steps)):
        for depth, block in enumerate(path):
            last_use[block] = (now, -depth)
        assert list(paths.policy.candidates()) == sorted(paths.index, key=last_use.__getitem__)


@given(steps=STEPS)
def test_fifo_evicts_in_order_of_storing_as_far_as_leaves_allow(
    steps: list[tuple[str, int, int]],
) -> None:
    paths = Paths("fifo")
    stored_at: dict[Block, int] = {}
    # What is cleared out of order leaves blocks that are as young as what followed them.
    steps = [step for step in steps if step[0] != "clear"]
    for now, (_, path) in enumerate(paths.run(steps)):
        for block in path:
            stored_at.setdefault(block, now)
        leaves = [block for block in paths.policy.candidates() if block.evictable]
        if leaves:
            assert stored_at[leaves[0]] == min(stored_at[block] for block in leaves)


@given(steps=STEPS)
def test_lfu_is_ordered_by_uses(steps: list[tuple[str, int, int]]) -> None:
    paths = Paths("lfu")
    uses: dict[Block, int] = {}
    known: list[Block] = []
    for action, path in paths.run(steps):
        for block in path:
            # Storing touches what was there twice: when it is looked up, and with what is new.
            uses[block] = uses.get(block, 0) + (2 if action == "store" and block in known else 1)
        known = list(paths.index)
        counts = [uses[block] for block in paths.policy.candidates()]
        assert counts == sorted(counts)


@pytest.mark.parametrize("name", ["slru", "s3fifo"])
def test_a_scan_does_not_displace_a_block_that_was_used(name: str) -> None:
    paths = Paths(name)
    used = paths.store(0, 6)
    for branch in range(1, 4):
        paths.store(branch, 6)
    paths.use(0, 6)
    for number in range(100):
        if len(paths.index) >= 20:
            paths.evict()
        block = Block(paths.index, BlockKey(number.to_bytes(32, "big")), None, 0)
        paths.index.begin(block)
        paths.index.commit(block)
        paths.policy.insert(block)
        paths.policy.touch([block])
    assert paths.present(0, 6) == used


def test_s3fifo_keeps_a_block_that_comes_again_soon_after_it_went() -> None:
    paths = Paths("s3fifo")
    for branch in range(4):
        paths.store(branch, 6)
    gone = paths.evict()
    assert gone is not None
    branch = next(b for b in range(4) if gone.key in paths.keys(b, 6))
    again = paths.store(branch, 6)[-1]
    order = list(paths.policy.candidates())
    assert order.index(again) > len(order) // 2


def test_the_cost_aware_policy_keeps_what_costs_more_to_compute() -> None:
    paths = Paths("cost")
    long, short = paths.store(0, 6), paths.store(1, 3)
    assert next(paths.policy.candidates()) is short[-1], "though it was used later"
    while paths.index.get(short[-1].key):
        paths.evict()
    paths.evict()
    assert not paths.index.get(long[-1].key), "cost buys time, and time runs out"


def test_continuation_keeps_what_grew_before_what_is_used_once_however_recent() -> None:
    paths = Paths("continuation")
    for number in range(40):
        if number == 20:
            for length in range(3, 7):
                grown = paths.store(0, length)
        block = Block(paths.index, BlockKey(number.to_bytes(32, "big")), None, 0)
        paths.index.begin(block)
        paths.index.commit(block)
        paths.policy.insert(block)
        paths.policy.touch([block])
    for _ in range(35):
        paths.evict()
    assert paths.present(0, 6) == grown
