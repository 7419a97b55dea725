"""The main job, end to end, on this machine: a real model, a real server, a real Valkey.

Plays three scenarios with greedy decoding, four times, each in a new engine process:

  off    without the store
  cold   with the store, which is empty at first
  warm   again: blocks come from the CPU tier, through shared memory
  redis  again, with the CPU tier emptied before each request: blocks come from Valkey

The answers of all four must be the same, token by token. Then it prints the hit-rate report and
writes it as a page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvstore
from kvstore.report import page, text
from kvstore.testing import ServerProcess
from scripts import model
from scripts.scenarios import scenarios

ROOT = Path(__file__).resolve().parent.parent
CPU_BYTES = "1GiB"
POOL_BYTES = 1 << 30

Line = dict[str, Any]
"""What `scripts.demo_engine` prints of one request."""


@dataclass(frozen=True)
class Pass:
    """One engine process. The pool is on in the cold pass alone, so that the others show the
    tier that they are named for."""

    name: str
    text: str
    flags: tuple[str, ...] = ()
    uses_store: bool = True


PASSES = (
    Pass("off", "without the store", uses_store=False),
    Pass("cold", "empty store", (f"--pool-bytes={POOL_BYTES}",)),
    Pass("warm", "new process, CPU tier"),
    Pass("redis", "new process, Valkey", ("--empty-arena",)),
)


def run_pass(chosen: Pass, model_dir: Path, target: str) -> Iterator[Line]:
    """Starts an engine process and yields its lines as they come."""
    command = [sys.executable, "-m", "scripts.demo_engine", str(model_dir), *chosen.flags]
    if chosen.uses_store:
        command += ["--target", target]
    with tempfile.TemporaryFile("w+") as errors:
        engine = subprocess.Popen(
            command,
            cwd=ROOT,
            # Idle torch threads spin by default, and take the core from the server.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert engine.stdout is not None
        for line in engine.stdout:
            yield json.loads(line)
        if engine.wait() != 0:
            errors.seek(0)
            raise SystemExit(f"the engine process of pass {chosen.name} failed:\n{errors.read()}")


def play(model_dir: Path, target: str, console: Console) -> dict[str, dict[str, list[Line]]]:
    """All passes; returns lines by scenario and pass."""
    lines: dict[str, dict[str, list[Line]]] = {
        scenario.name: defaultdict(list) for scenario in scenarios()
    }
    requests = sum(len(scenario.turns) for scenario in scenarios())
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for chosen in PASSES:
            task = progress.add_task(f"{chosen.name}: {chosen.text}", total=requests)
            for line in run_pass(chosen, model_dir, target):
                lines[line["scenario"]][chosen.name].append(line)
                progress.advance(task)
    return lines


def summarise(name: str, passes: dict[str, list[Line]]) -> dict[str, Any]:
    """One scenario's numbers: tokens and totals are sums, times to first token are means."""

    def ttft_s(which: str) -> float:
        return fmean(line["ttft_s"] for line in passes[which])

    def total_s(which: str) -> float:
        return fsum(line["total_s"] for line in passes[which])

    hits: dict[str, int] = defaultdict(int)
    for line in passes["warm"]:
        for tier, tokens in line["hits"].items():
            hits[tier] += tokens
    skipped: dict[str, int] = defaultdict(int)
    for line in passes["cold"]:
        for reason, blocks in line["skipped"].items():
            skipped[reason] += blocks
    answers = {chosen: [line["tokens"] for line in lines] for chosen, lines in passes.items()}
    return {
        "name": name,
        "prompt_tokens": sum(line["prompt_tokens"] for line in passes["warm"]),
        "cached_tokens": sum(hits.values()),
        "tier": "+".join(tier for tier, tokens in hits.items() if tokens) or "none",
        "ttft_off_s": ttft_s("off"),
        "ttft_cold_s": ttft_s("cold"),
        "ttft_warm_s": ttft_s("warm"),
        "ttft_redis_s": ttft_s("redis"),
        "total_off_s": total_s("off"),
        "total_warm_s": total_s("warm"),
        "outputs_equal": all(answer == answers["off"] for answer in answers.values()),
        "stored_blocks": sum(line["stored_blocks"] for line in passes["cold"]),
        "skipped_blocks": sum(skipped.values()),
        "skip_reasons": {reason: blocks for reason, blocks in skipped.items() if blocks},
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """The table."""
    table = Table(
        title="Six questions about a document, a chat, short prompts", title_justify="left"
    )
    for heading in ("scenario", "prompt\ntokens", "cached\ntokens", "tier"):
        table.add_column(heading, justify="left" if heading in ("scenario", "tier") else "right")
    for heading in ("off", "cold", "warm", "redis"):
        table.add_column(f"first\ntoken\n{heading}", justify="right")
    for heading in ("total\noff", "total\nwarm", "stored\nblocks", "skipped\nblocks"):
        table.add_column(heading, justify="right")
    table.add_column("output\nequal")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            row["tier"],
            *(f"{row[f'ttft_{which}_s']:.3f} s" for which in ("off", "cold", "warm", "redis")),
            f"{row['total_off_s']:.1f} s",
            f"{row['total_warm_s']:.1f} s",
            str(row["stored_blocks"]),
            str(row["skipped_blocks"]),
            "yes" if row["outputs_equal"] else "NO",
        )
    console.print(table)
    for row in rows:
        if row["skip_reasons"]:
            reasons = ", ".join(
                f"{blocks} {reason}" for reason, blocks in row["skip_reasons"].items()
            )
            console.print(f"{row['name']}: blocks not stored: {reasons}", highlight=False)
    console.print(
        "First-token times are means over a scenario's requests. In the cold pass the first "
        "request stores\nand the next ones hit; there the engine's own pool is on (tier gpu).",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers for scripts")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", default=Path("kvstore-report.html"),
        help="where the report's page goes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER",
        help="another Hugging Face model, as a folder (default: a small one, fetched once)",
    )  # fmt: skip
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    started_s = time.monotonic()
    model_dir = options.model or model.prepare("float32")
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        console.print(f"Starting the server: CPU tier of {CPU_BYTES}, embedded Valkey")
        with ServerProcess(Path(folder), cpu_bytes=CPU_BYTES) as server:
            lines = play(model_dir, server.target, console)
            with kvstore.connect(server.target) as store:
                report = json.loads(store.report())
    rows = [summarise(scenario.name, lines[scenario.name]) for scenario in scenarios()]
    show(rows, console)
    console.print()
    console.print(text.render(report, console.width), highlight=False, markup=False)
    options.html.write_text(page.render(report), encoding="utf-8")
    console.print(f"The report as a page: {options.html}", highlight=False)
    if options.json is not None:
        options.json.write_text(json.dumps({"scenarios": rows, "report": report}, indent=2))
    console.print(f"Took {time.monotonic() - started_s:.0f} s", highlight=False)
    if not all(row["outputs_equal"] for row in rows):
        raise SystemExit("the store has changed an answer: this is a bug")


if __name__ == "__main__":
    main()
