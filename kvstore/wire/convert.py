"""Messages to types and back. Refuses what is malformed; decides nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import TypeVar

from kvstore.errors import InvalidRequest
from kvstore.types import (
    KEY_BYTES,
    BlockCount,
    BlockKey,
    Decision,
    Fingerprint,
    MissReason,
    Outlook,
    SkipReason,
    TierName,
    Usage,
)
from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire.limits import KEYS_MAX

E = TypeVar("E", bound=StrEnum)

TIER_TO_WIRE: dict[TierName, pb.Tier.ValueType] = {
    name: pb.Tier.Value(f"TIER_{name.name}") for name in TierName
}
TIER_FROM_WIRE: dict[int, TierName] = {value: name for name, value in TIER_TO_WIRE.items()}
MISS_TO_WIRE: dict[MissReason, pb.MissReason.ValueType] = {
    reason: pb.MissReason.Value(f"MISS_REASON_{reason.name}") for reason in MissReason
}
MISS_FROM_WIRE: dict[int, MissReason] = {value: reason for reason, value in MISS_TO_WIRE.items()}
SKIP_TO_WIRE: dict[SkipReason, pb.SkipReason.ValueType] = {
    reason: pb.SkipReason.Value(f"SKIP_REASON_{reason.name}") for reason in SkipReason
}
SKIP_FROM_WIRE: dict[int, SkipReason] = {value: reason for reason, value in SKIP_TO_WIRE.items()}


def split_keys(joined: bytes) -> list[BlockKey]:
    """The keys of a request.

    Raises:
        InvalidRequest: not a whole number of keys, none, or too many.
    """
    count, rest = divmod(len(joined), KEY_BYTES)
    if rest:
        raise InvalidRequest(
            f"keys: {len(joined)} bytes are not a whole number of {KEY_BYTES}-byte keys"
        )
    if not 0 < count <= KEYS_MAX:
        raise InvalidRequest(f"keys: {count} keys; a request has 1 to {KEYS_MAX}")
    # One call for all keys: slicing them out one by one takes ten times as long.
    return list(struct.unpack(f"{KEY_BYTES}s" * count, joined))


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as a request carries them.

    Raises:
        InvalidRequest: a key has another length, or there are too many.
    """
    joined = b"".join(keys)
    if keys and {*map(len, keys)} != {KEY_BYTES}:
        raise InvalidRequest(f"every key has {KEY_BYTES} bytes")
    if len(keys) > KEYS_MAX:
        raise InvalidRequest(f"{len(keys)} keys; a request has 1 to {KEYS_MAX}")
    return joined


def to_fingerprint(raw: bytes) -> Fingerprint:
    """A namespace's fingerprint. Raises InvalidRequest when its length is wrong."""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(f"namespace: {len(raw)} bytes; a fingerprint has {KEY_BYTES}")
    return Fingerprint(raw)


def to_parent(raw: bytes) -> BlockKey | None:
    """The key before the first one; empty bytes mean that there is none."""
    if raw and len(raw) != KEY_BYTES:
        raise InvalidRequest(f"parent: {len(raw)} bytes; a key has {KEY_BYTES}, or is left out")
    return BlockKey(raw) if raw else None


def miss_to_wire(reason: MissReason | None) -> pb.MissReason.ValueType:
    """Why a block is absent; None stands for that none is."""
    return MISS_TO_WIRE[reason] if reason is not None else pb.MISS_REASON_UNSPECIFIED


def count_to_wire(count: BlockCount) -> pb.BlockCount:
    """A count as a message."""
    return pb.BlockCount(tokens=count.tokens, blocks=count.blocks, bytes=count.bytes)


def count_from_wire(count: pb.BlockCount) -> BlockCount:
    """A message as a count."""
    return BlockCount(count.tokens, count.blocks, count.bytes)


def usage_to_wire(usage: Usage) -> pb.Usage:
    """Usage as a message."""
    return pb.Usage(
        requests=usage.requests,
        prompt=count_to_wire(usage.prompt),
        output_tokens=usage.output_tokens,
        hits=[
            pb.Usage.Hits(tier=TIER_TO_WIRE[tier], count=count_to_wire(count))
            for tier, count in usage.hits.items()
        ],
        misses=[
            pb.Usage.Misses(reason=MISS_TO_WIRE[reason], count=count_to_wire(count))
            for reason, count in usage.misses.items()
        ],
        stored=count_to_wire(usage.stored),
        already_present=count_to_wire(usage.already_present),
        skipped=[
            pb.Usage.Skips(reason=SKIP_TO_WIRE[reason], count=count_to_wire(count))
            for reason, count in usage.skipped.items()
        ],
        prefill_saved_s=usage.prefill_saved_s,
        load_s=usage.load_s,
        prefill_s=usage.prefill_s,
        total_s=usage.total_s,
    )


def usage_from_wire(usage: pb.Usage) -> Usage:
    """A message as usage.

    Raises:
        InvalidRequest: a tier or reason of this version is unknown, or given twice.
    """
    seconds = (usage.prefill_saved_s, usage.load_s, usage.prefill_s, usage.total_s)
    if not all(math.isfinite(value) for value in seconds):
        raise InvalidRequest("usage: seconds must be finite numbers")
    return Usage(
        usage.requests,
        count_from_wire(usage.prompt),
        usage.output_tokens,
        _counts(TIER_FROM_WIRE, [(entry.tier, entry.count) for entry in usage.hits]),
        _counts(MISS_FROM_WIRE, [(entry.reason, entry.count) for entry in usage.misses]),
        count_from_wire(usage.stored),
        count_from_wire(usage.already_present),
        _counts(SKIP_FROM_WIRE, [(entry.reason, entry.count) for entry in usage.skipped]),
        *seconds,
    )


def outlook_to_wire(outlook: Outlook) -> pb.Outlook:
    """An outlook as a message."""
    return pb.Outlook(
        reuse=bytes(round(255 * chance) for chance in outlook.reuse),
        crowded=outlook.crowded,
        redis_latency_s=outlook.far_latency_s,
        redis_bytes_per_s=outlook.far_bytes_per_s,
    )


def outlook_from_wire(outlook: pb.Outlook) -> Outlook:
    """A message as an outlook."""
    return Outlook(
        [chance / 255 for chance in outlook.reuse],
        outlook.crowded,
        outlook.redis_latency_s,
        outlook.redis_bytes_per_s,
    )


_DECISION_NUMBERS = tuple(
    field.name for field in fields(Decision) if not field.name.endswith("reason")
)


def decision_to_wire(decision: Decision) -> pb.Decision:
    """A decision as a message."""
    message = pb.Decision(**{name: getattr(decision, name) for name in _DECISION_NUMBERS})
    if decision.load_reason is not None:
        message.load_reason = MISS_TO_WIRE[decision.load_reason]
    if decision.skip_reason is not None:
        message.skip_reason = SKIP_TO_WIRE[decision.skip_reason]
    return message


def decision_from_wire(message: pb.Decision) -> Decision:
    """A message as a decision. Raises InvalidRequest for impossible numbers or reasons."""
    numbers = {name: getattr(message, name) for name in _DECISION_NUMBERS}
    if not all(math.isfinite(value) for value in numbers.values()):
        raise InvalidRequest("decision: all numbers must be finite")
    if message.load_reason and message.load_reason not in MISS_FROM_WIRE:
        raise InvalidRequest(f"decision: miss reason {message.load_reason} is unknown")
    if message.skip_reason and message.skip_reason not in SKIP_FROM_WIRE:
        raise InvalidRequest(f"decision: skip reason {message.skip_reason} is unknown")
    return Decision(
        **numbers,
        load_reason=MISS_FROM_WIRE.get(message.load_reason),
        skip_reason=SKIP_FROM_WIRE.get(message.skip_reason),
    )


def _counts(
    names: Mapping[int, E], entries: Sequence[tuple[int, pb.BlockCount]]
) -> dict[E, BlockCount]:
    counts: dict[E, BlockCount] = {}
    for number, count in entries:
        if number not in names or names[number] in counts:
            raise InvalidRequest(f"usage: tier or reason {number} is unknown, or given twice")
        counts[names[number]] = count_from_wire(count)
    return counts
