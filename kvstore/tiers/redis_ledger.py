"""The ledger of what Redis holds: last use, parent and size of each block, and their sum.

One for all hosts, so that the byte cap is of what Redis holds and not of what one server
remembers storing:

    kvstore:2:{ledger}:used     sorted set: name → time of last use
    kvstore:2:{ledger}:meta     hash: name → parent's name, payload bytes
    kvstore:2:{ledger}:bytes    sum of the payload bytes

Whenever a prefix is used, each block's time of use is set a little above that of the block after
it, up to the root, and never back, so that the least recently used block is always a leaf (D5).
Scripts, so that each change is whole. Knows nothing of the blocks themselves: whoever takes one
out of the ledger deletes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from kvstore.tiers.redis_payloads import Client
from kvstore.types import KEY_BYTES

NAME_BYTES = 2 * KEY_BYTES
"""A block's name: its namespace's fingerprint, and its key."""

NO_NAME = b"\0" * NAME_BYTES
"""The parent of a prefix's first block."""

_LEDGER = ("kvstore:2:{ledger}:used", "kvstore:2:{ledger}:meta", "kvstore:2:{ledger}:bytes")

_USE = """
-- Enters blocks into the ledger or notes their use, then makes room.
-- ARGV: cap in bytes, time to live in seconds, then for each block of a prefix, parent before
-- child, its name and its meta ('' to note a use of what the ledger knows).
-- Returns the bytes and the blocks in the ledger, the names of blocks that must be deleted, and
-- those of the blocks before the first one, which were used too.
local used, meta, bytes = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local cap, ttl = tonumber(ARGV[1]), tonumber(ARGV[2])
local step = 0.000001
local score = now
local total = tonumber(redis.call('GET', bytes) or '0')
for i = #ARGV - 1, 3, -2 do
  local key, info = ARGV[i], ARGV[i + 1]
  if info ~= '' and redis.call('HSETNX', meta, key, info) == 1 then
    total = total + tonumber(string.sub(info, 65))
  end
  if redis.call('HEXISTS', meta, key) == 1 then
    -- Never back: it may be followed by others than these, and the clock may have been set back.
    score = math.max(score, tonumber(redis.call('ZSCORE', used, key) or '0'))
    redis.call('ZADD', used, score, key)
    score = score + step
  end
end
local before = {}
local info = redis.call('HGET', meta, ARGV[3])
for _ = 1, 65536 do
  if not info then break end
  local parent = string.sub(info, 1, 64)
  local known = redis.call('ZSCORE', used, parent)
  if not known or tonumber(known) >= score then break end
  redis.call('ZADD', used, score, parent)
  score = score + step
  before[#before + 1] = parent
  info = redis.call('HGET', meta, parent)
end
local function forget(key)
  local info = redis.call('HGET', meta, key)
  if info then total = total - tonumber(string.sub(info, 65)) end
  redis.call('HDEL', meta, key)
end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', now - ttl, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', used, key)
  forget(key)
end
local victims = {}
while total > cap and #victims < #ARGV + 4096 do
  local popped = redis.call('ZPOPMIN', used)
  if #popped == 0 then break end
  forget(popped[1])
  victims[#victims + 1] = popped[1]
end
redis.call('SET', bytes, string.format('%.0f', math.max(total, 0)))
return {string.format('%.0f', total), redis.call('ZCARD', used), victims, before}
"""

_FORGET = """
-- Takes blocks out of the ledger. ARGV: their names. Returns bytes and blocks left.
local used, meta, bytes = KEYS[1], KEYS[2], KEYS[3]
local total = tonumber(redis.call('GET', bytes) or '0')
for _, key in ipairs(ARGV) do
  local info = redis.call('HGET', meta, key)
  if info then
    total = total - tonumber(string.sub(info, 65))
    redis.call('HDEL', meta, key)
  end
  redis.call('ZREM', used, key)
end
redis.call('SET', bytes, string.format('%.0f', math.max(total, 0)))
return {string.format('%.0f', total), redis.call('ZCARD', used)}
"""


class Totals(NamedTuple):
    """How much the ledger has."""

    used_bytes: int
    blocks: int


class Used(NamedTuple):
    """What became of the ledger by a use of blocks."""

    totals: Totals
    victims: list[bytes]
    """Names that made room: to be deleted."""
    before: list[bytes]
    """Names of the blocks before the first one, which were used too."""


def use(
    client: Client, capacity_bytes: int, ttl_s: float, entries: Sequence[tuple[bytes, bytes]]
) -> Used:
    """Enters blocks of a prefix, in order, or notes their use, and makes room.

    An entry is a name and what `meta` made, or nothing to note a use of what is known.
    """
    arguments: list[Any] = [capacity_bytes, ttl_s]
    for entry in entries:
        arguments.extend(entry)
    used, blocks, victims, before = _run(client, _USE, arguments)
    return Used(Totals(int(used), int(blocks)), list(victims), list(before))


def meta(parent: bytes, payload_bytes: int) -> bytes:
    """What the ledger knows of a block besides its last use."""
    return parent + b"%d" % payload_bytes


def forget(client: Client, names: Sequence[bytes]) -> Totals:
    """Takes blocks out."""
    used, blocks = _run(client, _FORGET, list(names))
    return Totals(int(used), int(blocks))


def parents(client: Client) -> Iterator[tuple[bytes, bytes]]:
    """Every block's name and its parent's."""
    for name, info in client.hscan_iter(_LEDGER[1], count=1000):
        yield name, info[:NAME_BYTES]


def totals(client: Client) -> Totals:
    """How much the ledger has now."""
    pipeline = client.pipeline(transaction=False)
    pipeline.get(_LEDGER[2])
    pipeline.zcard(_LEDGER[0])
    used, blocks = pipeline.execute()
    return Totals(int(used or 0), int(blocks))


def _run(client: Client, script: str, arguments: Sequence[Any]) -> list[Any]:
    return cast(list[Any], client.register_script(script)(keys=_LEDGER, args=arguments))
