"""The words of the system as types: keys, tiers, outcomes, and what an engine reports.

Values only, no behaviour beyond adding and checking. Imports nothing of kvstore but errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, TypeVar

K = TypeVar("K")

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 over parent key, token ids and extra ids: names a block and its whole prefix."""

Fingerprint = NewType("Fingerprint", bytes)
"""SHA-256 over everything that decides what KV bytes mean; names a namespace (D4)."""

KEY_BYTES = 32
"""Length of a `BlockKey` and of a `Fingerprint`."""


class TierName(StrEnum):
    """Where a block is, nearest first."""

    GPU = "gpu"
    CPU = "cpu"
    REDIS = "redis"


class MissReason(StrEnum):
    """Why prompt tokens had to be computed. One reason a token, so that they add up."""

    NEVER_SEEN = "never_seen"
    """No engine has stored the block, as far as this server remembers."""
    EVICTED = "evicted"
    """It was stored, and made room for others."""
    EXPIRED = "expired"
    """It was stored, and its time to live ran out."""
    CLEARED = "cleared"
    """It was stored, and an operator cleared it."""
    REFUSED = "refused"
    """Admission had decided not to store it."""
    NOT_WORTH_LOADING = "not_worth_loading"
    """It was there, and computing it was estimated to be faster than loading it."""
    BY_REQUEST = "by_request"
    """The caller asked not to load."""
    TOO_SLOW = "too_slow"
    """Loading it did not finish by its deadline."""
    CORRUPT = "corrupt"
    """What came back failed its checks."""
    OVERWRITTEN = "overwritten"
    """Its slot was reused while it was being read."""
    FAILED = "failed"
    """The engine could not copy it; its own log says why."""
    NO_SPACE = "no_space"
    """It could not be brought into the arena: every block that could make room is leased."""
    TIER_DOWN = "tier_down"
    """The tier that may hold it could not be asked."""
    SERVER_DOWN = "server_down"
    """The server could not be asked."""
    TAIL = "tail"
    """Never loadable: the last prompt token, and what follows the last full block."""


class SkipReason(StrEnum):
    """Why a block that could have been stored was not."""

    GAIN_TOO_SMALL = "gain_too_small"
    """The prefill that it could save is too little next to the request's whole time."""
    COSTS_MORE_THAN_IT_SAVES = "costs_more_than_it_saves"
    """Loading it again would take longer than computing it, in every tier; or the request would
    wait longer for the store than the store can be expected to save."""
    DISPLACES_MORE = "displaces_more"
    """The arena is full, and what would make room is as likely to be asked for again."""
    BY_REQUEST = "by_request"
    """The caller asked not to store."""
    QUEUE_FULL = "queue_full"
    """The background store queue was full; the request did not wait."""
    NO_SPACE = "no_space"
    """Every block that could make room is leased."""
    SERVER_DOWN = "server_down"
    """The server could not be reached."""
    FAILED = "failed"
    """The store was started and could not be finished."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a server knows that an engine's decisions need. The default is the optimistic one."""

    reuse: Sequence[float] = ()
    """For each block asked for after the present ones: how likely it is asked for again."""
    crowded: bool = False
    """The arena is full, and has better than what nobody asked for before: which has 0."""
    far_latency_s: float = 0.0
    far_bytes_per_s: float = 0.0
    """How fast the far tier is, as the server has measured it; 0 when it has not."""


class Outcome(StrEnum):
    """What a tier says of one block; a batch has one for each block, in order."""

    OK = "ok"
    """get: the bytes are in the buffer, checked. put: the tier holds the block now."""
    PRESENT = "present"
    """put only: the tier held the block already; nothing was written."""
    ABSENT = "absent"
    """get only: the tier does not hold it."""
    CORRUPT = "corrupt"
    """get only: the tier held something that failed its checks, and has dropped it."""
    NO_SPACE = "no_space"
    """put only: nothing could be evicted to make room."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """What a namespace is called in reports, and the size of its blocks."""

    fingerprint: Fingerprint
    block_bytes: int
    block_tokens: int
    model: str = "unknown"
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class BlockCount:
    """The same blocks counted three ways."""

    tokens: int = 0
    blocks: int = 0
    bytes: int = 0

    def __add__(self, other: BlockCount) -> BlockCount:
        return BlockCount(
            self.tokens + other.tokens, self.blocks + other.blocks, self.bytes + other.bytes
        )


def _merged(a: Mapping[K, BlockCount], b: Mapping[K, BlockCount]) -> dict[K, BlockCount]:
    merged = dict(a)
    for key, count in b.items():
        merged[key] = merged.get(key, BlockCount()) + count
    return merged


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine saw, as counters that add up: of one request, or of many.

    For every request, `prompt.tokens == Σ hits.tokens + Σ misses.tokens`. A request's stores
    end after its answer does, so they may come in a `Usage` of their own with `requests=0`.
    """

    requests: int = 0
    prompt: BlockCount = BlockCount()
    """Prompt tokens, the full blocks among them, and those blocks' bytes."""
    output_tokens: int = 0
    hits: Mapping[TierName, BlockCount] = field(default_factory=dict)
    misses: Mapping[MissReason, BlockCount] = field(default_factory=dict)
    stored: BlockCount = BlockCount()
    already_present: BlockCount = BlockCount()
    skipped: Mapping[SkipReason, BlockCount] = field(default_factory=dict)
    prefill_saved_s: float = 0.0
    """Estimated prefill seconds of the hit tokens, less the seconds that loading them took."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.requests + other.requests,
            self.prompt + other.prompt,
            self.output_tokens + other.output_tokens,
            _merged(self.hits, other.hits),
            _merged(self.misses, other.misses),
            self.stored + other.stored,
            self.already_present + other.already_present,
            _merged(self.skipped, other.skipped),
            self.prefill_saved_s + other.prefill_saved_s,
            self.load_s + other.load_s,
            self.prefill_s + other.prefill_s,
            self.total_s + other.total_s,
        )

    def hit(self) -> BlockCount:
        """Hits of all tiers together."""
        return sum(self.hits.values(), BlockCount())

    def missed(self) -> BlockCount:
        """Misses of all reasons together."""
        return sum(self.misses.values(), BlockCount())


@dataclass(frozen=True, slots=True)
class Decision:
    """What an engine decided about one request, with the numbers behind it."""

    prompt_tokens: int
    output_tokens: int
    found_tokens: int
    """Those that a tier had, and that could be loaded."""
    loaded_tokens: int
    load_reason: MissReason | None
    """Why not all that was found was loaded; None when all was."""
    load_expected_s: float
    """To load all that was found; `prefill_expected_s` to compute it."""
    prefill_expected_s: float
    load_s: float
    prefill_s: float
    total_s: float
    storable_tokens: int
    """Those whose KV was new to the store, in full blocks."""
    stored_tokens: int
    """Those that were to be stored."""
    skip_reason: SkipReason | None
    """Why not all that could be was to be stored; None when all was."""
    reuse: float
    """Probability that `gain_s` is had."""
    gain_s: float
    """Seconds that a request saves that finds those stored, or, where none are, all that could
    be: prefill less loading."""
    cost_s: float
    """Seconds that this request waited for the store."""
    crowded: bool
    """Whether the arena had better than what nobody had asked for before."""


class TierState(StrEnum):
    """Whether a tier takes part."""

    UP = "up"
    DOWN = "down"
    """It fails, and is asked again by itself, after a pause."""
    ABSENT = "absent"
    """Not configured."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier as it is now, for reports and metrics."""

    name: TierName
    state: TierState
    capacity_bytes: int
    used_bytes: int
    blocks: int
    counters: Mapping[str, int] = field(default_factory=dict)
    """What happened since the server started, by a name from `kvstore.metrics`."""
