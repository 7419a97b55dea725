"""How replay grows: block touches a second, and memory, from 10^4 to 10^7 touches.

Each size runs in a process of its own, so that its peak of memory is its own. The trace is made
up, written as Mooncake JSONL and read back: chats whose prompts share a system prompt, grow by a
few blocks a turn, and come back a while later.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstore.eviction import POLICIES
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.optimal import Future, infinite_hits, optimal_hits
from kvstore.replay.read import read
from kvstore.replay.simulator import replay
from scripts.bench import common

HELP = """\
Touches are blocks asked for. Rates are touches a second: of reading the file, of replaying LRU,
and of computing the infinite and the optimal bound. Memory is the peak less what the process had
before it read: first after the replay, then after the bounds too. Single runs, not medians: each
size takes much longer than the machine's hiccups.
"""

TOUCHES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK = (10_000, 100_000)
CAPACITY_BLOCKS = 50_000
LIVE_CHATS = 400
SYSTEM_BLOCKS = 4
TURN_BLOCKS = 6
TURNS_MEAN = 5


def lines(touches: int) -> Iterator[str]:
    """Requests until there are so many block touches."""
    chance = random.Random(0)
    chats: list[list[int]] = []
    fresh = SYSTEM_BLOCKS
    done = 0
    time_ms = 0
    while done < touches:
        at = chance.randrange(LIVE_CHATS)
        if at >= len(chats) or chance.random() < 1 / TURNS_MEAN:
            blocks = list(range(SYSTEM_BLOCKS))
            at = min(at, len(chats))
            chats[at : at + 1] = [blocks]
        grown = chance.randint(1, 2 * TURN_BLOCKS)
        chats[at].extend(range(fresh, fresh + grown))
        fresh += grown
        done += len(chats[at])
        time_ms += 100
        request = {
            "timestamp": time_ms,
            "input_length": 512 * len(chats[at]),
            "output_length": 100,
            "hash_ids": chats[at],
        }
        yield json.dumps(request) + "\n"


def measure(touches: int) -> dict[str, Any]:
    """Rates and memory of one size, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        with file.open("w") as out:
            out.writelines(lines(touches))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began_s = time.perf_counter()
        (trace,) = read([file])
        read_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    done = replay(trace, POLICIES["lru"], ADMISSIONS["all"], CAPACITY_BLOCKS)
    lru_s = time.perf_counter() - began_s
    replay_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.perf_counter()
    infinite = infinite_hits(trace)
    optimal, _ = optimal_hits(Future(trace), CAPACITY_BLOCKS)
    bounds_s = time.perf_counter() - began_s
    bounds_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "touches": trace.blocks,
        "unique_blocks": trace.unique_blocks,
        "lru_hit_rate": float(done.hits.sum()) / trace.blocks,
        "optimal_hit_rate": float(optimal.sum()) / trace.blocks,
        "infinite_hit_rate": float(infinite.sum()) / trace.blocks,
        "read_per_s": trace.blocks / read_s,
        "lru_per_s": trace.blocks / lru_s,
        "bounds_per_s": trace.blocks / bounds_s,
        "replay_mib": (replay_kib - before_kib) / 1024,
        "bounds_mib": (bounds_kib - before_kib) / 1024,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = common.parser("Measures how replay grows with the trace.", HELP)
    parser.add_argument("--one", type=int, help="measure one size here, and print it as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(json.dumps(measure(chosen.one)))
        return
    sizes = QUICK if chosen.quick else TOUCHES
    rows = []
    with common.progress("replay", len(sizes)) as advance:
        for size in sizes:
            command = [sys.executable, "-m", "scripts.bench.replay", "--one", str(size)]
            done = subprocess.run(command, cwd=common.ROOT, check=True, stdout=subprocess.PIPE)
            rows.append(json.loads(done.stdout))
            advance(f"{size:,} touches")
    document = {**common.circumstances(), "quick": chosen.quick, "rows": rows}
    common.publish(document, [_table(rows)], chosen.json)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("touches", "different", "read /s", "LRU /s", "bounds /s", "MiB", "with bounds")
    table = common.table("Replay", columns, f"LRU at {CAPACITY_BLOCKS:,} blocks")
    for row in rows:
        rates = (f"{row[name] / 1e6:.2f} M" for name in ("read_per_s", "lru_per_s", "bounds_per_s"))
        sizes = (f"{row[name]:,.0f}" for name in ("replay_mib", "bounds_mib"))
        table.add_row(f"{row['touches']:,}", f"{row['unique_blocks']:,}", *rates, *sizes)
    return table


if __name__ == "__main__":
    main()
