"""What a real server is asked for is written down so that replay reads it and nobody else can."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli import cli
from kvstore.client import Store
from kvstore.replay.read import read
from kvstore.replay.trace import Trace
from kvstore.testing import ServerProcess
from tests.integration.support import BLOCK_BYTES, BLOCK_TOKENS, chain, info_of, store


@contextmanager
def recording(file: Path, target: str, other: Store, *options: str) -> Iterator[None]:
    """Records what happens meanwhile, and a few warm-up lookups before that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "record", str(file), target, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # It has begun when it has written what it was not told of before.
        probe = other.open(info_of("record probe"))
        deadline_s = time.monotonic() + 60
        while not file.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.05)
        for number in range(20):
            probe.lookup(chain(f"probe {number}", 1), lease_s=0.0)
            threading.Event().wait(0.05)
        yield
        threading.Event().wait(0.5)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"to {file}" in output


def traced(file: Path) -> Trace:
    (trace,) = read([file])
    return trace


@pytest.mark.parametrize("name_of_file", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recording_replays_as_what_was_asked(
    tmp_path: Path, server: ServerProcess, other: Store, name: str, name_of_file: str
) -> None:
    file = tmp_path / name_of_file
    namespace = other.open(info_of(name))
    keys = chain(name, 12)
    with recording(file, server.target, other):
        namespace.lookup(keys, lease_s=0.0)
        store(namespace, keys)  # asks for nothing
        namespace.lookup(keys, again=True, lease_s=0.0)  # the same request again
        namespace.lookup([*keys[:5], *chain("else", 3)], lease_s=0.0)
    trace = traced(file)
    assert (trace.block_tokens, trace.block_bytes) == (BLOCK_TOKENS, BLOCK_BYTES)
    first, second = trace.starts[-3:-1].tolist()
    asked = trace.ids[first:second].tolist(), trace.ids[second:].tolist()
    assert list(map(len, asked)) == [12, 8]
    assert asked[0][:5] == asked[1][:5], "equal blocks are equal numbers, present or not"
    assert len({*asked[0], *asked[1]}) == 12 + 3
    assert trace.prompt_tokens[-2:].tolist() == [12 * BLOCK_TOKENS, 8 * BLOCK_TOKENS]
    done = CliRunner().invoke(cli, ["replay", str(file), "--json", "--capacity-gib", "0.001"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert {each["capacity_blocks"] for each in results} == {16}, "blocks are the recording's"


def test_nothing_in_it_leads_back_to_a_prompt(
    tmp_path: Path, server: ServerProcess, other: Store, name: str
) -> None:
    info = info_of(name, model="a-secret-model", tenant="a-secret-tenant")
    namespace = other.open(info)
    keys = chain(name, 3)
    numbers = []
    for turn in range(2):
        file = tmp_path / f"{turn}.jsonl"
        with recording(file, server.target, other):
            namespace.lookup(keys, lease_s=0.0)
        text = file.read_text()
        assert "secret" not in text
        for secret in (*keys, info.fingerprint):
            for start in range(32 - 8):
                assert secret[start : start + 8].hex() not in text
        numbers.append(set(traced(file).ids[-3:].tolist()))
    assert numbers[0].isdisjoint(numbers[1]), "each recording has a secret of its own"


def test_one_namespace_alone(
    tmp_path: Path, server: ServerProcess, other: Store, name: str
) -> None:
    file = tmp_path / "one.jsonl"
    mine, theirs = info_of(name), info_of(f"not {name}", block_bytes=2 * BLOCK_BYTES)
    with recording(file, server.target, other, "--namespace", mine.fingerprint.hex()):
        other.open(theirs).lookup(chain("theirs", 7), lease_s=0.0)
        other.open(mine).lookup(chain("mine", 4), lease_s=0.0)
    trace = traced(file)
    assert (trace.requests, trace.blocks) == (1, 4)
    assert trace.block_bytes == BLOCK_BYTES


def test_it_ends_when_its_time_is_up(tmp_path: Path, server: ServerProcess) -> None:
    file = tmp_path / "short.jsonl"
    done = run("record", str(file), server.target, "--for", "0.5s")
    assert done.returncode == 0, done.stdout
    assert json.loads(file.read_text()) == {"kvstore_trace": 1}


def test_a_file_that_exists_is_kept(tmp_path: Path, server: ServerProcess) -> None:
    file = tmp_path / "kept.jsonl"
    file.write_text("precious")
    done = run("record", str(file), server.target)
    assert done.returncode == 1
    assert "exists; record to a new file" in done.stdout
    assert file.read_text() == "precious"


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run("record", str(tmp_path / "none.jsonl"), "127.0.0.1:1")
    assert done.returncode == 1
    assert "Error: " in done.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=90,
    )
