"""Block keys: pinned values, the same in every process, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.hashing import TOKEN_MAX, block_keys
from kvstore.errors import InvalidRequest
from kvstore.types import Fingerprint

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests/golden/hashing.json").read_text())["chains"]
PARENT = Fingerprint(bytes(range(32)))


def keys_of(case: dict[str, Any]) -> list[str]:
    extras = {
        int(index): [bytes.fromhex(one) for one in ids] for index, ids in case["extras"].items()
    }
    parent = Fingerprint(bytes.fromhex(case["parent"]))
    keys = block_keys(parent, case["tokens"], case["block_tokens"], extras)
    return [key.hex() for key in keys]


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_keys_equal_the_pinned_ones(case: dict[str, Any]) -> None:
    assert keys_of(case) == case["keys"]


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_keys_do_not_depend_on_the_hash_seed_of_the_process(seed: str) -> None:
    program = (
        "import sys, json; from engine.hashing import block_keys\n"
        "keys = block_keys(bytes(range(32)), list(range(100)), 16, {1: [b'a', b'b']})\n"
        "print(json.dumps([key.hex() for key in keys]), hash('seeded'))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    printed, _, _ = done.stdout.rpartition(" ")
    here = block_keys(PARENT, list(range(100)), 16, {1: [b"a", b"b"]})
    assert json.loads(printed) == [key.hex() for key in here]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", "<u2", "<u4", "<u8"])
def test_every_integer_array_gives_the_keys_of_the_list(dtype: str) -> None:
    tokens = [0, 1, 255, 256, 50_000, 65_535, 7, 8]
    assert block_keys(PARENT, np.array(tokens, dtype=dtype), 4) == block_keys(PARENT, tokens, 4)


def test_a_strided_array_gives_the_keys_of_its_copy() -> None:
    tokens = np.arange(64)
    assert block_keys(PARENT, tokens[::2], 8) == block_keys(PARENT, tokens[::2].copy(), 8)


def test_an_unfilled_block_has_no_key() -> None:
    assert len(block_keys(PARENT, range(33), 16)) == 2
    assert block_keys(PARENT, range(15), 16) == []
    assert block_keys(PARENT, [], 16) == []
    assert block_keys(PARENT, np.array([]), 16) == []


def test_a_chain_goes_on_from_its_last_key() -> None:
    tokens = list(range(80))
    whole = block_keys(PARENT, tokens, 16)
    head = block_keys(PARENT, tokens[:48], 16)
    assert head + block_keys(head[-1], tokens[48:], 16) == whole


def test_extras_that_are_cut_differently_give_different_keys() -> None:
    cuts: list[list[bytes]] = [[], [b""], [b"", b""], [b"ab"], [b"a", b"b"], [b"b", b"a"]]
    keys = [block_keys(PARENT, range(16), 16, {0: cut})[0] for cut in cuts]
    assert len(set(keys)) == len(cuts)
    assert keys[0] == block_keys(PARENT, range(16), 16)[0]


def test_extras_change_their_block_and_all_later_ones() -> None:
    plain = block_keys(PARENT, range(64), 16)
    marked = block_keys(PARENT, range(64), 16, {1: [b"image"]})
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "token id -1 is outside"),
        ([TOKEN_MAX + 1], f"token id {TOKEN_MAX + 1} is outside"),
        ([2**70], "is outside"),
        (np.array([5, -3]), "token id -3 is outside"),
        (np.array([2**31]), "token id 2147483648 is outside"),
        (np.array([2**63], dtype=np.uint64), "is outside"),
        ([1.0, 2.0], "must be integers"),
        (np.array([1.0]), "must be integers, not float64"),
        (np.array([True]), "must be integers, not bool"),
        ([True, False], "must be integers, not bool"),
        (np.array([[1, 2]]), "one dimension, not 2"),
        (np.array(3), "one dimension, not 0"),
        (b"tokens", "must be integers, not bytes"),
        ("tokens", "must be integers, not str"),
        (["a"], "must be integers"),
    ],
)
def test_what_is_no_token_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        block_keys(PARENT, tokens, 1)


def test_a_bad_token_after_the_last_full_block_is_refused_too() -> None:
    with pytest.raises(InvalidRequest, match="token id -1"):
        block_keys(PARENT, [1, 2, 3, 4, -1], 4)


def test_the_largest_token_has_a_key() -> None:
    assert len(block_keys(PARENT, [TOKEN_MAX], 1)) == 1


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_extras_of_a_block_that_is_not_full_are_refused(index: int) -> None:
    with pytest.raises(InvalidRequest, match=f"extras for block {index}"):
        block_keys(PARENT, range(40), 16, {index: [b"image"]})


@pytest.mark.parametrize("ids", [b"image", "image", ["image"], [3]])
def test_extras_that_are_not_a_sequence_of_bytes_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        block_keys(PARENT, range(16), 16, {0: ids})


def test_a_block_below_one_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="block_tokens must be at least 1"):
        block_keys(PARENT, [1], 0)


def test_a_parent_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="32 bytes, this one 31"):
        block_keys(Fingerprint(bytes(31)), [1], 1)
