"""What the benchmarks share: interleaved rounds, medians, the machine's description, output.

A number of one machine means little, and on a shared machine it changes from minute to minute.
So whatever is compared is measured in turns within one run, and reported as a ratio.

Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]

Advance = Callable[[str], None]
"""Notes one step as done, and says what comes next."""


def parser(description: str, details: str) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--json",
        metavar="FILE",
        help="also write the numbers as JSON; - means stdout, and the table goes to stderr then",
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="few rounds of little data, in seconds: shows that it runs, the numbers mean little",
    )
    return made


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, beginning with another one each turn."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def interleaved(
    cases: Mapping[str, Callable[[], float]], rounds: int, advance: Advance = lambda text: None
) -> dict[str, list[float]]:
    """Runs every case once a round, each round beginning with another one; the results in order.

    A case returns what it measured: it alone knows which part of it counts.
    """
    results: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for name in rotated(list(cases), turn):
            results[name].append(cases[name]())
            advance(name)
    return results


def median_ratio(values: Sequence[float], bases: Sequence[float]) -> float:
    """The median of the ratios of each round: what slows a whole round down falls out."""
    return statistics.median(value / base for value, base in zip(values, bases, strict=True))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def circumstances() -> dict[str, Any]:
    """The keys that every benchmark's JSON begins with."""
    return {
        "machine": machine(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def progress(title: str, steps: int) -> Iterator[Advance]:
    """A bar on stderr; call what it yields once a step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[step]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=steps, step="")

        def advance(text: str) -> None:
            bar.update(task, advance=1, step=text)

        yield advance


def publish(document: Mapping[str, Any], tables: Sequence[Table], target: str | None) -> None:
    """Prints the tables, and writes the document where `--json` says."""
    text = json.dumps(document, indent=2)
    console = Console(stderr=target == "-")
    where = document["machine"]
    console.print(
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, Linux "
        f"{where['kernel']}, Python {where['python']}, commit {document['commit']}",
        style="dim",
        highlight=False,
    )
    for table in tables:
        console.print(table)
    if target == "-":
        sys.stdout.write(text + "\n")
    elif target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


def table(title: str, columns: Sequence[str], caption: str = "") -> Table:
    """A table whose first column is text, and whose others are numbers."""
    made = Table(title=title, caption=caption or None, title_justify="left")
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left")
    return made


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def size_text(size_bytes: int) -> str:
    """`"128 KiB"`, `"2 MiB"`."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes} B"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit's short name, with `+` when files differ from it; `unknown` without git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
