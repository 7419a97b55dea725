"""The Redis tier: blocks shared by all hosts, in Redis or Valkey, alone, with TLS, or a Cluster.

Each block is one key, a hash of a header and a payload, with a time to live. Beside the blocks
there is one ledger, the same for all hosts, so that the byte cap is of what Redis holds and not
of what one server remembers storing:

    kvstore:1:b:<name>          the block: fields h (header), p (payload)
    kvstore:1:{ledger}:used     sorted set: name → time of last use
    kvstore:1:{ledger}:meta     hash: name → parent's name, payload bytes
    kvstore:1:{ledger}:bytes    sum of the payload bytes

A block's name is its namespace's fingerprint and its key: 64 bytes.

A block enters the ledger before it is written, so what a crash leaves between the two is counted
but absent. It leaves the ledger before it is deleted; if another host evicts it before its writer
has written it, or crashes between the two, it is present but uncounted. Its time to live heals
both. Whenever a prefix is used, each block's time of use is set a little above that of the
block after it, up to the root, and never back, so that the least recently used block is always a
leaf (D5); and so is the one that expires first.

Thread-safe. A breaker stops asking a Redis that fails, and asks again by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvstore import codec
from kvstore.breaker import Breaker
from kvstore.clock import Clock
from kvstore.errors import ConfigError
from kvstore.tiers.base import RemoteTier, check_batch
from kvstore.types import (
    KEY_BYTES,
    BlockKey,
    NamespaceInfo,
    Outcome,
    TierName,
    TierState,
    TierStatus,
)

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 3.0
BATCH_BYTES_MAX = 16 << 20
"""Payload bytes a pipeline carries: large enough to hide the round trip, small enough that a
deadline is noticed and that answers wait in memory for little."""

_BLOCK = b"kvstore:1:b:"
_LEDGER = ("kvstore:1:{ledger}:used", "kvstore:1:{ledger}:meta", "kvstore:1:{ledger}:bytes")

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

_NAME_BYTES = 2 * KEY_BYTES
_NO_NAME = b"\0" * _NAME_BYTES

Client = redis.Redis | redis.RedisCluster


def connect(url: str) -> Callable[[], Client]:
    """A way to make a client for a URL: redis://, rediss://, unix://, or redis+cluster://.

    A Cluster client asks for the topology when it is made, so making one is left to the tier,
    which tries again when the Cluster is down.

    Raises:
        ConfigError: the URL is not one of these.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        # One retry, for a pooled connection that the other side closed meanwhile.
        "retry": Retry(NoBackoff(), 1),
    }
    scheme = url.partition("://")[0]
    if scheme in ("redis+cluster", "rediss+cluster"):
        plain = url.replace("+cluster", "", 1)
        return lambda: redis.RedisCluster.from_url(plain, **options)
    if scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"redis_url {url!r}: use redis://host:port, rediss://… for TLS, unix:///path, "
            "redis+cluster://host:port or rediss+cluster://…"
        )
    try:
        client = redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"redis_url {url!r}: {error}") from error
    return lambda: client


class RedisTier(RemoteTier):
    """Blocks in Redis or Valkey."""

    name = TierName.REDIS

    def __init__(
        self,
        connect: Callable[[], Client],
        capacity_bytes: int,
        ttl_s: float,
        clock: Clock,
        on_evicted: Callable[[Sequence[BlockKey]], None] = lambda keys: None,
    ):
        """`on_evicted` hears, on the calling thread, of blocks that made room for others."""
        self.capacity_bytes = capacity_bytes
        self.ttl_s = ttl_s
        self._ttl_ms = int(ttl_s * 1000)
        self._clock = clock
        self.breaker = Breaker(clock)
        self._connect = connect
        self._client: Client | None = None
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(
            ("stored", "loaded", "evicted", "corrupt", "failed", "timed_out", "refused"), 0
        )
        self._used_bytes = 0
        self._blocks = 0

    # -- the contract

    def contains(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool]:
        return [bool(found) for found in self.find(namespace, keys) or [False] * len(keys)]

    def find(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool] | None:
        def ask(client: Client) -> list[bool]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(_BLOCK + _name(namespace, key))
            return [answer == 1 for answer in pipeline.execute()]

        answer = self._guarded(ask)
        return answer if not isinstance(answer, Outcome) else None

    def get(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        return [outcome for outcome, _ in self.get_summed(namespace, keys, into, timeout_s)]

    def get_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        timeout_s: float | None = None,
    ) -> list[tuple[Outcome, int]]:
        check_batch(namespace, keys, [buffer.nbytes for buffer in into])
        deadline_s = self._deadline_s(timeout_s)
        results: list[tuple[Outcome, int]] = []
        for batch in _batches(len(keys), namespace.block_bytes):
            if self._clock.monotonic_s() >= deadline_s:
                results.extend([(Outcome.TIMED_OUT, 0)] * len(batch))
                continue
            chosen = keys[batch.start : batch.stop]
            answers = self._guarded(
                partial(self._read, names=[_name(namespace, key) for key in chosen])
            )
            if isinstance(answers, Outcome):
                results.extend([(answers, 0)] * len(batch))
                continue
            buffers = into[batch.start : batch.stop]
            for key, buffer, answer in zip(chosen, buffers, answers, strict=True):
                results.append(self._accept(namespace, key, answer, buffer))
        outcomes = [outcome for outcome, _ in results]
        self._count(outcomes, ok="loaded")
        names: dict[Outcome, list[bytes]] = {outcome: [] for outcome in Outcome}
        for key, outcome in zip(keys, outcomes, strict=True):
            names[outcome].append(_name(namespace, key))
        if names[Outcome.OK]:
            entries = [(name, b"") for name in names[Outcome.OK]]
            self._guarded(partial(self._use, entries=entries))
        if names[Outcome.CORRUPT]:
            self._guarded(partial(self._delete, names=names[Outcome.CORRUPT]))
        return results

    def put(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        return self.put_summed(
            namespace, keys, blocks, [codec.checksum(block) for block in blocks], parent, timeout_s
        )

    def put_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        checksums: Sequence[int],
        parent: BlockKey | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        check_batch(namespace, keys, [block.nbytes for block in blocks])
        if namespace.block_bytes > self.capacity_bytes:
            outcomes = [Outcome.NO_SPACE] * len(keys)
            self._count(outcomes, ok="stored")
            return outcomes
        deadline_s = self._deadline_s(timeout_s)
        outcomes = []
        for batch in _batches(len(keys), namespace.block_bytes):
            if self._clock.monotonic_s() >= deadline_s:
                outcomes.extend([Outcome.TIMED_OUT] * len(batch))
                continue
            before = keys[batch.start - 1] if batch.start else parent
            chosen = [(keys[i], blocks[i], checksums[i]) for i in batch]
            answers = self._guarded(
                partial(self._write, namespace=namespace, parent=before, blocks=chosen)
            )
            outcomes.extend([answers] * len(batch) if isinstance(answers, Outcome) else answers)
        self._count(outcomes, ok="stored")
        return outcomes

    def evict(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        def drop(client: Client) -> int:
            names = [_name(namespace, key) for key in keys]
            chosen = set(names)
            parents: dict[bytes, bytes] = {}
            needed = set()
            for name, meta in client.hscan_iter(_LEDGER[1], count=1000):
                parent = meta[:_NAME_BYTES]
                if name in chosen:
                    parents[name] = parent
                else:
                    needed.add(parent)
            for name in reversed(names):
                if name in needed:
                    chosen.discard(name)
                    needed.add(parents.get(name, b""))
            return self._delete(client, list(chosen))

        dropped = self._guarded(drop)
        return dropped if isinstance(dropped, int) else 0

    def clear(self, namespace: NamespaceInfo | None = None) -> int:
        def drop(client: Client) -> int:
            scan = client.hscan_iter(_LEDGER[1], count=1000)
            doomed = [
                name
                for name, _ in scan
                if namespace is None or name.startswith(namespace.fingerprint)
            ]
            return sum(
                self._delete(client, doomed[start : start + 1000])
                for start in range(0, len(doomed), 1000)
            )

        dropped = self._guarded(drop)
        return dropped if isinstance(dropped, int) else 0

    def status(self) -> TierStatus:
        with self._lock:
            counters = {**self._counters, "breaker_opened": self.breaker.opened}
            return TierStatus(
                TierName.REDIS,
                TierState.DOWN if self.breaker.open else TierState.UP,
                self.capacity_bytes,
                self._used_bytes,
                self._blocks,
                counters,
            )

    def refresh(self) -> None:
        def ask(client: Client) -> None:
            pipeline = client.pipeline(transaction=False)
            pipeline.get(_LEDGER[2])
            pipeline.zcard(_LEDGER[0])
            used, blocks = pipeline.execute()
            self._note_ledger(int(used or 0), int(blocks))

        self._guarded(ask)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # -- single commands and scripts

    def _guarded(self, call: Callable[[Client], Any]) -> Any:
        """The call's result, or the Outcome that stands for its failure."""
        if not self.breaker.allow():
            return Outcome.FAILED
        try:
            if self._client is None:
                self._client = self._connect()
            result = call(self._client)
        except redis.TimeoutError:
            self.breaker.failed()
            return Outcome.TIMED_OUT
        except (redis.RedisError, RedisClusterException, OSError):
            self.breaker.failed()
            return Outcome.FAILED
        self.breaker.succeeded()
        return result

    def _read(self, client: Client, names: Sequence[bytes]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(_BLOCK + name, "h", "p")
        return list(pipeline.execute(raise_on_error=False))

    def _accept(
        self, namespace: NamespaceInfo, key: BlockKey, answer: Any, buffer: memoryview
    ) -> tuple[Outcome, int]:
        """Checks one answer of Redis, and only then copies it into the buffer."""
        if isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE"):
            return Outcome.CORRUPT, 0  # the key holds something that is not a block of ours
        if isinstance(answer, Exception):
            return Outcome.FAILED, 0
        header, payload = answer
        if header is None and payload is None:
            return Outcome.ABSENT, 0
        if header is None or payload is None:
            return Outcome.CORRUPT, 0
        digest = codec.verify(header, namespace, key, payload)
        if digest is None:
            return Outcome.CORRUPT, 0
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(payload, np.uint8))
        return Outcome.OK, digest

    def _write(
        self,
        client: Client,
        namespace: NamespaceInfo,
        parent: BlockKey | None,
        blocks: Sequence[tuple[BlockKey, memoryview, int]],
    ) -> list[Outcome]:
        entries = []
        before = _name(namespace, parent) if parent is not None else _NO_NAME
        for key, payload, _ in blocks:
            name = _name(namespace, key)
            entries.append((name, before + b"%d" % payload.nbytes))
            before = name
        names = [name for name, _ in entries]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(_BLOCK + name)
        present = {name for name, found in zip(names, pipeline.execute(), strict=True) if found}
        # A batch larger than the whole cap pushes out its own last blocks.
        victims = set(self._use(client, entries))
        pipeline = client.pipeline(transaction=False)
        written = [name for name in names if name not in present and name not in victims]
        for name, (key, payload, digest) in zip(names, blocks, strict=True):
            if name in present or name in victims:
                continue
            header = codec.encode_header(namespace, key, digest)
            pipeline.hset(_BLOCK + name, items=["h", header, "p", payload])
            pipeline.pexpire(_BLOCK + name, self._ttl_ms)
        answers = pipeline.execute(raise_on_error=False)[::2]
        refused = {
            name
            for name, answer in zip(written, answers, strict=True)
            if isinstance(answer, Exception)
        }
        if refused:  # Redis is out of memory below our cap, or the key is not a hash
            self._delete(client, list(refused))
        outcomes = []
        for name in names:
            if name in victims or name in refused:
                outcomes.append(Outcome.NO_SPACE)
            else:
                outcomes.append(Outcome.PRESENT if name in present else Outcome.OK)
        return outcomes

    def _use(self, client: Client, entries: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        """Enters blocks into the ledger or touches them; returns the names of those deleted."""
        arguments: list[Any] = [self.capacity_bytes, self.ttl_s]
        for entry in entries:
            arguments.extend(entry)
        used, blocks, victims, before = _run_script(client, _USE, arguments)
        self._note_ledger(int(used), int(blocks))
        with self._lock:
            self._counters["evicted"] += len(victims)
        pipeline = client.pipeline(transaction=False)
        for name in victims:
            pipeline.unlink(_BLOCK + name)
        for name in (*before, *(name for name, _ in entries)):
            pipeline.pexpire(_BLOCK + name, self._ttl_ms)
        pipeline.execute()
        if victims:
            self._on_evicted([BlockKey(name[KEY_BYTES:]) for name in victims])
        return list(victims)

    def _delete(self, client: Client, names: Sequence[bytes]) -> int:
        used, blocks = _run_script(client, _FORGET, list(names))
        self._note_ledger(int(used), int(blocks))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.unlink(_BLOCK + name)
        return sum(pipeline.execute())

    def _note_ledger(self, used_bytes: int, blocks: int) -> None:
        with self._lock:
            self._used_bytes = used_bytes
            self._blocks = blocks

    def _deadline_s(self, timeout_s: float | None) -> float:
        return float("inf") if timeout_s is None else self._clock.monotonic_s() + timeout_s

    def _count(self, outcomes: Iterable[Outcome], ok: str) -> None:
        names = {
            Outcome.OK: ok,
            Outcome.CORRUPT: "corrupt",
            Outcome.FAILED: "failed",
            Outcome.TIMED_OUT: "timed_out",
            Outcome.NO_SPACE: "refused",
        }
        with self._lock:
            for outcome in outcomes:
                if outcome in names:
                    self._counters[names[outcome]] += 1


def _name(namespace: NamespaceInfo, key: BlockKey) -> bytes:
    """What the block is called in Redis."""
    return namespace.fingerprint + key


def _run_script(client: Client, script: str, arguments: Sequence[Any]) -> list[Any]:
    return cast(list[Any], client.register_script(script)(keys=_LEDGER, args=arguments))


def _batches(count: int, block_bytes: int) -> Iterator[range]:
    size = max(1, BATCH_BYTES_MAX // block_bytes)
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
