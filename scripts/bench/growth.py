"""How cost grows: with the size of blocks, the length of requests, clients, the index. See --help.

Starts the servers and clients that it measures.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(File(__file__).resolve().parents[2]))

from rich.table import Table

from kvstore.client import connect
from kvstore.testing import ServerProcess
from scripts.bench import common, control_plane, crowd
from scripts.bench.growth_page import Plot, page
from scripts.bench.paths import Buffers, Client, Copy

HELP = """\
Four questions, one plot each. Whatever shares a plot is measured in turns; numbers are medians.

plots
  block_bytes  what moving a byte costs, by the size of the blocks: batches of 16 MiB through shared
               memory, and a plain copy of the same
  blocks       what a lookup of present blocks costs, by how many a request asks for; beside it an
               empty call
  clients      how many calls a second the server answers, by how many processes ask; beside it a
               server that does nothing else
  index        what a lookup of 512 blocks costs, by how many blocks the server holds

JSON: plots[] have name, title, x (name of the axis), y, xs, and series: a list of numbers for each
line's name.
"""

MIB = 1 << 20
BATCH_BYTES = 16 * MIB
ARENA_BYTES = 1024 * MIB


@dataclass(frozen=True)
class Scale:
    """How much to measure."""

    block_bytes: tuple[int, ...]
    blocks: tuple[int, ...]
    clients: tuple[int, ...]
    index_blocks: tuple[int, ...]
    rounds: int
    calls: int
    span_s: float


FULL = Scale(
    tuple((16 << 10) << step for step in range(10)),
    tuple(4**step for step in range(8)),
    (1, 2, 4, 8, 16),
    (10_000, 30_000, 100_000, 300_000, 1_000_000),
    rounds=7,
    calls=300,
    span_s=1.0,
)
QUICK = Scale((64 << 10, MIB), (1, 16), (1, 2), (1_024, 2_048), rounds=2, calls=20, span_s=0.2)


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def by_block_bytes(scale: Scale) -> Plot:
    """Nanoseconds a KiB moved."""
    buffers = Buffers(ARENA_BYTES // 4)
    series: dict[str, list[float]] = {"copy": [], "store": [], "load": []}
    with (
        tempfile.TemporaryDirectory(prefix="kvb") as folder,  # short: it holds unix sockets
        ServerProcess(File(folder) / "a", "--no-redis", cpu_bytes=str(ARENA_BYTES)) as server,
        connect(f"unix:{server.folder}/kvstore.sock") as store,
        common.progress("bytes a block", len(scale.block_bytes) * scale.rounds) as advance,
    ):
        copy, shm = Copy(), Client("growth", store)
        shm.fill(buffers, ARENA_BYTES, MIB, BATCH_BYTES // MIB)
        for block_bytes in scale.block_bytes:
            shm.clear()
            times: dict[str, list[float]] = {name: [] for name in series}
            for turn in range(scale.rounds + 1):
                batch = buffers.batch(BATCH_BYTES // block_bytes, block_bytes)
                stored_s = _seconds(lambda batch=batch: shm.store(batch))  # type: ignore[misc]
                loaded_s = _seconds(lambda batch=batch: shm.load(batch))  # type: ignore[misc]
                copied_s = _seconds(lambda batch=batch: copy.load(batch))  # type: ignore[misc]
                if turn:  # the first one warms up
                    for name, spent_s in zip(series, (copied_s, stored_s, loaded_s), strict=True):
                        times[name].append(spent_s)
                    advance(common.size_text(block_bytes))
            for name in series:
                series[name].append(statistics.median(times[name]) * 1e9 / (BATCH_BYTES >> 10))
    return Plot(
        "block_bytes",
        "Moving a byte",
        "bytes a block",
        "ns a KiB",
        list(scale.block_bytes),
        series,
    )


def by_blocks(scale: Scale) -> Plot:
    """Milliseconds a lookup."""
    series: dict[str, list[float]] = {"lookup": [], "empty call": []}
    steps = len(scale.blocks) * scale.calls * len(series)
    with (
        control_plane.asked(max(scale.blocks)) as one,
        common.progress("blocks a request", steps) as advance,
    ):
        one.grow(max(scale.blocks))
        for blocks in scale.blocks:
            cases = {"lookup": one.lookup_of(blocks), "empty call": one.empty}
            for name, times in common.interleaved(cases, scale.calls, advance).items():
                series[name].append(statistics.median(times) * 1e3)
    return Plot("blocks", "Asking for blocks", "blocks a request", "ms", list(scale.blocks), series)


def by_clients(scale: Scale) -> Plot:
    """Calls a second."""
    names = {"bare": "a bare server", "empty": "empty calls", "lookup": "lookups of 32"}
    series: dict[str, list[float]] = {name: [] for name in names.values()}
    for clients in scale.clients:
        found = control_plane.measure_clients(clients, 3, scale.span_s)
        for kind, name in names.items():
            series[name].append(found[f"{kind}_per_s"])
    assert set(names) == set(crowd.KINDS)
    return Plot(
        "clients", "Many clients", "client processes", "calls a second", list(scale.clients), series
    )


def by_index(scale: Scale) -> Plot:
    """Milliseconds a lookup of 512."""
    found = control_plane.measure_calls(scale.index_blocks, scale.calls)
    return Plot(
        "index",
        "A larger index",
        "blocks in the index",
        "ms",
        list(scale.index_blocks),
        {
            "lookup of 512": list(found["lookup_512_ms_by_index"].values()),
            "empty call": list(found["empty_call_ms_by_index"].values()),
        },
    )


def _tables(plots: Sequence[Plot]) -> list[Table]:
    tables = []
    for plot in plots:
        table = common.table(f"{plot.title}: {plot.y}", [plot.x, *plot.series])
        for index, x in enumerate(plot.xs):
            table.add_row(f"{x:,}", *(f"{values[index]:,.3g}" for values in plot.series.values()))
        tables.append(table)
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = common.parser("Measures how cost grows, and draws it.", HELP)
    parser.add_argument("--html", metavar="FILE", help="also write one page with the plots")
    chosen = parser.parse_args(arguments)
    scale = QUICK if chosen.quick else FULL
    plots = [measure(scale) for measure in (by_block_bytes, by_blocks, by_clients, by_index)]
    document: dict[str, Any] = {
        **common.circumstances(),
        "quick": chosen.quick,
        "plots": [plot.document() for plot in plots],
    }
    if chosen.html:
        File(chosen.html).write_text(page(document, plots), encoding="utf-8")
    common.publish(document, _tables(plots), chosen.json)


if __name__ == "__main__":
    main()
