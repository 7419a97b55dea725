"""The fast block keys against a slow and obvious implementation."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.hashing import TOKEN_MAX, block_keys
from kvstore.types import BlockKey, Fingerprint

TOKENS = st.lists(st.integers(0, TOKEN_MAX), max_size=60)
BLOCK_TOKENS = st.integers(1, 9)
PARENTS = st.binary(min_size=32, max_size=32).map(Fingerprint)
EXTRA_IDS = st.lists(st.binary(max_size=5), max_size=3)


def slow_keys(
    parent: bytes, tokens: Sequence[int], block_tokens: int, extras: Mapping[int, Sequence[bytes]]
) -> list[bytes]:
    keys = []
    for number in range(len(tokens) // block_tokens):
        digest = hashlib.sha256()
        digest.update(parent)
        for token in tokens[number * block_tokens : (number + 1) * block_tokens]:
            digest.update(struct.pack("<i", token))
        ids = extras.get(number, [])
        if ids:
            digest.update(struct.pack("<I", len(ids)))
            for one in ids:
                digest.update(struct.pack("<I", len(one)))
                digest.update(one)
        parent = digest.digest()
        keys.append(parent)
    return keys


@given(PARENTS, TOKENS, BLOCK_TOKENS, st.data())
def test_fast_keys_equal_slow_keys(
    parent: Fingerprint, tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    blocks = len(tokens) // block_tokens
    extras = data.draw(
        st.dictionaries(st.integers(0, max(blocks - 1, 0)), EXTRA_IDS, max_size=min(blocks, 3))
    )
    slow = slow_keys(parent, tokens, block_tokens, extras)
    assert block_keys(parent, tokens, block_tokens, extras) == slow
    assert block_keys(parent, np.array(tokens, dtype=np.int64), block_tokens, extras) == slow


@given(PARENTS, TOKENS, BLOCK_TOKENS, st.integers(0, 60))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(
    parent: Fingerprint, tokens: list[int], block_tokens: int, length: int
) -> None:
    keys = block_keys(parent, tokens, block_tokens)
    of_prefix = block_keys(parent, tokens[:length], block_tokens)
    assert of_prefix == keys[: len(of_prefix)]


@given(PARENTS, TOKENS.filter(len), BLOCK_TOKENS, st.data())
def test_another_token_changes_its_block_and_all_later_ones_and_no_earlier_one(
    parent: Fingerprint, tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
    pairs = zip(
        block_keys(parent, tokens, block_tokens),
        block_keys(parent, changed, block_tokens),
        strict=True,
    )
    for number, (before, after) in enumerate(pairs):
        assert (before == after) == (number < place // block_tokens)


@given(PARENTS, TOKENS, BLOCK_TOKENS, st.integers(0, 60))
def test_a_chain_can_be_continued_at_any_block(
    parent: Fingerprint, tokens: list[int], block_tokens: int, blocks: int
) -> None:
    head = block_keys(parent, tokens[: blocks * block_tokens], block_tokens)
    last: Fingerprint | BlockKey = head[-1] if head else parent
    rest = block_keys(last, tokens[len(head) * block_tokens :], block_tokens)
    assert head + rest == block_keys(parent, tokens, block_tokens)
