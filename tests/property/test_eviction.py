"""Eviction policies under their contract, and LRU against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.lru import LRU
from kvstore.index import Block, Namespace
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

POLICIES = [LRU]
INDEX = Namespace(NamespaceInfo(Fingerprint(bytes(32)), block_bytes=64, block_tokens=16))
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "use", "drop"]), st.integers(0, 3), st.integers(1, 4)),
    max_size=60,
)


class Paths:
    """Four prefixes with a common head, whose blocks come at the tail and go at the tail."""

    def __init__(self, policy: EvictionPolicy):
        self.policy = policy
        self.blocks: dict[tuple[int, int], Block] = {}

    def path(self, branch: int, length: int) -> list[Block]:
        """The present run of this branch; its first two blocks are every branch's."""
        run: list[Block] = []
        for depth in range(length):
            block = self.blocks.get((branch if depth > 1 else 0, depth))
            if block is None:
                break
            run.append(block)
        return run

    def store(self, branch: int, length: int) -> None:
        for depth in range(length):
            at = (branch if depth > 1 else 0, depth)
            if at not in self.blocks:
                self.blocks[at] = Block(INDEX, BlockKey(bytes([*at]) * 16), None, 0)
                self.policy.insert(self.blocks[at])
        self.policy.touch(self.path(branch, length))

    def drop(self, branch: int) -> None:
        own = [depth for at, depth in self.blocks if at == branch and depth > 1]
        if own:
            self.policy.remove(self.blocks.pop((branch, max(own))))


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=STEPS)
def test_candidates_are_exactly_the_blocks_known_each_once(
    policy: type[EvictionPolicy], steps: list[tuple[str, int, int]]
) -> None:
    paths = Paths(policy())
    for action, branch, length in steps:
        if action == "store":
            paths.store(branch, length)
        elif action == "use":
            paths.policy.touch(paths.path(branch, length))
        else:
            paths.drop(branch)
        candidates = list(paths.policy.candidates())
        assert len(candidates) == len(set(candidates)) == len(paths.policy)
        assert set(candidates) == set(paths.blocks.values())
        assert list(paths.policy.candidates()) == candidates, "looking changes nothing"


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=STEPS)
def test_the_same_calls_give_the_same_order(
    policy: type[EvictionPolicy], steps: list[tuple[str, int, int]]
) -> None:
    orders = []
    for _ in range(2):
        paths = Paths(policy())
        for action, branch, length in steps:
            if action == "store":
                paths.store(branch, length)
            elif action == "use":
                paths.policy.touch(paths.path(branch, length))
            else:
                paths.drop(branch)
        orders.append([block.key for block in paths.policy.candidates()])
    assert orders[0] == orders[1]


@given(steps=STEPS)
def test_lru_is_ordered_by_last_use_tails_first(steps: list[tuple[str, int, int]]) -> None:
    paths = Paths(LRU())
    last_use: dict[Block, tuple[int, int]] = {}
    for now, (action, branch, length) in enumerate(steps):
        if action == "store":
            paths.store(branch, length)
        elif action == "use":
            paths.policy.touch(paths.path(branch, length))
        else:
            paths.drop(branch)
        if action != "drop":
            for depth, block in enumerate(paths.path(branch, length)):
                last_use[block] = (now, -depth)
        expected = sorted(paths.blocks.values(), key=last_use.__getitem__)
        assert list(paths.policy.candidates()) == expected
        for (at, depth), block in paths.blocks.items():
            if depth:
                before = paths.blocks[at if depth > 2 else 0, depth - 1]
                assert last_use[before] > last_use[block]
