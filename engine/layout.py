"""What KV bytes mean, completely: two engines share blocks only if all of this is equal (D4).

`KVLayout` is the identity of a namespace. Its fingerprint is SHA-256 over a canonical encoding
of *every* field, so a field added later changes every fingerprint and can't be forgotten. A
value that an engine can't name for certain belongs in a field anyway: a namespace too many
costs hits, a namespace too few costs wrong answers.

Knows nothing of engines: a plugin fills it in. Knows nothing of the server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType

from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.types import Fingerprint, NamespaceInfo

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one element, for each element type that KV can be stored in."""

DEFAULT_BLOCK_TOKENS = 64
"""Tokens a block where the engine has no wish of its own.

Small enough that a prompt of a few hundred tokens is mostly full blocks, large enough that a
block of a small model is still a megabyte or more, which is where copies reach full speed.
"""

ENCODING_TAG = b"kvstore.layout/1\n"
"""Precedes the encoding that is hashed. Raise the number if the encoding changes."""

_MAY_BE_EMPTY = frozenset({"adapter", "salt"})
_MAY_BE_ZERO = frozenset({"value_head_size", "tensor_rank", "pipeline_rank"})


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises UnsupportedModel for an unknown type."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        known = ", ".join(DTYPE_BYTES)
        raise UnsupportedModel(f"unknown dtype {dtype!r}; known are {known}") from None


def choose_block_tokens(engine_block_tokens: int | None) -> int:
    """Return the tokens a block: 64, or the next whole number of the engine's own blocks.

    A store block must be whole engine blocks, or a hit would leave one of them half filled. So
    an engine block that divides 64 gives 64; any other gives its smallest multiple from 64 up.
    Raises InvalidRequest for an engine block below 1.
    """
    if engine_block_tokens is None:
        return DEFAULT_BLOCK_TOKENS
    if engine_block_tokens < 1:
        raise InvalidRequest(f"an engine block has at least 1 token, not {engine_block_tokens}")
    engine_blocks = -(-DEFAULT_BLOCK_TOKENS // engine_block_tokens)
    return engine_blocks * engine_block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Everything that decides what the bytes of a block mean.

    Raises InvalidRequest for a missing or impossible value, UnsupportedModel for an unknown
    dtype. Strings are compared as they are: give canonical ones.
    """

    model: str
    """Name or path of the model, as reports show it."""
    revision: str
    """The weights: a commit, or a hash of the files where there is none."""
    adapter: str = ""
    """Name and revision of the LoRA adapter in use; empty for none."""
    dtype: str
    """Element type that the model computes in."""
    kv_dtype: str
    """Element type of the stored bytes; equal to `dtype` where KV is not quantised."""
    layers: int
    """Layers that this rank holds."""
    kv_heads: int
    """Heads of keys and values that this rank holds, in each layer."""
    head_size: int
    """Elements of a key, in one head."""
    value_head_size: int
    """Elements of a value, in one head; 0 where values are derived from keys."""
    rope: str
    """Canonical text of all RoPE parameters; "none" for a model without."""
    attention: str = "full"
    """Which tokens a token attends to, such as "full" or "sliding:4096"."""
    arrangement: str
    """How an engine orders a block's bytes, such as "transformers/1: layer,kv,head,token,dim"."""
    block_tokens: int
    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    tenant: str = "default"
    salt: str = field(default="", repr=False)
    """The tenant's secret. Without it the keys of a prompt that one guesses can't be computed.

    Fingerprints are not secret, so give it at least 128 random bits.
    """

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            # The annotations are strings here, and only these two types can be encoded.
            if spec.type == "str":
                _check_text(spec.name, value)
            else:
                _check_count(spec.name, value)
        for rank, size in (("tensor", self.tensor_size), ("pipeline", self.pipeline_size)):
            index = getattr(self, f"{rank}_rank")
            if index >= size:
                raise InvalidRequest(f"{rank}_rank {index} is not below {rank}_size {size}")
        dtype_bytes(self.dtype)
        dtype_bytes(self.kv_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, over this rank's layers and heads."""
        elements = self.layers * self.kv_heads * (self.head_size + self.value_head_size)
        return elements * dtype_bytes(self.kv_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_tokens

    def fingerprint(self) -> Fingerprint:
        """Return the namespace's name: SHA-256 over the tag and all fields as sorted JSON."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return Fingerprint(sha256(ENCODING_TAG + text.encode("ascii")).digest())

    def namespace_info(self) -> NamespaceInfo:
        """Return what the server is told: sizes and names, never the salt."""
        return NamespaceInfo(
            fingerprint=self.fingerprint(),
            block_bytes=self.block_bytes,
            block_tokens=self.block_tokens,
            model=self.model,
            tenant=self.tenant,
        )


def _check_text(name: str, value: object) -> None:
    # The messages never show a value: one of these is the salt.
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a str, not {type(value).__name__}")
    if not value and name not in _MAY_BE_EMPTY:
        raise InvalidRequest(f"{name} must not be empty")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an int, not {type(value).__name__}")
    least = 0 if name in _MAY_BE_ZERO else 1
    if value < least:
        raise InvalidRequest(f"{name} must be at least {least}, not {value}")
