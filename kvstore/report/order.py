"""Which rows of a snapshot a reader sees, and in which order. Shared by the text and the page.

Pure functions of the document's parts. Knows nothing of how rows look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstore.report import words
from kvstore.report.ledger import BUCKET_S
from kvstore.report.snapshot import Count, Group, History, Tier
from kvstore.types import TierName

_NEAREST_FIRST = {str(tier): position for position, tier in enumerate(TierName)}


def total(counts: Iterable[Count]) -> Count:
    """The sum of several counts."""
    summed: Count = {"tokens": 0, "blocks": 0, "bytes": 0}
    for count in counts:
        summed["tokens"] += count["tokens"]
        summed["blocks"] += count["blocks"]
        summed["bytes"] += count["bytes"]
    return summed


def tiers(names: Iterable[str]) -> list[str]:
    """Tiers by distance, nearest first; one that is unknown to this version comes last."""
    return sorted(names, key=lambda name: (_NEAREST_FIRST.get(name, len(TierName)), name))


def nearest_first(hits: Mapping[str, Count]) -> list[tuple[str, Count]]:
    """Tiers that had hits, nearest first."""
    return [(name, hits[name]) for name in tiers(hits) if hits[name]["tokens"]]


def largest_first(reasons: Mapping[str, Count]) -> list[tuple[str, Count]]:
    """Reasons that were counted, the largest first: by tokens, then by blocks."""
    seen = [(name, count) for name, count in reasons.items() if count["tokens"] or count["blocks"]]
    return sorted(seen, key=lambda row: (-row[1]["tokens"], -row[1]["blocks"], row[0]))


def busiest(groups: Mapping[str, Group], limit: int) -> tuple[list[tuple[str, Group]], int]:
    """The `limit` groups with the most prompt tokens, largest first, and how many are left."""
    ranked = sorted(groups.items(), key=lambda row: (-row[1]["prompt"]["tokens"], row[0]))
    return ranked[:limit], max(0, len(ranked) - limit)


def blocks_of(tier: Tier) -> str:
    """A tier's blocks in words; nothing where bytes are used and no blocks were reported."""
    return (
        words.NOTHING if tier["used_bytes"] and not tier["blocks"] else words.count(tier["blocks"])
    )


@dataclass(frozen=True, slots=True)
class Window:
    """What the history's buckets of the last `seconds` hold."""

    seconds: int
    requests: int
    prompt_tokens: int
    hit_tokens: int


def windows(history: Iterable[History], taken_at: float, lengths_s: Iterable[int]) -> list[Window]:
    """Sums over the last so many seconds, one for each length; exact to a bucket's width."""
    points = list(history)
    rows = []
    for seconds in lengths_s:
        inside = [p for p in points if p["t"] + BUCKET_S > taken_at - seconds]
        rows.append(
            Window(
                seconds,
                sum(p["requests"] for p in inside),
                sum(p["prompt_tokens"] for p in inside),
                sum(sum(p["hit_tokens"].values()) for p in inside),
            )
        )
    return rows
