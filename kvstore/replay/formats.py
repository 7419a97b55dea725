"""The formats of traces that are lines of JSON: what one line says.

    Mooncake    {"timestamp": ms, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
    tokens      [15, 2043, …], or {"tokens": […], "time_s": 0.5}
    text        "a prompt", or {"text": "a prompt", "time_s": 0.5}
    recorded    by `kvstore record`, see `kvstore.record`

Requests of the plain formats that don't say when they came are taken to come a second apart.

A line that doesn't fit raises ValueError with what is wrong. Knows nothing of files.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from kvstore.replay.trace import Request

MOONCAKE_BLOCK_TOKENS = 512
TOKENS_NAMES = ("tokens", "token_ids", "input_ids")
TEXT_NAMES = ("text", "prompt")
RECORDED = "kvstore_trace"
RECORDED_VERSION = 1
RECORDED_KEY_CHARS = 16
TOKEN_MAX = 2**31 - 1
SECONDS_MAX = 1e15

Tokenize = Callable[[str], Sequence[int]]


class Format(ABC):
    """Turns lines of one file into requests."""

    block_tokens: int
    block_bytes: int | None = None

    @abstractmethod
    def request(self, value: Any) -> Request | None:
        """The request of a line, parsed as JSON; None for a line that is about the trace.

        Raises ValueError: what is wrong with it.
        """


class Mooncake(Format):
    """Prompts as numbers of prefix-chained blocks; the last block may be partly filled."""

    def __init__(self, block_tokens: int | None):
        self.block_tokens = block_tokens or MOONCAKE_BLOCK_TOKENS

    def request(self, value: Any) -> Request | None:
        prompt_tokens = whole(value, "input_length")
        ids = block_ids(value.get("hash_ids"))
        check_length(ids, self.block_tokens, prompt_tokens, "--block-tokens gives the block size")
        output_tokens = whole(value, "output_length") if "output_length" in value else 0
        return Request(seconds(value, "timestamp") / 1000, prompt_tokens, ids, output_tokens)


class Plain(Format):
    """Prompts as token ids, or as text with a tokenizer. Full blocks are named, as a store does."""

    def __init__(self, block_tokens: int | None, tokenize: Tokenize | None):
        if block_tokens is None:
            raise ValueError("lines of tokens or text need a block size: give --block-tokens")
        self.block_tokens = block_tokens
        self._tokenize = tokenize
        self._next_s = 0.0

    def request(self, value: Any) -> Request | None:
        fields = value if isinstance(value, dict) else {}
        time_s = seconds(fields, "time_s") if "time_s" in fields else self._next_s
        self._next_s = time_s + 1.0
        given = (fields[name] for name in (*TOKENS_NAMES, *TEXT_NAMES) if name in fields)
        prompt = next(given, value)
        if isinstance(prompt, str):
            if self._tokenize is None:
                raise ValueError("lines of text need a tokenizer: give --tokenizer")
            prompt = self._tokenize(prompt)
        elif not isinstance(prompt, list):
            raise ValueError("expected token ids or text")
        return Request(time_s, len(prompt), chained_ids(prompt, self.block_tokens))


class Recorded(Format):
    """What `kvstore record` wrote: prompts as keys that were hashed again."""

    block_tokens = 0

    def __init__(self, header: Any):
        if header[RECORDED] != RECORDED_VERSION:
            raise ValueError(f"version {header[RECORDED]!r:.20} of a recorded trace is not known")
        self._namespaces: set[int] = set()

    def request(self, value: Any) -> Request | None:
        if isinstance(value, dict) and RECORDED in value:
            return None
        number = whole(value, "namespace")
        if "keys" not in value:
            size = whole(value, "block_tokens", 1), whole(value, "block_bytes", 1)
            if self._namespaces and size != (self.block_tokens, self.block_bytes):
                raise ValueError(
                    "namespaces with blocks of different sizes: record one of them, with "
                    "`kvstore record --namespace`"
                )
            self.block_tokens, self.block_bytes = size
            self._namespaces.add(number)
            return None
        if number not in self._namespaces:
            raise ValueError(f"namespace {number} was not described before")
        keys = value["keys"]
        if not isinstance(keys, str) or len(keys) % RECORDED_KEY_CHARS:
            raise ValueError(f"keys: expected {RECORDED_KEY_CHARS} hexadecimal digits each")
        ids = array("Q")
        ids.frombytes(bytes.fromhex(keys))
        if len(set(ids)) < len(ids):
            raise ValueError("keys: the same block twice in one prompt")
        return Request(seconds(value, "time_s"), len(ids) * self.block_tokens, ids)


def recognise(value: Any, block_tokens: int | None, tokenize: Tokenize | None) -> Format | None:
    """The format of which this may be a line, or None. Raises ValueError: an option is missing."""
    if isinstance(value, dict):
        if RECORDED in value:
            return Recorded(value)
        if "hash_ids" in value:
            return Mooncake(block_tokens)
        if value.keys().isdisjoint((*TOKENS_NAMES, *TEXT_NAMES)):
            return None
    elif not isinstance(value, list | str):
        return None
    return Plain(block_tokens, tokenize)


def parse(line: bytes) -> Any:
    """The line as JSON. Raises ValueError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError("not JSON of this format (nested too deep)") from error


def whole(value: Any, name: str, least: int = 0) -> int:
    """The field, a whole number from `least`. Raises ValueError."""
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not int or not least <= found < 1 << 62:
        raise ValueError(f"{name}: expected a whole number from {least}, not {found!r:.30}")
    return found


def seconds(value: Any, name: str) -> float:
    """The field, a time from 0. Raises ValueError."""
    found = value.get(name) if isinstance(value, dict) else None
    if (
        not isinstance(found, int | float)
        or isinstance(found, bool)
        or not 0 <= found < SECONDS_MAX
    ):
        raise ValueError(f"{name}: expected a time, not {found!r:.30}")
    return float(found)


def block_ids(found: Any) -> array[int]:
    """A list of numbers of blocks. Raises ValueError."""
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise ValueError("hash_ids: expected a list of whole numbers")
    if len(set(found)) < len(found):
        raise ValueError("hash_ids: the same block twice in one prompt")
    try:
        return array("Q", found)
    except OverflowError as error:
        raise ValueError("hash_ids: a number is below 0 or has more than 64 bits") from error


def check_length(ids: Sequence[int], block_tokens: int, prompt_tokens: int, hint: str) -> None:
    """Raises ValueError when the prompt is too short for its blocks."""
    if ids and (len(ids) - 1) * block_tokens >= prompt_tokens:
        raise ValueError(
            f"{len(ids)} blocks of {block_tokens} tokens for a prompt of {prompt_tokens} tokens; "
            f"{hint}"
        )


def chained_ids(tokens: Sequence[int], block_tokens: int) -> array[int]:
    """Names the full blocks by the chain that engines use, cut to 64 bits. Raises ValueError."""
    if not set(map(type, tokens)) <= {int}:
        raise ValueError("expected token ids, whole numbers")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= TOKEN_MAX:
        raise ValueError(f"a token id is outside 0 to {TOKEN_MAX}")
    ids, key = array("Q"), bytes(32)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = array("i", tokens[start : start + block_tokens])
        key = sha256(key + block.tobytes()).digest()
        ids.frombytes(key[:8])
    return ids
