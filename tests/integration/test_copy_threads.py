"""Copies shared by several threads: the same bytes, the same misses, the same errors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

import kvstore
from kvstore.client import Namespace, Store
from kvstore.errors import InvalidRequest
from kvstore.testing import ServerProcess
from kvstore.types import MissReason
from tests.helpers import eventually
from tests.integration.support import chain, content, control, info_of, load, store

MIB = 1 << 20


@pytest.fixture(scope="module", params=[[], ["--verify=always"]], ids=["headers", "every-byte"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("c")
    with ServerProcess(folder, "--no-redis", *request.param, cpu_bytes="32MiB") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Store]:
    with kvstore.connect(server.target, copy_threads=3) as made:
        made.clear()
        yield made


@pytest.fixture
def namespace(client: Store, name: str) -> Namespace:
    return client.open(info_of(name, block_bytes=MIB))


def test_what_several_threads_store_and_load_is_right_in_every_byte(
    namespace: Namespace, name: str
) -> None:
    keys = chain(name, 20)
    assert store(namespace, keys[:7]).stored == 7
    stored = store(namespace, keys)
    assert (stored.present, stored.stored) == (7, 13)
    assert load(namespace, keys).blocks == 20
    assert load(namespace, keys, first=3, count=9).blocks == 9


def test_what_one_copying_thread_raises_stores_nothing(
    namespace: Namespace, client: Store, name: str
) -> None:
    keys = chain(name, 12)
    writing = itertools.count(1)

    def source(index: int, into: memoryview) -> None:
        if next(writing) == 6:
            raise LookupError("the engine has lost this block")
        into[:] = content(keys[index], MIB)

    with pytest.raises(LookupError):
        namespace.store(keys, source)
    assert namespace.lookup(keys, lease_s=0).blocks == 0
    eventually(lambda: control(client)["reserved_slots"] == 0)
    assert store(namespace, keys).stored == 12
    assert load(namespace, keys).blocks == 12


def test_a_slot_that_is_reused_while_several_threads_read_is_a_miss(
    namespace: Namespace, server: ServerProcess, name: str
) -> None:
    keys = chain(name, 16)
    assert store(namespace, keys).stored == 16
    found = namespace.lookup(keys, lease_s=0.3)
    got: dict[int, bytes] = {}
    lock = threading.Lock()
    reused = threading.Event()
    rounds = iter(range(1000))
    with kvstore.connect(server.target) as other:
        writer = other.open(namespace.info)

        def overwritten() -> bool:
            store(writer, chain(f"{name} {next(rounds)}", 6))
            return writer.lookup(keys, lease_s=0).blocks < 16

        def sink(index: int, view: memoryview) -> None:
            with lock:
                if not reused.is_set():
                    eventually(overwritten)
                    reused.set()
            got[index] = bytes(view)

        loaded = namespace.load(found, sink)
    for index in range(loaded.blocks):
        assert got[index] == content(keys[index], MIB)
    assert loaded.blocks < 16
    assert loaded.miss_reason is MissReason.OVERWRITTEN


def test_no_thread_at_all_is_refused(server: ServerProcess) -> None:
    with pytest.raises(InvalidRequest, match="copy_threads: 0"):
        kvstore.connect(server.target, copy_threads=0)
