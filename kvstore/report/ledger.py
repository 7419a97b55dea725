"""The ledger: adds up what engines report, in total, by model, by tenant and over time.

Invariants: the totals are the sum of all usages recorded; so are the models' usages together,
and the tenants'. A usage that can't be true is refused whole. Memory has a bound that does not
depend on what clients send: names, their lengths and the history's buckets are all limited.

Single-threaded: its owner serialises the calls. Knows nothing of blocks, tiers or the wire.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.errors import InvalidRequest
from kvstore.types import BlockCount, NamespaceInfo, TierName, Usage

BUCKET_S = 10
"""Width of a history bucket."""

BUCKETS_MAX = 360
"""Buckets kept: the last hour. Older ones are dropped, not merged: the totals have counted them
already, and buckets of unequal width would make every reader of the history handle widths."""

NAMES_MAX = 1000
"""Models, and tenants, that are counted by name; all later ones together are `OTHER`."""

NAME_CHARS_MAX = 200
"""Longer names are cut, since a thousand names of megabytes would be no bound."""

OTHER = "other"

SECONDS_MAX = 1e12
"""The largest time that a single usage may claim. It keeps every sum of them finite."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What was recorded within one bucket of `BUCKET_S` seconds."""

    t: float
    """Wall time at the bucket's start, in seconds since 1970."""
    requests: int
    prompt_tokens: int
    hit_tokens: Mapping[TierName, int]


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """The ledger at one moment; later records don't change it."""

    taken_at: float
    """Wall time of the reading, in seconds since 1970."""
    totals: Usage
    by_model: Mapping[str, Usage]
    by_tenant: Mapping[str, Usage]
    history: tuple[HistoryPoint, ...]
    """Oldest first. A bucket in which nothing was recorded is left out."""


@dataclass(slots=True)
class _Bucket:
    index: int
    t: float
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[TierName, int] = field(default_factory=dict)

    def add(self, usage: Usage) -> None:
        self.requests += usage.requests
        self.prompt_tokens += usage.prompt.tokens
        for tier, hit in usage.hits.items():
            self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + hit.tokens


class Ledger:
    """Adds up usages; each record costs the same, however much was recorded before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals = Usage()
        self._by_model: dict[str, Usage] = {}
        self._by_tenant: dict[str, Usage] = {}
        self._buckets: deque[_Bucket] = deque()

    def record(self, info: NamespaceInfo, usage: Usage) -> None:
        """Adds `usage` to the totals, to its model and tenant, and to the current bucket.

        Raises InvalidRequest, and changes nothing, when the usage can't be true.
        """
        wrong = impossible(usage)
        if wrong is not None:
            raise InvalidRequest(f"usage can't be true: {wrong}")
        self._totals = self._totals + usage
        _add_by_name(self._by_model, info.model, usage)
        _add_by_name(self._by_tenant, info.tenant, usage)
        self._current_bucket().add(usage)

    def read(self) -> LedgerReading:
        """All sums and the last hour's history, as they are now."""
        oldest = self._index_now() - BUCKETS_MAX
        return LedgerReading(
            taken_at=self._clock.wall_s(),
            totals=self._totals,
            by_model=dict(self._by_model),
            by_tenant=dict(self._by_tenant),
            history=tuple(
                HistoryPoint(b.t, b.requests, b.prompt_tokens, dict(b.hit_tokens))
                for b in self._buckets
                if b.index > oldest
            ),
        )

    def _index_now(self) -> int:
        return math.floor(self._clock.monotonic_s() / BUCKET_S)

    def _current_bucket(self) -> _Bucket:
        # Buckets are cut by the monotonic clock, so a wall clock that steps back can neither
        # fill an old bucket again nor keep the history from moving on. The wall time is read
        # once, when a bucket opens, so that a bucket has the same `t` in every snapshot.
        index = self._index_now()
        if not self._buckets or self._buckets[-1].index != index:
            into_bucket_s = self._clock.monotonic_s() - index * BUCKET_S
            self._buckets.append(_Bucket(index, round(self._clock.wall_s() - into_bucket_s, 3)))
            # At most one bucket is added for each one dropped here, over time: O(1) a record.
            while self._buckets[0].index <= index - BUCKETS_MAX:
                self._buckets.popleft()
        return self._buckets[-1]


def _add_by_name(groups: dict[str, Usage], name: str, usage: Usage) -> None:
    if len(name) > NAME_CHARS_MAX:
        name = name[: NAME_CHARS_MAX - 1] + "…"
    if name not in groups and len(groups) >= NAMES_MAX:
        name = OTHER
    groups[name] = groups.get(name, Usage()) + usage


def impossible(usage: Usage) -> str | None:
    """Why `usage` can't be true, in words; None when it can.

    `prefill_saved_s` may be negative: that is a load which took longer than computing would
    have. Blocks and bytes of the misses are not compared with the prompt's, because the tail is
    counted in tokens and belongs to no whole block.
    """
    for name, number in _counters(usage):
        if number < 0:
            return f"{name} is negative ({number})"
    for name in ("prefill_saved_s", "load_s", "prefill_s", "total_s"):
        seconds: float = getattr(usage, name)
        if not math.isfinite(seconds):
            return f"{name} is not a number of seconds ({seconds})"
        if abs(seconds) > SECONDS_MAX:
            return f"{name} is too large ({seconds})"
        if seconds < 0 and name != "prefill_saved_s":
            return f"{name} is negative ({seconds})"
    hit, missed = usage.hit(), usage.missed()
    if hit.tokens + missed.tokens != usage.prompt.tokens:
        return (
            f"{hit.tokens} hit and {missed.tokens} missed tokens "
            f"are not the prompt's {usage.prompt.tokens}"
        )
    if hit.blocks > usage.prompt.blocks or hit.bytes > usage.prompt.bytes:
        return "more blocks or bytes were hit than the prompt has"
    return None


def _counters(usage: Usage) -> Iterator[tuple[str, int]]:
    yield "requests", usage.requests
    yield "output_tokens", usage.output_tokens
    counts: dict[str, BlockCount] = {
        "prompt": usage.prompt,
        "stored": usage.stored,
        "already_present": usage.already_present,
    }
    counts |= {f"hits.{tier}": count for tier, count in usage.hits.items()}
    counts |= {f"misses.{reason}": count for reason, count in usage.misses.items()}
    counts |= {f"skipped.{reason}": count for reason, count in usage.skipped.items()}
    for name, count in counts.items():
        yield f"{name}.tokens", count.tokens
        yield f"{name}.blocks", count.blocks
        yield f"{name}.bytes", count.bytes
