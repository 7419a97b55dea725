"""Layouts: every field is part of the identity, sizes are right, the salt stays secret."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engine.layout import DTYPE_BYTES, KVLayout, choose_block_tokens, dtype_bytes
from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.types import KEY_BYTES, NamespaceInfo

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/hashing.json").read_text())["layouts"]
FIELDS = [field.name for field in dataclasses.fields(KVLayout)]
TEXTS = [field.name for field in dataclasses.fields(KVLayout) if field.type == "str"]
COUNTS = [name for name in FIELDS if name not in TEXTS]
SMALL: dict[str, Any] = {
    "model": "small",
    "revision": "abc",
    "adapter": "lora@1",
    "dtype": "float32",
    "kv_dtype": "float32",
    "layers": 30,
    "kv_heads": 3,
    "head_size": 64,
    "value_head_size": 64,
    "rope": "default,theta=100000",
    "attention": "full",
    "arrangement": "transformers/1: layer,kv,head,token,dim",
    "block_tokens": 64,
    "tensor_rank": 0,
    "tensor_size": 2,
    "pipeline_rank": 0,
    "pipeline_size": 2,
    "tenant": "acme",
    "salt": "5ec4e7",
}


def changed(name: str) -> dict[str, Any]:
    value = SMALL[name]
    if name in ("dtype", "kv_dtype"):
        return {name: "float16"}
    return {name: value + 1 if isinstance(value, int) else value + "x"}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_fingerprint(name: str) -> None:
    before, after = KVLayout(**SMALL), KVLayout(**{**SMALL, **changed(name)})
    assert before.fingerprint() != after.fingerprint()


def test_equal_layouts_have_equal_fingerprints_of_key_length() -> None:
    one, other = KVLayout(**SMALL), KVLayout(**dict(reversed(SMALL.items())))
    assert one.fingerprint() == other.fingerprint()
    assert len(one.fingerprint()) == KEY_BYTES


def test_text_that_moves_to_the_next_field_changes_the_fingerprint() -> None:
    one = KVLayout(**{**SMALL, "model": "ab", "revision": "c"})
    other = KVLayout(**{**SMALL, "model": "a", "revision": "bc"})
    quoted = KVLayout(**{**SMALL, "model": 'a","revision":"b', "revision": "c"})
    assert len({one.fingerprint(), other.fingerprint(), quoted.fingerprint()}) == 3


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_fingerprints_equal_the_pinned_ones(case: dict[str, Any]) -> None:
    assert KVLayout(**case["fields"]).fingerprint().hex() == case["fingerprint"]


def test_bytes_of_a_token_and_a_block() -> None:
    layout = KVLayout(**SMALL)
    assert layout.bytes_per_token == 30 * 3 * (64 + 64) * 4 == 46_080
    assert layout.block_bytes == 46_080 * 64


def test_sizes_follow_the_stored_dtype_and_both_head_sizes() -> None:
    layout = KVLayout(**{**SMALL, "kv_dtype": "int8", "head_size": 192, "value_head_size": 0})
    assert layout.bytes_per_token == 30 * 3 * 192


def test_the_server_is_told_sizes_and_names() -> None:
    layout = KVLayout(**SMALL)
    assert layout.namespace_info() == NamespaceInfo(
        layout.fingerprint(), 46_080 * 64, 64, "small", "acme"
    )


def test_the_salt_is_never_shown() -> None:
    layout = KVLayout(**SMALL)
    assert "5ec4e7" not in repr(layout)
    assert "5ec4e7" not in repr(layout.namespace_info())
    with pytest.raises(InvalidRequest) as refused:
        KVLayout(**{**SMALL, "salt": b"5ec4e7"})
    assert "5ec4e7" not in str(refused.value)


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
def test_an_unknown_dtype_is_refused_with_the_known_ones_named(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"unknown dtype 'int3'.*bfloat16"):
        KVLayout(**{**SMALL, name: "int3"})


def test_known_dtypes_have_their_sizes() -> None:
    assert {name: dtype_bytes(name) for name in DTYPE_BYTES} == DTYPE_BYTES
    assert (dtype_bytes("float32"), dtype_bytes("bfloat16"), dtype_bytes("int8")) == (4, 2, 1)


@pytest.mark.parametrize("name", TEXTS)
def test_text_fields_refuse_other_types(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a str, not NoneType"):
        KVLayout(**{**SMALL, name: None})


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"adapter", "salt"}))
def test_text_fields_refuse_to_be_empty(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must not be empty"):
        KVLayout(**{**SMALL, name: ""})


def test_no_adapter_and_no_salt_are_empty() -> None:
    assert KVLayout(**{**SMALL, "adapter": "", "salt": ""}).adapter == ""


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, True, 1.0, "1"])
def test_counts_refuse_what_is_no_count(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be"):
        KVLayout(**{**SMALL, name: value})


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_size", "block_tokens", "tensor_size"])
def test_sizes_refuse_zero(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least 1"):
        KVLayout(**{**SMALL, name: 0})


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_rank_is_below_its_size(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{kind}_rank 2 is not below {kind}_size 2"):
        KVLayout(**{**SMALL, f"{kind}_rank": 2})


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [(None, 64), (1, 64), (16, 64), (64, 64), (24, 72), (48, 96), (65, 65), (256, 256)],
)
def test_a_block_is_whole_engine_blocks_from_64_tokens_up(engine: int | None, chosen: int) -> None:
    assert choose_block_tokens(engine) == chosen


def test_an_engine_block_below_one_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 token"):
        choose_block_tokens(0)
