"""The results for a terminal: capacities by policies, the bounds beside them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.replay.sweep import OPTIMAL_NAME, Plan, Swept
from kvstore.replay.trace import Trace
from kvstore.report import words

WIDTH_MIN = 112
"""Narrower than this, the columns would not fit; lines run over instead."""

_COLUMNS = (
    "blocks",
    "bytes",
    "policy",
    "stored",
    "hit blocks",
    "tokens",
    "of optimal",
    "written",
    "bytes",
    "prefill saved",
)


def show(console: Console, trace: Trace, plan: Plan, swept: Swept) -> None:
    """Prints one trace's results."""
    document = swept.document
    console.print(Text(words.plain(trace.name), style="bold"))
    counted = trace.requests - trace.first_counted(plan.warmup)
    console.print(
        f"{trace.requests:,} requests, {trace.blocks:,} blocks of {trace.block_tokens} tokens, "
        f"{trace.unique_blocks:,} of them different; the last {counted:,} requests count.",
        highlight=False,
    )
    if trace.skipped:
        console.print(f"{trace.skipped:,} damaged lines were left out.", style="yellow")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in _COLUMNS:
        names = column in ("policy", "stored")
        table.add_column(column, justify="left" if names else "right", no_wrap=True)
    before = None
    for result, saved_s in zip(document["results"], swept.saved_s, strict=True):
        capacity = result["capacity_blocks"]
        if before not in (None, capacity):
            table.add_section()
        size = f"{capacity:,}", words.size(capacity * swept.block_bytes)
        table.add_row(
            *(size if capacity != before else ("", "")),
            result["policy"],
            "" if result["policy"] == OPTIMAL_NAME else result["admission"],
            f"{result['block_hit_rate']:.4f}",
            f"{result['token_hit_rate']:.4f}",
            f"{result['share_of_optimal']:.1%}",
            f"{result['blocks_written']:,}",
            words.size(result["blocks_written"] * swept.block_bytes),
            words.duration(saved_s),
        )
        before = capacity
    infinite = document["infinite"]
    table.add_section()
    table.add_row(
        "infinite",
        "",
        "",
        "",
        f"{infinite['block_hit_rate']:.4f}",
        f"{infinite['token_hit_rate']:.4f}",
        "",
        "",
        "",
        words.duration(swept.infinite_saved_s),
    )
    console.print(table)
    console.print(swept.cost_model, style="dim", highlight=False)
