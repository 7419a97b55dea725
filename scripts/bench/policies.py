"""The table of traces by capacities by policies, as Markdown, for ARCHITECTURE.md.

Policies may be tuned on the first half of a trace, so that only the last half counts here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from kvstore.eviction import POLICIES
from kvstore.replay import progress
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.model import DEFAULT_MODEL, MODELS
from kvstore.replay.read import read
from kvstore.replay.sweep import OPTIMAL_NAME, Document, Plan, sweep
from kvstore.replay.trace import Trace

WARMUP = 0.5
SHARES = (0.01, 0.05, 0.1, 0.25)
HELP = """\
Token hit rates over the last half of each trace, at 1, 5, 10 and 25 % of its different blocks;
with --admission, of LRU by admission rule, and the part of admit-all's writes in brackets. The gap
closed is (hit rate - LRU's) / (optimal - LRU's), its mean over the capacities.
"""


def capacities(trace: Trace, quick: bool) -> list[int]:
    """Some shares of the trace's different blocks."""
    shares = SHARES[-1:] if quick else SHARES
    return [max(1, round(share * trace.unique_blocks)) for share in shares]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; names to the left, numbers as they come."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_policy(document: Document) -> str:
    """Capacities by policies, and how much of LRU's gap to the optimal each policy closes."""
    rates: dict[int, dict[str, float]] = {}
    for each in document["results"]:
        rates.setdefault(each["capacity_blocks"], {})[each["policy"]] = each["token_hit_rate"]
    names = [*POLICIES, OPTIMAL_NAME]
    infinite = f"{document['infinite']['token_hit_rate']:.4f}"
    rows = [
        [f"{capacity:,}", *(f"{of[name]:.4f}" for name in names), infinite]
        for capacity, of in rates.items()
    ]
    gaps = [
        statistics.fmean(
            (of[name] - of["lru"]) / (of[OPTIMAL_NAME] - of["lru"])
            for of in rates.values()
            if of[OPTIMAL_NAME] > of["lru"]
        )
        for name in names
    ]
    rows.append(["gap closed", *(f"{gap:.0%}" for gap in gaps), ""])
    return markdown(["blocks", *names, "infinite"], rows)


def by_admission(document: Document) -> str:
    """Capacities by admission rules, for LRU."""
    found = {
        (each["capacity_blocks"], each["admission"]): each
        for each in document["results"]
        if each["policy"] == "lru"
    }
    rows = []
    for capacity in dict.fromkeys(capacity for capacity, _ in found):
        cells = []
        for rule in ADMISSIONS:
            each = found[capacity, rule]
            part = each["blocks_written"] / max(found[capacity, "all"]["blocks_written"], 1)
            cells.append(f"{each['token_hit_rate']:.4f} ({part:.0%})")
        rows.append([f"{capacity:,}", *cells])
    return markdown(["blocks", *ADMISSIONS], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description="Prints hit rates of traces by capacities by policies.", epilog=HELP
    )
    parser.add_argument("traces", nargs="+", type=Path, help="as for `kvstore replay`")
    parser.add_argument("--quick", action="store_true", help="one capacity alone")
    parser.add_argument("--admission", action="store_true", help="by admission rule instead")
    chosen = parser.parse_args(arguments)
    traces = read(chosen.traces)
    policies = ["lru"] if chosen.admission else list(POLICIES)
    rules = list(ADMISSIONS) if chosen.admission else ["all"]
    plans = [Plan(capacities(each, chosen.quick), policies, rules, None, WARMUP) for each in traces]
    steps = sum(plan.steps(trace) for trace, plan in zip(traces, plans, strict=True))
    documents = []
    with progress.bar("replaying", steps) as advance:
        for trace, plan in zip(traces, plans, strict=True):
            documents.append(sweep(trace, plan, MODELS[DEFAULT_MODEL], advance).document)
    for document in documents:
        print(f"\n{document['trace']}\n")
        print(by_admission(document) if chosen.admission else by_policy(document))


if __name__ == "__main__":
    main()
