"""Whatever is in a file, reading it ends with traces or with BadTrace, and counts what it skips."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadTrace
from kvstore.eviction import POLICIES
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.optimal import Future, infinite_hits, optimal_hits
from kvstore.replay.read import Options, read
from kvstore.replay.simulator import replay

NAMES = [
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "tokens",
    "text",
    "time_s",
    "kvstore_trace",
    "namespace",
    "block_tokens",
    "block_bytes",
    "keys",
    "block_size",
    "requests",
    "t",
    "in",
    "out",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 70)
    | st.integers(0, 5)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["00" * 8, "zz" * 8]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
    ),
    max_leaves=12,
)
LINES = st.one_of(
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=20),
    st.sampled_from(
        [
            {"timestamp": 1, "input_length": 600, "hash_ids": [1, 2]},
            {"timestamp": 0, "input_length": 0, "hash_ids": []},
            {"timestamp": 2, "input_length": 1500, "hash_ids": [3, 2, 1]},
            {"timestamp": 3, "input_length": 1500, "hash_ids": [2, 2]},
            {"kvstore_trace": 1},
            {"namespace": 0, "block_tokens": 4, "block_bytes": 64},
            {"namespace": 0, "time_s": 1, "keys": "00" * 8},
            {"block_size": 4, "requests": [{"t": 0, "in": 9, "hash_ids": [1]}]},
            [1, 2, 3, 4, 5],
        ]
    ).map(lambda value: json.dumps(value).encode()),
)


@given(
    lines=st.lists(LINES, max_size=8),
    packed=st.booleans(),
    cut=st.integers(0, 30),
    skip_bad=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    packed: bool,
    cut: int,
    skip_bad: bool,
) -> None:
    data = b"\n".join(lines)
    data = gzip.compress(data) if packed else data
    file: Path = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(data[: len(data) - cut] if cut else data)

    def tokenize(text: str) -> list[int]:
        return [ord(char) for char in text]

    options: Any = Options(block_tokens=4, tokenize=tokenize, skip_bad=skip_bad)
    with contextlib.suppress(BadTrace):
        for trace in read([file], options):
            assert skip_bad or not trace.skipped
            best, _ = optimal_hits(Future(trace), 3)
            lru = replay(trace, POLICIES["lru"], ADMISSIONS["all"], 3).hits
            assert lru.sum() <= best.sum() <= infinite_hits(trace).sum() <= trace.blocks
            assert (trace.tokens_of(trace.lengths) <= trace.prompt_tokens).all()
