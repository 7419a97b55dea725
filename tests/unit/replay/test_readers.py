"""Every format is recognised by its content, and a damaged line is named or left out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engine.hashing import block_keys
from kvstore.errors import BadTrace
from kvstore.replay.read import Options, read, tokenizer
from kvstore.replay.trace import Trace
from kvstore.types import Fingerprint

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
]
SESSION = {
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "in": 130, "out": 3, "hash_ids": [1, 2]},
        {"t": 90.0, "in": 200, "out": 3, "hash_ids": [1, 2, 3]},
    ],
}


def write(path: Path, *lines: Any) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_text(text)
    return path


def one(path: Path, **options: Any) -> Trace:
    (trace,) = read([path], Options(**options))
    return trace


def prompts(trace: Trace) -> list[list[int]]:
    edges = zip(trace.starts[:-1], trace.starts[1:], strict=True)
    return [trace.ids[start:end].tolist() for start, end in edges]


def test_mooncake(tmp_path: Path) -> None:
    trace = one(write(tmp_path / "chat.jsonl", *MOONCAKE))
    assert (trace.name, trace.block_tokens, trace.requests) == ("chat", 512, 2)
    assert prompts(trace) == [[7, 8], [7, 9]]
    assert trace.times_s.tolist() == [0, 1.5]
    assert trace.prompt_tokens.tolist() == [1000, 1024]
    assert trace.output_tokens.tolist() == [5, 9]
    assert (trace.blocks, trace.unique_blocks) == (4, 3)


def test_gzip_is_found_by_content_not_by_name(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", *MOONCAKE)
    packed = tmp_path / "b.txt"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert prompts(one(packed)) == prompts(one(plain))


def test_requests_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    trace = one(write(tmp_path / "a.jsonl", *reversed(MOONCAKE)))
    assert trace.times_s.tolist() == [0, 1.5]
    assert prompts(trace) == [[7, 8], [7, 9]]
    assert trace.prompt_tokens.tolist() == [1000, 1024]


@pytest.mark.parametrize("indent", [None, 2])
def test_sessions_are_interleaved_and_their_numbers_kept_apart(
    tmp_path: Path, indent: int | None
) -> None:
    other = {**SESSION, "requests": [{"t": 0.0, "in": 64, "out": 3, "hash_ids": [1]}]}
    first = write(tmp_path / "a.json", json.dumps(SESSION, indent=indent))
    again = write(tmp_path / "again.json", json.dumps(SESSION, indent=indent))
    second = write(tmp_path / "b.json", json.dumps(other, indent=indent))
    (trace,) = read([first, again, second])
    assert trace.times_s.tolist() == [0, 60, 90], "the second begins a minute after the first"
    assert list(map(len, prompts(trace))) == [2, 1, 3]
    assert trace.unique_blocks == 4, "the same session again is left out; numbers are local"
    assert trace.block_tokens == 64


def test_tokens_are_named_by_the_chain_that_engines_use(tmp_path: Path) -> None:
    tokens = list(range(100))
    file = write(tmp_path / "a.jsonl", tokens, {"tokens": tokens[:40], "time_s": 7}, [5])
    trace = one(file, block_tokens=16)
    keys = block_keys(Fingerprint(bytes(32)), tokens, 16)
    ids = [int.from_bytes(key[:8], "little") for key in keys]
    assert prompts(trace) == [ids, ids[:2], []]
    assert trace.prompt_tokens.tolist() == [100, 40, 1]
    assert trace.times_s.tolist() == [0, 7, 8]


def test_text_is_read_with_a_tokenizer(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "abcd"}, '"abce"\n')
    trace = one(file, block_tokens=2, tokenize=lambda text: [ord(char) for char in text])
    first, second = prompts(trace)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"good": 0, "morning": 1, "night": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert list(tokenizer(str(tmp_path))("good night")) == [0, 2]
    with pytest.raises(BadTrace, match="--tokenizer"):
        tokenizer(str(tmp_path / "nowhere" / "tokenizer.json"))


def test_what_kvstore_recorded(tmp_path: Path) -> None:
    trace = one(
        write(
            tmp_path / "a.jsonl",
            {"kvstore_trace": 1},
            {"namespace": 0, "block_tokens": 32, "block_bytes": 4096},
            {"time_s": 0.5, "namespace": 0, "keys": "00" * 8 + "01" + "00" * 7},
        )
    )
    assert prompts(trace) == [[0, 1]]
    assert (trace.block_tokens, trace.block_bytes) == (32, 4096)
    assert trace.prompt_tokens.tolist() == [64]


BAD = [
    ("{", "not JSON"),
    ("[1, 2]", "timestamp|input_length"),
    ({**MOONCAKE[0], "input_length": -1}, "input_length"),
    ({**MOONCAKE[0], "input_length": 10}, "2 blocks of 512 tokens"),
    ({**MOONCAKE[0], "hash_ids": [1.5]}, "hash_ids"),
    ({**MOONCAKE[0], "hash_ids": [True]}, "hash_ids"),
    ({**MOONCAKE[0], "hash_ids": [-1]}, "below 0"),
    ({**MOONCAKE[0], "hash_ids": [1 << 64]}, "64 bits"),
    ({**MOONCAKE[0], "hash_ids": None}, "hash_ids"),
    ({**MOONCAKE[0], "timestamp": "soon"}, "timestamp"),
    ('{"timestamp": NaN, "input_length": 9, "hash_ids": [1]}', "timestamp"),
    ({**MOONCAKE[0], "timestamp": 10**400}, "timestamp"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_a_damaged_line_is_named_and_stops_or_is_counted(
    tmp_path: Path, line: Any, why: str
) -> None:
    bad = line + "\n" if isinstance(line, str) else line
    file = write(tmp_path / "a.jsonl", MOONCAKE[0], "\n", bad, MOONCAKE[1])
    with pytest.raises(BadTrace, match=rf"a\.jsonl:3: .*({why})"):
        one(file)
    trace = one(file, skip_bad=True)
    assert (trace.requests, trace.skipped) == (2, 1)


def test_a_damaged_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    trace = one(write(tmp_path / "a.jsonl", "{oops\n", *MOONCAKE), skip_bad=True)
    assert (trace.requests, trace.skipped) == (2, 1)


def test_bytes_that_are_no_text_are_a_damaged_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *MOONCAKE)
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(BadTrace, match=r"a\.jsonl:3"):
        one(file)
    assert one(file, skip_bad=True).skipped == 1


def test_blocks_of_no_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="block_size"):
        one(write(tmp_path / "a.json", {**SESSION, "block_size": 0}))


def test_a_truncated_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    lines = [{**MOONCAKE[0], "hash_ids": [n, n + 1]} for n in range(20_000)]
    packed = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadTrace, match=r"a\.jsonl\.gz:\d+: the compressed data is damaged"):
        one(file)
    trace = one(file, skip_bad=True)
    assert trace.skipped == 1
    assert 0 < trace.requests < 20_000


def test_a_damaged_request_of_a_session_is_named(tmp_path: Path) -> None:
    requests = [*SESSION["requests"], {"t": 1.0, "in": "many", "hash_ids": [1]}]  # type: ignore[misc]
    file = write(tmp_path / "a.json", {**SESSION, "requests": requests})
    with pytest.raises(BadTrace, match=r"a\.json:1: request 3: in"):
        one(file)
    trace = one(file, skip_bad=True)
    assert (trace.requests, trace.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "not a trace of a known format"),
        (["hello\n"], "not a trace of a known format"),
        ([{"name": "Anna"}], "not a trace of a known format"),
        ([[1, 2, 3]], "--block-tokens"),
        ([{"kvstore_trace": 2}], "version 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_what_to_do(
    tmp_path: Path, lines: list[Any], why: str
) -> None:
    with pytest.raises(BadTrace, match=why):
        one(write(tmp_path / "a.jsonl", *lines))


def test_text_without_a_tokenizer_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="--tokenizer"):
        one(write(tmp_path / "a.jsonl", '"hello"\n'), block_tokens=4)
    with pytest.raises(BadTrace, match="No such file"):
        one(tmp_path / "none.jsonl")
    with pytest.raises(BadTrace, match="directory"):
        one(tmp_path)


def test_namespaces_of_different_sizes_are_not_one_trace(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"kvstore_trace": 1},
        {"namespace": 0, "block_tokens": 32, "block_bytes": 4096},
        {"namespace": 1, "block_tokens": 64, "block_bytes": 4096},
    )
    with pytest.raises(BadTrace, match=r"a\.jsonl:3: .*--namespace"):
        one(file)
