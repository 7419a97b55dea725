"""What asking costs: a lookup against an empty call, and the hashing before it. See --help.

Starts the server that it asks.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.table import Table

from engine.hashing import block_keys
from kvstore.client import Namespace, Store, connect
from kvstore.client.connection import CALL_TIMEOUT_S, Connection
from kvstore.testing import ServerProcess
from kvstore.types import BlockKey, Fingerprint, NamespaceInfo
from kvstore.wire._pb import kvstore_pb2 as pb
from scripts.bench import common

HELP = """\
A lookup here is what an engine does for each request: `Namespace.lookup` of 512 keys that are
all present, with a lease; the release of the one before rides on it. The empty call is a release
without leases on the same stream; the empty unary call is OpenNamespace of an open namespace, on
the same connection (a unix socket). They are made in turns, and the numbers are medians.

numbers
  empty_unary_ms         the empty call, opened for itself
  empty_call_ms          the empty call, on the session's stream
  lookup_512_ms          the lookup, in the smallest index
  lookup_512_over_empty  the lookup over the empty unary call
  lookup_512_over_empty_call  the lookup over the empty call: how much it is beside the bare call
  lookup_512_ms_by_index the lookup, by how many blocks are in the index
  empty_unary_ms_by_index, empty_call_ms_by_index  the empty calls made in turns with those
  index_bytes_per_block  how much the server's memory grew for each block, beside the arena
  hash_128k_ms           naming the blocks of 131,072 tokens, by tokens a block
"""

KEYS = 512
BLOCK_BYTES = 64
ARENA_BYTES_A_BLOCK = 2 * (BLOCK_BYTES + 64)
HASH_TOKENS = 131_072
HASH_BLOCK_TOKENS = (16, 64, 256)
INFO = NamespaceInfo(Fingerprint(sha256(b"control plane").digest()), BLOCK_BYTES, 16, "bench")


@dataclass(frozen=True)
class Scale:
    """How much to measure."""

    index_blocks: tuple[int, ...]
    """Sizes of the index, growing."""
    calls: int
    hashes: int


FULL = Scale((10_000, 100_000, 1_000_000), 1000, 21)
QUICK = Scale((1_024, 4_096), 60, 3)

Chains = list[list[BlockKey]]


@contextmanager
def _server(blocks: int) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="kvb") as folder:  # short: it holds unix sockets
        size = max(blocks * ARENA_BYTES_A_BLOCK, 64 << 20)
        with ServerProcess(Path(folder) / "a", "--no-redis", cpu_bytes=str(size)) as server:
            yield server


def _grow(namespace: Namespace, chains: Chains, blocks: int) -> None:
    """Stores prefixes of `KEYS` blocks until there are so many blocks."""
    payload = bytes(BLOCK_BYTES)

    def write(index: int, view: memoryview) -> None:
        view[:] = payload

    while len(chains) * KEYS < blocks:
        name = len(chains).to_bytes(8, "little")
        chain = [BlockKey(sha256(name + bytes([i & 255, i >> 8])).digest()) for i in range(KEYS)]
        stored = namespace.store(chain, write)
        assert stored.stored == KEYS, stored
        chains.append(chain)


def _calls(store: Store, connection: Connection, chains: Chains) -> dict[str, Callable[[], float]]:
    namespace = store.open(INFO)
    chance = random.Random(0)
    attached = connection.attached
    assert attached is not None
    opening = pb.OpenNamespaceRequest(
        namespace=INFO.fingerprint, block_bytes=BLOCK_BYTES, block_tokens=INFO.block_tokens
    )

    def unary() -> float:
        started_s = time.perf_counter()
        connection.stub.OpenNamespace(opening, timeout=CALL_TIMEOUT_S)
        return time.perf_counter() - started_s

    def empty() -> float:
        started_s = time.perf_counter()
        attached.calls.release(pb.ReleaseRequest(), CALL_TIMEOUT_S)
        return time.perf_counter() - started_s

    def lookup() -> float:
        keys = chance.choice(chains)
        started_s = time.perf_counter()
        found = namespace.lookup(keys)
        spent_s = time.perf_counter() - started_s
        assert found.blocks == KEYS, found.miss_reason
        namespace.release(found)
        return spent_s

    return {"unary": unary, "empty": empty, "lookup": lookup}


def _memory_bytes(pid: int) -> int:
    """Memory of a process that is neither files nor shared."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not say how much memory a process has of its own")


def measure_calls(scale: Scale) -> dict[str, Any]:
    """The keys that are about calls."""
    lookups: dict[str, float] = {}
    empties: dict[str, float] = {}
    unaries: dict[str, float] = {}
    chains: Chains = []
    blocks = scale.index_blocks[-1]
    with (
        _server(blocks) as server,
        connect(f"unix:{server.folder}/kvstore.sock") as store,
        closing(Connection(store.target, share_memory=False, flush=lambda: None)) as connection,
        common.progress("calls", len(scale.index_blocks) * scale.calls * 3) as advance,
    ):
        connection.wait_attached(CALL_TIMEOUT_S)
        before_bytes = _memory_bytes(server.pid)
        for size in scale.index_blocks:
            _grow(store.open(INFO), chains, size)
            cases = _calls(store, connection, chains)
            common.interleaved(cases, max(scale.calls // 10, 10))  # warms up
            times = common.interleaved(cases, scale.calls, advance)
            lookups[str(size)] = statistics.median(times["lookup"]) * 1e3
            empties[str(size)] = statistics.median(times["empty"]) * 1e3
            unaries[str(size)] = statistics.median(times["unary"]) * 1e3
        grown_bytes = _memory_bytes(server.pid) - before_bytes
    first = str(scale.index_blocks[0])
    return {
        "empty_unary_ms": unaries[first],
        "empty_call_ms": empties[first],
        "lookup_512_ms": lookups[first],
        "lookup_512_over_empty": lookups[first] / unaries[first],
        "lookup_512_over_empty_call": lookups[first] / empties[first],
        "lookup_512_ms_by_index": lookups,
        "empty_unary_ms_by_index": unaries,
        "empty_call_ms_by_index": empties,
        "index_bytes_per_block": grown_bytes / (len(chains) * KEYS),
    }


def measure_hashing(rounds: int) -> dict[str, float]:
    """Milliseconds by tokens a block."""
    tokens = np.random.default_rng(0).integers(0, 150_000, HASH_TOKENS, np.int32)

    def case(block_tokens: int) -> Callable[[], float]:
        def run() -> float:
            started_s = time.perf_counter()
            keys = block_keys(INFO.fingerprint, tokens, block_tokens)
            spent_s = time.perf_counter() - started_s
            assert len(keys) == HASH_TOKENS // block_tokens
            return spent_s

        return run

    cases = {str(block_tokens): case(block_tokens) for block_tokens in HASH_BLOCK_TOKENS}
    with common.progress("hashing", rounds * len(cases)) as advance:
        times = common.interleaved(cases, rounds, advance)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def _tables(document: dict[str, Any]) -> list[Table]:
    lookups = document["lookup_512_ms_by_index"]
    empties = document["empty_call_ms_by_index"]
    calls = common.table(
        f"a lookup of {KEYS} present keys, with a lease",
        ["blocks in the index", "lookup, ms", "empty call, ms", "ratio"],
        f"{document['index_bytes_per_block']:.0f} bytes of the server's memory a block",
    )
    for size, lookup_ms in lookups.items():
        calls.add_row(
            f"{int(size):,}",
            f"{lookup_ms:.3f}",
            f"{empties[size]:.3f}",
            f"{lookup_ms / empties[size]:.2f}",
        )
    hashing = common.table(f"naming the blocks of {HASH_TOKENS:,} tokens", ["tokens a block", "ms"])
    for name, spent_ms in document["hash_128k_ms"].items():
        hashing.add_row(name, f"{spent_ms:.2f}")
    return [calls, hashing]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    chosen = common.parser("Measures what lookups and hashing cost.", HELP).parse_args(arguments)
    scale = QUICK if chosen.quick else FULL
    document = {
        **common.circumstances(),
        "quick": chosen.quick,
        **measure_calls(scale),
        "hash_128k_ms": measure_hashing(scale.hashes),
    }
    common.publish(document, _tables(document), chosen.json)


if __name__ == "__main__":
    main()
