"""The Redis tier: blocks shared by all hosts, in Redis or Valkey, alone, with TLS, or a Cluster.

Each block is one key, a string of a header and a payload, with a time to live:

    kvstore:2:b:<name>          the block: 128 bytes with its header, then the payload

A block's name is its namespace's fingerprint and its key: 64 bytes. Beside the blocks there is
one ledger, the same for all hosts (`redis_ledger.py`). Blocks travel on sockets that are
borrowed from redis-py (`redis_payloads.py`), everything else through redis-py.

A block enters the ledger before it is written, so what a crash leaves between the two is counted
but absent. It leaves the ledger before it is deleted; if another host evicts it before its writer
has written it, or crashes between the two, it is present but uncounted. Its time to live heals
both.

Thread-safe. A breaker stops asking a Redis that fails, and asks again by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvstore import codec
from kvstore.breaker import Breaker
from kvstore.clock import Clock
from kvstore.errors import ConfigError
from kvstore.tiers import redis_ledger as ledger
from kvstore.tiers import redis_payloads as payloads
from kvstore.tiers.base import RemoteTier, check_batch
from kvstore.tiers.redis_payloads import Client
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

_BLOCK = b"kvstore:2:b:"


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
        # With RESP2 nothing comes that was not asked for.
        "protocol": 2,
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
        self._totals = ledger.Totals(0, 0)

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
            buffers = into[batch.start : batch.stop]
            names = [_name(namespace, key) for key in chosen]
            answers = self._guarded(partial(self._read, names=names, into=buffers))
            if isinstance(answers, Outcome):
                results.extend([(answers, 0)] * len(batch))
                continue
            for key, buffer, answer in zip(chosen, buffers, answers, strict=True):
                results.append(self._accept(namespace, key, answer, buffer))
        outcomes = [outcome for outcome, _ in results]
        self._count(outcomes, ok="loaded")
        named: dict[Outcome, list[bytes]] = {outcome: [] for outcome in Outcome}
        for key, outcome in zip(keys, outcomes, strict=True):
            named[outcome].append(_name(namespace, key))
        if named[Outcome.OK]:
            entries = [(name, b"") for name in named[Outcome.OK]]
            self._guarded(partial(self._use, entries=entries))
        if named[Outcome.CORRUPT]:
            self._guarded(partial(self._delete, names=named[Outcome.CORRUPT]))
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
            for name, parent in ledger.parents(client):
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
            doomed = [
                name
                for name, _ in ledger.parents(client)
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
                *self._totals,
                counters,
            )

    def refresh(self) -> None:
        def ask(client: Client) -> None:
            self._note_ledger(ledger.totals(client))

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

    def _read(
        self, client: Client, names: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[Any]:
        keys = [_BLOCK + name for name in names]
        answers: list[Any] = list(payloads.read(client, keys, into))
        again = [index for index, answer in enumerate(answers) if answer is payloads.ELSEWHERE]
        if not again:
            return answers
        pipeline = client.pipeline(transaction=False)
        for index in again:
            pipeline.get(keys[index])
        found = pipeline.execute(raise_on_error=False)
        for index, answer in zip(again, found, strict=True):
            answers[index] = (
                answer if isinstance(answer, Exception) else _placed(answer, into[index])
            )
        return answers

    def _accept(
        self, namespace: NamespaceInfo, key: BlockKey, answer: Any, buffer: memoryview
    ) -> tuple[Outcome, int]:
        """Checks what Redis answered, and the payload that is in the buffer."""
        if isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE"):
            return Outcome.CORRUPT, 0  # the key holds something that is not a block of ours
        if isinstance(answer, Exception):
            return Outcome.FAILED, 0
        if answer.header is None and answer.payload_bytes is None:
            return Outcome.ABSENT, 0
        if answer.header is None or answer.payload_bytes != namespace.block_bytes:
            return Outcome.CORRUPT, 0
        digest = codec.verify(answer.header, namespace, key, buffer)
        return (Outcome.OK, digest) if digest is not None else (Outcome.CORRUPT, 0)

    def _write(
        self,
        client: Client,
        namespace: NamespaceInfo,
        parent: BlockKey | None,
        blocks: Sequence[tuple[BlockKey, memoryview, int]],
    ) -> list[Outcome]:
        entries = []
        before = _name(namespace, parent) if parent is not None else ledger.NO_NAME
        for key, payload, _ in blocks:
            name = _name(namespace, key)
            entries.append((name, ledger.meta(before, payload.nbytes)))
            before = name
        names = [name for name, _ in entries]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(_BLOCK + name)
        present = {name for name, found in zip(names, pipeline.execute(), strict=True) if found}
        # A batch larger than the whole cap pushes out its own last blocks.
        victims = set(self._use(client, entries))
        written = {
            name: (codec.encode_header(namespace, key, digest), payload)
            for name, (key, payload, digest) in zip(names, blocks, strict=True)
            if name not in present and name not in victims
        }
        refused = self._send(client, written)
        if refused:  # Redis is out of memory below our cap
            self._delete(client, list(refused))
        outcomes = []
        for name in names:
            if name in victims or name in refused:
                outcomes.append(Outcome.NO_SPACE)
            else:
                outcomes.append(Outcome.PRESENT if name in present else Outcome.OK)
        return outcomes

    def _send(self, client: Client, blocks: Mapping[bytes, tuple[bytes, memoryview]]) -> set[bytes]:
        """Writes blocks, by name, each a header and a payload; the names that Redis refused."""
        keys = [_BLOCK + name for name in blocks]
        answers: list[Any] = list(payloads.write(client, keys, list(blocks.values()), self._ttl_ms))
        again = [index for index, answer in enumerate(answers) if answer is payloads.ELSEWHERE]
        if again:
            pipeline = client.pipeline(transaction=False)
            for index in again:
                header, payload = list(blocks.values())[index]
                value = b"".join((payloads.frame(header), payload))
                pipeline.set(keys[index], value, px=self._ttl_ms)
            found = pipeline.execute(raise_on_error=False)
            for index, answer in zip(again, found, strict=True):
                answers[index] = answer
        return {
            name
            for name, answer in zip(blocks, answers, strict=True)
            if isinstance(answer, Exception)
        }

    def _use(self, client: Client, entries: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        """Enters blocks into the ledger or touches them; returns the names of those deleted."""
        used = ledger.use(client, self.capacity_bytes, self.ttl_s, entries)
        self._note_ledger(used.totals)
        with self._lock:
            self._counters["evicted"] += len(used.victims)
        pipeline = client.pipeline(transaction=False)
        for name in used.victims:
            pipeline.unlink(_BLOCK + name)
        for name in (*used.before, *(name for name, _ in entries)):
            pipeline.pexpire(_BLOCK + name, self._ttl_ms)
        pipeline.execute()
        if used.victims:
            self._on_evicted([BlockKey(name[KEY_BYTES:]) for name in used.victims])
        return used.victims

    def _delete(self, client: Client, names: Sequence[bytes]) -> int:
        self._note_ledger(ledger.forget(client, names))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.unlink(_BLOCK + name)
        return sum(pipeline.execute())

    def _note_ledger(self, totals: ledger.Totals) -> None:
        with self._lock:
            self._totals = totals

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


def _placed(value: bytes | None, buffer: memoryview) -> payloads.Fields:
    """redis-py's answer, with its payload copied to the buffer if it has its size."""
    if value is None:
        return payloads.Fields(None, None)
    fields = payloads.fields_of(value, len(value))
    if fields.payload_bytes == buffer.nbytes:
        buffer[:] = memoryview(value)[payloads.FRAME_BYTES :]
    return fields


def _batches(count: int, block_bytes: int) -> Iterator[range]:
    size = max(1, BATCH_BYTES_MAX // block_bytes)
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
