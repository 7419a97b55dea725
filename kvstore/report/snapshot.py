"""The report as a JSON document, version 1: what `kvstore report --json` prints.

The classes below are the document's keys. Tokens, blocks and bytes are counts; names that end in
`_s` are seconds; times are wall seconds since 1970. A rate is null when there is nothing to
divide by, never 0. Maps by tier or reason have only the keys that were ever counted.

Decides the layout and nothing else; the words and plots are in `text` and `page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from kvstore.report.ledger import HistoryPoint, Ledger
from kvstore.types import BlockCount, NamespaceInfo, TierStatus, Usage

VERSION = 1

# What the server hands in.


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who reports."""

    version: str
    epoch: int
    """Changes when the server restarts."""
    started_at: float
    """Wall time of the start."""
    uptime_s: float
    """By the monotonic clock, so that it is right even if the wall clock was set since."""
    targets: Sequence[str]
    """Addresses that the server listens on, as clients write them."""
    clients: int
    """Sessions that are attached now."""


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """One namespace as it is now."""

    info: NamespaceInfo
    blocks: int
    """Its readable blocks in the arena."""
    bytes: int


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """What the server's control plane is busy with."""

    leases: int = 0
    reserved_slots: int = 0
    quarantined_slots: int = 0
    write_through_queue: int = 0
    rpc: Mapping[str, int] = field(default_factory=dict)


# What the document holds.


class Count(TypedDict):
    """The same blocks counted three ways."""

    tokens: int
    """Tokens."""
    blocks: int
    """Full blocks."""
    bytes: int
    """Bytes of KV in those blocks."""


class Group(TypedDict):
    """Sums over requests: all of them, one model's, or one tenant's."""

    requests: int
    """Requests that engines have reported."""
    prompt: Count
    """Their prompts; the tokens are those of hits and misses together."""
    output_tokens: int
    """Tokens that they generated."""
    hits: dict[str, Count]
    """Prompt tokens that were reused, by tier: "gpu", "cpu", "redis"."""
    misses: dict[str, Count]
    """Prompt tokens that were computed, by reason: see `kvstore.types.MissReason`."""
    stored: Count
    """Blocks written."""
    already_present: Count
    """Blocks offered that the store held already."""
    skipped: dict[str, Count]
    """Blocks not stored, by reason: see `kvstore.types.SkipReason`."""
    prefill_saved_s: float
    """Estimated prefill seconds of the hits, less what loading took; negative when loading was
    the slower way."""
    load_s: float
    """Seconds spent loading."""
    prefill_s: float
    """Seconds spent in prefill."""
    total_s: float
    """Seconds of whole requests."""
    token_hit_rate: float | None
    """Hit tokens of prompt tokens, 0 to 1; null when there were none."""
    block_hit_rate: float | None
    """Hit blocks of the prompts' full blocks, 0 to 1; null when there were none."""
    byte_hit_rate: float | None
    """Hit bytes of the prompts' full blocks' bytes, 0 to 1; null when there were none."""


class Server(TypedDict):
    """Who reports."""

    version: str
    """Version of the server."""
    epoch: str
    """16 hexadecimal digits that change when the server restarts, and the sums with it."""
    started_at: float
    """Wall time of the start."""
    uptime_s: float
    """Seconds since the start, by the monotonic clock."""
    targets: list[str]
    """Addresses that it listens on."""
    clients: int
    """Sessions attached now."""


class Tier(TypedDict):
    """One tier as it is now."""

    name: str
    """gpu, cpu or redis."""
    state: str
    """up, down (configured, and doesn't answer) or absent (not configured)."""
    capacity_bytes: int
    """What it may hold; 0 when that isn't known or has no limit."""
    used_bytes: int
    """What it holds."""
    blocks: int
    """Readable blocks in it; 0 for the engines' own pools, which report bytes alone."""
    counters: dict[str, int]
    """What the tier counts since the start, by the tier's own names."""


class Namespace(TypedDict):
    """One namespace as it is now."""

    fingerprint: str
    """64 hexadecimal digits; everything that decides what its KV bytes mean."""
    model: str
    """Name of the model, as the first client gave it."""
    tenant: str
    """Name of the tenant."""
    block_tokens: int
    """Tokens in a block."""
    block_bytes: int
    """Bytes of a block."""
    blocks: int
    """Its readable blocks in the arena."""
    bytes: int
    """Bytes of those."""


class Control(TypedDict):
    """What the control plane is busy with."""

    leases: int
    """Leases held now."""
    reserved_slots: int
    """Slots reserved for stores that aren't committed yet."""
    quarantined_slots: int
    """Slots kept out of use because a client may still be writing to them."""
    write_through_queue: int
    """Blocks waiting to be copied to a lower tier."""
    rpc: dict[str, int]
    """Calls since the start, by method."""


class History(TypedDict):
    """What was recorded within 10 seconds; buckets with nothing in them are left out."""

    t: float
    """Wall time at the bucket's start."""
    requests: int
    """Requests recorded in it."""
    prompt_tokens: int
    """Their prompt tokens."""
    hit_tokens: dict[str, int]
    """Their reused tokens, by tier."""


class Snapshot(TypedDict):
    """The whole document."""

    version: int
    """Of this layout: 1."""
    taken_at: float
    """Wall time of the snapshot."""
    server: Server
    """Who reports."""
    totals: Group
    """All requests since the start."""
    by_model: dict[str, Group]
    """The same by model; beyond 1,000 models, the rest is "other"."""
    by_tenant: dict[str, Group]
    """The same by tenant; beyond 1,000 tenants, the rest is "other"."""
    tiers: list[Tier]
    """Nearest first."""
    namespaces: list[Namespace]
    """In the order given."""
    control: Control
    """What the control plane is busy with."""
    history: list[History]
    """The last hour, oldest first."""


def snapshot(
    ledger: Ledger,
    server: ServerInfo,
    tiers: Sequence[TierStatus],
    namespaces: Sequence[NamespaceStatus],
    control: ControlStatus,
) -> Snapshot:
    """The document, of plain dicts, lists, strings and finite numbers: `json.dumps` takes it.

    Changes nothing and shares nothing with its arguments. Time is the ledger's clock's.
    """
    reading = ledger.read()
    return {
        "version": VERSION,
        "taken_at": reading.taken_at,
        "server": {
            "version": server.version,
            "epoch": f"{server.epoch:016x}",
            "started_at": server.started_at,
            "uptime_s": server.uptime_s,
            "targets": list(server.targets),
            "clients": server.clients,
        },
        "totals": _group(reading.totals),
        "by_model": {name: _group(usage) for name, usage in sorted(reading.by_model.items())},
        "by_tenant": {name: _group(usage) for name, usage in sorted(reading.by_tenant.items())},
        "tiers": [_tier(tier) for tier in tiers],
        "namespaces": [_namespace(namespace) for namespace in namespaces],
        "control": {
            "leases": control.leases,
            "reserved_slots": control.reserved_slots,
            "quarantined_slots": control.quarantined_slots,
            "write_through_queue": control.write_through_queue,
            "rpc": dict(sorted(control.rpc.items())),
        },
        "history": [_history(point) for point in reading.history],
    }


def _count(count: BlockCount) -> Count:
    return {"tokens": count.tokens, "blocks": count.blocks, "bytes": count.bytes}


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _group(usage: Usage) -> Group:
    hit = usage.hit()
    return {
        "requests": usage.requests,
        "prompt": _count(usage.prompt),
        "output_tokens": usage.output_tokens,
        "hits": {str(tier): _count(count) for tier, count in usage.hits.items()},
        "misses": {str(reason): _count(count) for reason, count in usage.misses.items()},
        "stored": _count(usage.stored),
        "already_present": _count(usage.already_present),
        "skipped": {str(reason): _count(count) for reason, count in usage.skipped.items()},
        "prefill_saved_s": usage.prefill_saved_s,
        "load_s": usage.load_s,
        "prefill_s": usage.prefill_s,
        "total_s": usage.total_s,
        "token_hit_rate": _rate(hit.tokens, usage.prompt.tokens),
        "block_hit_rate": _rate(hit.blocks, usage.prompt.blocks),
        "byte_hit_rate": _rate(hit.bytes, usage.prompt.bytes),
    }


def _tier(tier: TierStatus) -> Tier:
    return {
        "name": str(tier.name),
        "state": str(tier.state),
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "blocks": tier.blocks,
        "counters": dict(tier.counters),
    }


def _namespace(namespace: NamespaceStatus) -> Namespace:
    info = namespace.info
    return {
        "fingerprint": info.fingerprint.hex(),
        "model": info.model,
        "tenant": info.tenant,
        "block_tokens": info.block_tokens,
        "block_bytes": info.block_bytes,
        "blocks": namespace.blocks,
        "bytes": namespace.bytes,
    }


def _history(point: HistoryPoint) -> History:
    return {
        "t": point.t,
        "requests": point.requests,
        "prompt_tokens": point.prompt_tokens,
        "hit_tokens": {str(tier): tokens for tier, tokens in point.hit_tokens.items()},
    }
