"""Watchers hear of what was stored, evicted and cleared, in the namespace that they asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import kvstore
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import BlockKey
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import Raw, chain, info_of, load, raw, store

STORED, EVICTED = pb.WatchResponse.KIND_STORED, pb.WatchResponse.KIND_EVICTED


class Watcher:
    """Reads events on a thread."""

    def __init__(self, client: Raw, namespace: bytes = b""):
        self._call = client.stub.Watch(pb.WatchRequest(namespace=namespace))
        self._events: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._call:
                for start in range(0, len(event.keys), 32):
                    key = BlockKey(event.keys[start : start + 32])
                    self._events.put((event.kind, event.namespace, key))
        except grpc.RpcError as error:
            self._events.put(error)

    def next(self, count: int) -> list[Any]:
        return [self._events.get(timeout=20.0) for _ in range(count)]

    def empty(self) -> bool:
        return self._events.empty()

    def close(self) -> None:
        self._call.cancel()
        self._thread.join()


@pytest.fixture
def watching(server: ServerProcess, other: Store, name: str) -> Iterator[dict[str, Watcher]]:
    """A watcher of all namespaces, and one of the test's own."""
    other.clear()
    with raw(server.target) as client:
        made = {"all": Watcher(client), "own": Watcher(client, info_of(name).fingerprint)}
        # An event of each proves that it watches.
        number = 0
        for watcher in made.values():
            while watcher.empty():
                number += 1
                store(other.open(info_of(name)), chain(f"{name} warm-up {number}", 1))
                threading.Event().wait(0.02)
        last = chain(f"{name} last warm-up", 1)
        store(other.open(info_of(name)), last)
        for watcher in made.values():
            while watcher.next(1)[0][2] != last[0]:
                pass
        yield made
        for watcher in made.values():
            watcher.close()


def test_a_watcher_hears_of_stores_and_evictions_in_order(
    watching: dict[str, Watcher], other: Store, name: str
) -> None:
    info = info_of(name)
    namespace = other.open(info)
    keys = chain(name, 60)
    store(namespace, keys)
    expected = [(STORED, info.fingerprint, key) for key in keys]
    assert watching["own"].next(60) == expected
    for number in range(4):
        store(namespace, chain(f"{name} {number}", 60))
    evicted, stored = [], 0
    while len(evicted) < 60:
        kind, fingerprint, key = watching["own"].next(1)[0]
        assert fingerprint == info.fingerprint
        stored += kind == STORED
        if kind == EVICTED and key in keys:
            evicted.append(key)
    assert evicted == keys[::-1]  # tails first
    assert stored > 0


def test_a_watcher_of_a_namespace_hears_of_no_other(
    watching: dict[str, Watcher], other: Store, name: str
) -> None:
    mine, foreign = info_of(name), info_of(name + " of another")
    store(other.open(foreign), chain("foreign", 3))
    store(other.open(mine), chain("mine", 2))
    assert {event[1] for event in watching["own"].next(2)} == {mine.fingerprint}
    assert watching["own"].empty()
    seen = {event[1] for event in watching["all"].next(5)}
    assert seen == {mine.fingerprint, foreign.fingerprint}


def test_a_watcher_hears_of_cleared_blocks(
    watching: dict[str, Watcher], other: Store, name: str
) -> None:
    info = info_of(name)
    keys = chain(name, 4)
    other.clear(info)
    store(other.open(info), keys)
    while watching["own"].next(1)[0] != (STORED, info.fingerprint, keys[-1]):
        pass
    other.clear(info)
    gone = watching["own"].next(4)
    assert {event[0] for event in gone} == {EVICTED}
    assert {event[2] for event in gone} == set(keys)


def test_a_promotion_from_redis_is_a_store_in_the_arena(
    redis_server: ServerProcess, name: str
) -> None:
    info, keys = info_of(name), chain(name, 3)
    with kvstore.connect(redis_server.target) as client, raw(redis_server.target) as watching:
        namespace = client.open(info)
        store(namespace, keys)
        client.clear(arena_only=True)
        watcher = Watcher(watching, info.fingerprint)
        try:
            while watcher.empty():  # until it watches for sure
                load(namespace, keys)
                client.clear(arena_only=True)
                threading.Event().wait(0.02)
            kinds = {event[0] for event in watcher.next(6)}
            assert kinds == {STORED, EVICTED}
        finally:
            watcher.close()
