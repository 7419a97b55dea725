"""The index against a plain model: the longest run, children counted, orphans adopted."""

from __future__ import annotations

import hashlib

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.index import Block, Namespace
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

INFO = NamespaceInfo(Fingerprint(b"n" * 32), block_bytes=64, block_tokens=16)


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


# A tree of prefixes: each key's parent is always the same, as in a chain of hashes.
PATHS = [
    [key_of(branch[: depth + 1]) for depth in range(len(branch))]
    for branch in [(0, 0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1, 0)]
]
PARENTS: dict[BlockKey, BlockKey | None] = {
    key: path[at - 1] if at else None for path in PATHS for at, key in enumerate(path)
}
KEYS = st.sampled_from(sorted(PARENTS))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Namespace(INFO)
        self.readable: dict[BlockKey, Block] = {}
        self.pending: dict[BlockKey, Block] = {}

    @rule(key=KEYS)
    def begin(self, key: BlockKey) -> None:
        if key not in self.readable and key not in self.pending:
            block = Block(self.index, key, PARENTS[key], offset=0)
            self.index.begin(block)
            self.pending[key] = block

    @rule(key=KEYS)
    def commit(self, key: BlockKey) -> None:
        if key in self.pending:
            block = self.readable[key] = self.pending.pop(key)
            self.index.commit(block)

    @rule(key=KEYS)
    def abort(self, key: BlockKey) -> None:
        if key in self.pending:
            self.index.abort(self.pending.pop(key))

    @rule(key=KEYS)
    def remove(self, key: BlockKey) -> None:
        if key in self.readable:
            self.index.remove(self.readable.pop(key))

    @rule(path=st.sampled_from(PATHS), start=st.integers(0, 3), strangers=st.integers(0, 2))
    def longest_prefix(self, path: list[BlockKey], start: int, strangers: int) -> None:
        keys = [*path[start:], *(key_of(("stranger", number)) for number in range(strangers))]
        expected = []
        for key in keys:
            if key not in self.readable:
                break
            expected.append(self.readable[key])
        assert self.index.longest_prefix(keys) == expected

    @invariant()
    def readable_and_pending_blocks_are_those_of_the_model(self) -> None:
        assert set(self.index) == set(self.readable.values())
        assert len(self.index) == len(self.readable)
        assert set(self.index.pending) == set(self.pending.values())
        for key in PARENTS:
            assert self.index.get(key) is self.readable.get(key)
            assert self.index.is_pending(key) == (key in self.pending)

    @invariant()
    def a_readable_block_is_linked_to_its_readable_parent(self) -> None:
        for key, block in self.readable.items():
            parent_key = PARENTS[key]
            if parent_key in self.readable:
                assert block.parent is self.readable[parent_key]
            elif parent_key not in self.pending:
                assert block.parent is None
        for block in [*self.readable.values(), *self.pending.values()]:
            if block.parent is not None:
                assert block.parent.key == block.parent_key
                assert block.parent in [*self.readable.values(), *self.pending.values()]

    @invariant()
    def children_are_counted(self) -> None:
        here = [*self.readable.values(), *self.pending.values()]
        for block in here:
            assert set(block.children) == {other for other in here if other.parent is block}

    @invariant()
    def ancestors_are_the_linked_blocks_before_first_one_first(self) -> None:
        for path in PATHS:
            block = self.readable.get(path[-1])
            if block is not None:
                before = [other.key for other in block.ancestors()]
                assert before == path[len(path) - 1 - len(before) : -1]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@example([("begin", 0, 1), ("begin", 1, 0), ("commit", 0, 1), ("commit", 1, 0)])
@example([("begin", 0, 0), ("commit", 0, 0)])
@example([(what, key, (key + 1) % 3) for what in ("begin", "commit") for key in range(3)])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "commit", "abort", "remove"]),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        max_size=30,
    )
)
def test_parents_that_go_round_in_a_circle_never_make_a_circle_of_blocks(
    steps: list[tuple[str, int, int]],
) -> None:
    """Keys are hashes of their parents, but a client can send any bytes."""
    index = Namespace(INFO)
    readable: dict[BlockKey, Block] = {}
    pending: dict[BlockKey, Block] = {}
    for action, key_number, parent_number in steps:
        key, parent = key_of(key_number), key_of(parent_number)
        if action == "begin" and key not in readable and key not in pending:
            pending[key] = Block(index, key, parent, offset=0)
            index.begin(pending[key])
        elif action == "commit" and key in pending:
            readable[key] = pending.pop(key)
            index.commit(readable[key])
        elif action == "abort" and key in pending:
            index.abort(pending.pop(key))
        elif action == "remove" and key in readable:
            index.remove(readable.pop(key))
        here = [*readable.values(), *pending.values()]
        for block in here:
            at, steps_up = block, 0
            while at.parent is not None:
                at, steps_up = at.parent, steps_up + 1
                assert steps_up <= 4, "the blocks are linked in a circle"
            assert set(block.children) == {other for other in here if other.parent is block}
