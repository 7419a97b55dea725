"""Names blocks: from token ids to the chain of keys that the store is asked for (D4).

A key is SHA-256 over its parent's key, its tokens and its extra ids, so it names the block and
everything before it. The first parent is the namespace's fingerprint. Nothing here depends on
the process: no seed, no `hash()`, no byte order of the host. The encoding is pinned by
`tests/golden/hashing.json`; changing it makes every stored block unreachable.

    key(i) = SHA-256( key(i-1) ‖ tokens as little-endian int32 ‖ extras )
    extras = nothing, if the block has none; else
             count as u32 LE ‖ for each: length as u32 LE ‖ bytes

The number of tokens is not encoded: it is the same for all blocks of a namespace, and the
fingerprint holds it. So where the tokens end and the extras begin can't be confused.

Knows nothing of models, tiers or the server.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.types import KEY_BYTES, BlockKey, Fingerprint

TOKEN_MAX = 2**31 - 1
"""Largest token id that has an encoding."""

TOKEN_BYTES = 4
_U32_MAX = 2**32 - 1

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


def block_keys(
    parent: Fingerprint | BlockKey,
    tokens: Tokens,
    block_tokens: int,
    extras: Mapping[int, Sequence[bytes]] | None = None,
) -> list[BlockKey]:
    """Return one key for each full block of `tokens`, in order; an unfilled last block has none.

    `parent` is the namespace's fingerprint for a sequence's start. To go on where earlier keys
    end, pass the last of them and only the tokens after its block: the result is the same as
    hashing everything again.

    `tokens` is one-dimensional: a numpy array of any integer type (fastest), an object that
    numpy can view as one, or a sequence of int. `extras` maps a block's index, counted from the
    first of `tokens`, to the ids of what else decides its KV, such as hashes of images that
    stand behind placeholder tokens; their order matters, an empty sequence equals none.

    Raises InvalidRequest for a parent that is not 32 bytes, tokens that are negative, above
    `TOKEN_MAX`, bool, float or not one-dimensional, `block_tokens` below 1, and extras of a
    block that is not among the full ones.
    """
    if len(parent) != KEY_BYTES:
        raise InvalidRequest(f"a parent key has {KEY_BYTES} bytes, this one {len(parent)}")
    if block_tokens < 1:
        raise InvalidRequest(f"block_tokens must be at least 1, not {block_tokens}")
    data = _encode_tokens(tokens)
    step = block_tokens * TOKEN_BYTES
    count = len(data) // step
    suffixes = _encode_all_extras(extras, count) if extras else {}

    keys: list[BlockKey] = []
    key: bytes = parent
    for index in range(count):
        # One joined buffer and one call: for small blocks the calls cost more than the hash.
        block = key + data[index * step : (index + 1) * step]
        if index in suffixes:
            block += suffixes[index]
        key = sha256(block).digest()
        keys.append(BlockKey(key))
    return keys


def _encode_tokens(tokens: Tokens) -> bytes:
    ids = _as_integers(tokens)
    if ids.size == 0:
        return b""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > TOKEN_MAX:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token id {bad} is outside 0 to {TOKEN_MAX}")
    return ids.astype("<i4").tobytes()


def _as_integers(tokens: Tokens) -> npt.NDArray[np.integer[Any]]:
    if hasattr(tokens, "__array__"):
        ids: npt.NDArray[Any] = np.asarray(tokens)
    elif isinstance(tokens, str | bytes | bytearray | memoryview):
        raise InvalidRequest(f"tokens must be integers, not {type(tokens).__name__}")
    else:
        ids = _from_sequence(tokens)
    if ids.ndim != 1:
        raise InvalidRequest(f"tokens must have one dimension, not {ids.ndim}")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(f"tokens must be integers, not {ids.dtype}")
    return ids


def _from_sequence(tokens: Sequence[int]) -> npt.NDArray[np.integer[Any]]:
    # A mask passed for tokens is the likely mistake. Looking at one element finds it; looking
    # at all would double the time, and in Python a single True among integers is a 1 anyway.
    if len(tokens) and isinstance(tokens[0], bool):
        raise InvalidRequest("tokens must be integers, not bool")
    try:
        # `array` refuses what numpy would silently round or widen, and takes half the time.
        ids = array.array("i", tokens if isinstance(tokens, list) else list(tokens))
    except OverflowError as error:
        bad = next(token for token in tokens if not 0 <= token <= TOKEN_MAX)
        raise InvalidRequest(f"token id {bad} is outside 0 to {TOKEN_MAX}") from error
    except TypeError as error:
        raise InvalidRequest(f"tokens must be integers: {error}") from error
    return np.frombuffer(ids, dtype=np.intc)


def _encode_all_extras(extras: Mapping[int, Sequence[bytes]], count: int) -> dict[int, bytes]:
    for index in extras:
        if not 0 <= index < count:
            raise InvalidRequest(
                f"extras for block {index}, but the full blocks are 0 to {count - 1}"
            )
    return {index: _encode_extras(ids) for index, ids in extras.items() if len(ids)}


def _encode_extras(ids: Sequence[bytes]) -> bytes:
    if isinstance(ids, bytes | str):
        raise InvalidRequest("a block's extras are a sequence of bytes, not a single one")
    parts = [struct.pack("<I", len(ids))]
    for one in ids:
        if not isinstance(one, bytes):
            raise InvalidRequest(f"an extra id must be bytes, not {type(one).__name__}")
        if len(one) > _U32_MAX:
            raise InvalidRequest(f"an extra id of {len(one)} bytes is too long")
        parts += (struct.pack("<I", len(one)), one)
    return b"".join(parts)
