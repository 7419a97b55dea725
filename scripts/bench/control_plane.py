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
from scripts.bench import common, crowd

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
  clients                many client processes at once (see scripts/bench/crowd.py): calls a second
                         of empty calls to a server that does nothing else (bare_per_s), of empty
                         calls to kvstore's (empty_per_s), of lookups of 32 keys (lookup_per_s)
  hash_128k_ms           naming the blocks of 131,072 tokens, by tokens a block
"""

KEYS = 512
CROWD_KEYS = 32
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
    clients: int
    rounds: int
    """Of the clients, each of so many seconds for each kind of call."""
    span_s: float


FULL = Scale((10_000, 100_000, 1_000_000), 1000, 21, 16, 5, 2.0)
QUICK = Scale((1_024, 4_096), 60, 3, 2, 2, 0.2)

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


class Asked:
    """A server with prefixes of `KEYS` blocks, a client of it, and the calls that are timed.

    Each call returns the seconds that it took.
    """

    def __init__(self, server: ServerProcess, store: Store, connection: Connection):
        self.server = server
        self.chains: Chains = []
        self._namespace = store.open(INFO)
        self._connection = connection
        assert connection.attached is not None
        self._calls = connection.attached.calls
        self._chance = random.Random(0)

    def grow(self, blocks: int) -> None:
        """Stores until there are so many blocks."""
        _grow(self._namespace, self.chains, blocks)

    def unary(self) -> float:
        """An empty call that is opened for itself."""
        opening = pb.OpenNamespaceRequest(
            namespace=INFO.fingerprint, block_bytes=BLOCK_BYTES, block_tokens=INFO.block_tokens
        )
        started_s = time.perf_counter()
        self._connection.stub.OpenNamespace(opening, timeout=CALL_TIMEOUT_S)
        return time.perf_counter() - started_s

    def empty(self) -> float:
        """An empty call on the session's stream."""
        started_s = time.perf_counter()
        self._calls.release(pb.ReleaseRequest(), CALL_TIMEOUT_S)
        return time.perf_counter() - started_s

    def lookup(self) -> float:
        """A lookup of a prefix, with a lease."""
        return self._timed(self._chance.choice(self.chains))

    def lookup_of(self, blocks: int) -> Callable[[], float]:
        """The same for so many blocks, which may be of several prefixes."""
        keys = [key for chain in self.chains for key in chain][:blocks]
        assert len(keys) == blocks
        return lambda: self._timed(keys)

    def _timed(self, keys: list[BlockKey]) -> float:
        started_s = time.perf_counter()
        found = self._namespace.lookup(keys)
        spent_s = time.perf_counter() - started_s
        assert found.blocks == len(keys), found.miss_reason
        self._namespace.release(found)
        return spent_s


@contextmanager
def asked(blocks: int) -> Iterator[Asked]:
    """An empty server that has room for so many blocks."""
    with (
        _server(blocks) as server,
        connect(f"unix:{server.folder}/kvstore.sock") as store,
        closing(Connection(store.target, share_memory=False, flush=lambda: None)) as connection,
    ):
        connection.wait_attached(CALL_TIMEOUT_S)
        yield Asked(server, store, connection)


def _memory_bytes(pid: int) -> int:
    """Memory of a process that is neither files nor shared."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not say how much memory a process has of its own")


def measure_calls(index_blocks: Sequence[int], calls: int) -> dict[str, Any]:
    """The keys that are about calls, for an index that grows to each of these sizes."""
    medians: dict[str, dict[str, float]] = {"unary": {}, "empty": {}, "lookup": {}}
    with (
        asked(index_blocks[-1]) as one,
        common.progress("calls", len(index_blocks) * calls * len(medians)) as advance,
    ):
        cases = {"unary": one.unary, "empty": one.empty, "lookup": one.lookup}
        before_bytes = _memory_bytes(one.server.pid)
        for size in index_blocks:
            one.grow(size)
            common.interleaved(cases, max(calls // 10, 10))  # warms up
            for name, times in common.interleaved(cases, calls, advance).items():
                medians[name][str(size)] = statistics.median(times) * 1e3
        grown_bytes = _memory_bytes(one.server.pid) - before_bytes
        blocks = len(one.chains) * KEYS
    unaries, empties, lookups = medians["unary"], medians["empty"], medians["lookup"]
    first = str(index_blocks[0])
    return {
        "empty_unary_ms": unaries[first],
        "empty_call_ms": empties[first],
        "lookup_512_ms": lookups[first],
        "lookup_512_over_empty": lookups[first] / unaries[first],
        "lookup_512_over_empty_call": lookups[first] / empties[first],
        "lookup_512_ms_by_index": lookups,
        "empty_unary_ms_by_index": unaries,
        "empty_call_ms_by_index": empties,
        "index_bytes_per_block": grown_bytes / blocks,
    }


def measure_clients(clients: int, rounds: int, span_s: float) -> dict[str, float]:
    """What the server answers when so many processes ask, each kind of call for a span a round."""
    with asked(KEYS) as one:
        one.grow(KEYS)
        found = crowd.measure(
            f"unix:{one.server.folder}/kvstore.sock",
            str(one.server.folder),
            INFO,
            one.chains[0][:CROWD_KEYS],
            clients=clients,
            rounds=rounds,
            span_s=span_s,
        )
    return {"processes": clients, **found}


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
    clients = document["clients"]
    crowded = common.table(
        f"{clients['processes']} client processes",
        ["calls", "a second"],
        f"empty calls, of a bare server's: {clients['empty_over_bare']:.2f}",
    )
    for kind in crowd.KINDS:
        crowded.add_row(kind, f"{clients[f'{kind}_per_s']:,.0f}")
    return [calls, crowded, hashing]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    chosen = common.parser("Measures what lookups and hashing cost.", HELP).parse_args(arguments)
    scale = QUICK if chosen.quick else FULL
    document = {
        **common.circumstances(),
        "quick": chosen.quick,
        **measure_calls(scale.index_blocks, scale.calls),
        "clients": measure_clients(scale.clients, scale.rounds, scale.span_s),
        "hash_128k_ms": measure_hashing(scale.hashes),
    }
    common.publish(document, _tables(document), chosen.json)


if __name__ == "__main__":
    main()
