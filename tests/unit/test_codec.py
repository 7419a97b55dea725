"""The header of a block outside the host: golden bytes, and nothing wrong passes."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import codec
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/codec.json").read_text())
PAYLOAD = bytes(range(256)) * 4
INFO = NamespaceInfo(Fingerprint(bytes(range(32))), len(PAYLOAD), 16)
KEY = BlockKey(bytes(range(32, 64)))
DIGEST = codec.checksum(PAYLOAD)
HEADER = codec.encode_header(INFO, KEY, DIGEST)


def test_the_header_is_byte_for_byte_what_it_always_was() -> None:
    """Hosts of different versions share a Redis: a change here needs another VERSION."""
    assert f"{DIGEST:016x}" == GOLDEN["xxh3_64"]
    assert HEADER.hex() == GOLDEN["header"]


def test_a_block_verifies_and_gives_its_checksum() -> None:
    assert codec.verify(HEADER, INFO, KEY, PAYLOAD) == DIGEST


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_no_flipped_bit_of_the_payload_passes(bit: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    assert codec.verify(HEADER, INFO, KEY, payload) is None


@given(st.integers(0, len(HEADER) * 8 - 1))
def test_no_flipped_bit_of_the_header_passes(bit: int) -> None:
    header = bytearray(HEADER)
    header[bit // 8] ^= 1 << bit % 8
    assert codec.verify(bytes(header), INFO, KEY, PAYLOAD) is None


@given(st.binary(max_size=200) | st.integers(0, len(HEADER) - 1).map(lambda end: HEADER[:end]))
def test_no_other_bytes_pass_and_none_raise(header: bytes) -> None:
    assert codec.verify(header, INFO, KEY, PAYLOAD) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_no_other_message_passes(fields: object) -> None:
    assert codec.verify(msgpack.packb(fields), INFO, KEY, PAYLOAD) is None


@pytest.mark.parametrize(
    "fields",
    [
        ["kvs", 2, INFO.fingerprint, KEY, len(PAYLOAD), DIGEST],
        ["kvx", 1, INFO.fingerprint, KEY, len(PAYLOAD), DIGEST],
        ["kvs", 1, bytes(32), KEY, len(PAYLOAD), DIGEST],
        ["kvs", 1, INFO.fingerprint, bytes(32), len(PAYLOAD), DIGEST],
        ["kvs", 1, INFO.fingerprint, KEY, len(PAYLOAD) + 1, DIGEST],
        ["kvs", 1, INFO.fingerprint, KEY, len(PAYLOAD), DIGEST ^ 1],
        ["kvs", 1, INFO.fingerprint, KEY, len(PAYLOAD), DIGEST, 0],
        ["kvs", 1, INFO.fingerprint, KEY, len(PAYLOAD)],
    ],
)
def test_a_well_formed_header_of_something_else_does_not_pass(fields: list[object]) -> None:
    assert codec.verify(msgpack.packb(fields), INFO, KEY, PAYLOAD) is None


def test_a_header_of_a_megabyte_is_not_even_read() -> None:
    assert codec.verify(msgpack.packb([b"x" * (1 << 20)]), INFO, KEY, PAYLOAD) is None


def test_a_payload_of_another_length_does_not_pass() -> None:
    short = PAYLOAD[:-1]
    header = codec.encode_header(INFO, KEY, codec.checksum(short))
    assert codec.verify(header, INFO, KEY, short) is None


def test_the_checksum_is_the_same_for_every_kind_of_buffer() -> None:
    buffer = bytearray(PAYLOAD)
    assert codec.checksum(buffer) == codec.checksum(memoryview(buffer)) == DIGEST
