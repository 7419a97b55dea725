"""Servers that are killed, stopped or away: clients miss, go on, and come back by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import MissReason, SkipReason
from tests.helpers import eventually
from tests.integration.support import chain, content, info_of, load, raw, report, store

ROUNDS_AFTER = 3
PLANES = pytest.mark.parametrize("share_memory", [True, False], ids=["shared-memory", "stream"])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def use_until(stop: threading.Event, client: Store, name: str) -> tuple[int, int]:
    """Stores and loads until told to stop, then until it hits again; calls and hits."""
    namespace = client.open(info_of(name))
    calls = hits = 0
    while not stop.is_set():
        keys = chain(f"{name} {calls % 5}", 6)
        stored = store(namespace, keys)
        assert stored.stored + stored.present + sum(stored.skipped.values()) == 6
        assert set(stored.skipped) <= {SkipReason.SERVER_DOWN, SkipReason.FAILED}
        checked = load(namespace, keys)  # which compares every byte
        assert checked.blocks == 6 or checked.loaded.miss_reason or checked.found.miss_reason
        hits += checked.blocks
        calls += 2
        time.sleep(0.002)
    return calls, hits


def test_a_server_that_is_killed_and_started_again_costs_misses_and_nothing_else(
    folder: Path, name: str
) -> None:
    stop = threading.Event()
    with ServerProcess(folder, "--no-redis", cpu_bytes="16MiB") as server:
        clients = [kvstore.connect(server.target, share_memory=i != 0) for i in range(3)]
        clients.append(kvstore.connect(f"unix:{folder}/kvstore.sock"))
        epochs = [report(clients[0])["server"]["epoch"]]
        try:
            with ThreadPoolExecutor(4) as pool:
                users = [
                    pool.submit(use_until, stop, client, f"{name} {i}")
                    for i, client in enumerate(clients)
                ]
                try:
                    for _ in range(2):
                        time.sleep(0.3)
                        server.restart()
                        eventually(lambda: all(client.attached for client in clients))
                        epochs.append(report(clients[0])["server"]["epoch"])
                    time.sleep(0.3)
                finally:
                    stop.set()
                results = [user.result() for user in users]
            assert len(set(epochs)) == 3
            assert all(hits > 0 for _, hits in results)
            for i, client in enumerate(clients):
                assert client.shares_memory is (i != 0)  # the new server's arena, not the old one
                namespace = client.open(info_of(f"{name} {i}"))
                store(namespace, chain(f"{name} after", 6))
                assert load(namespace, chain(f"{name} after", 6)).blocks == 6
        finally:
            for client in clients:
                client.close()


@PLANES
def test_a_server_that_is_killed_during_a_load_gives_a_miss(
    folder: Path, name: str, share_memory: bool
) -> None:
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="40MiB") as server,
        kvstore.connect(server.target, share_memory=share_memory) as client,
    ):
        info = info_of(name, block_bytes=1 << 20)
        namespace, keys = client.open(info), chain(name, 20)
        store(namespace, keys)
        got: dict[int, bytes] = {}

        def sink(index: int, view: memoryview) -> None:
            if not got:
                server.kill()
            got[index] = bytes(view)

        loaded = namespace.load(namespace.lookup(keys), sink)
        for index in range(loaded.blocks):
            assert got[index] == content(keys[index], 1 << 20)
        if not share_memory:
            assert loaded.blocks < 20
            assert loaded.miss_reason is MissReason.SERVER_DOWN
        eventually(lambda: not client.attached)
        assert namespace.lookup(keys).miss_reason is MissReason.SERVER_DOWN


@PLANES
def test_the_error_of_a_source_is_the_callers_also_when_the_server_is_gone(
    folder: Path, name: str, share_memory: bool
) -> None:
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="8MiB") as server,
        kvstore.connect(server.target, share_memory=share_memory) as client,
    ):

        def source(index: int, into: memoryview) -> None:
            server.kill()
            raise LookupError("the engine has lost this block")

        with pytest.raises(LookupError, match="has lost this block"):
            client.open(info_of(name)).store(chain(name, 2), source)


def test_without_a_server_everything_misses_at_once_and_nothing_raises(
    folder: Path, name: str
) -> None:
    with kvstore.connect(f"unix:{folder}/nobody.sock", wait_s=0.2) as client:
        assert not client.attached
        namespace = client.open(info_of(name))
        keys = chain(name, 3)
        found = namespace.lookup(keys)
        assert (found.blocks, found.miss_reason) == (0, MissReason.SERVER_DOWN)
        assert load(namespace, keys, found).blocks == 0
        assert store(namespace, keys).skipped == {SkipReason.SERVER_DOWN: 3}
        with pytest.raises(kvstore.KVStoreError, match="UNAVAILABLE"):
            client.report()


def test_a_client_that_was_there_first_connects_when_the_server_comes(
    folder: Path, name: str
) -> None:
    server = ServerProcess(folder, "--no-redis", cpu_bytes="8MiB")
    with kvstore.connect(server.target, wait_s=0.1) as client:
        namespace = client.open(info_of(name))
        with server:
            eventually(lambda: client.attached)
            store(namespace, chain(name, 3))
            assert load(namespace, chain(name, 3)).blocks == 3


def test_a_server_that_stands_still_is_a_miss_and_is_used_again_when_it_moves(
    server: ServerProcess, other: Store, name: str
) -> None:
    namespace, keys = other.open(info_of(name)), chain(name, 3)
    store(namespace, keys)
    found = namespace.lookup(keys)
    with stopped(server.pid):
        missed = namespace.lookup(keys)
        assert (missed.blocks, missed.miss_reason) == (0, MissReason.SERVER_DOWN)
        skipped = store(namespace, chain(name + " more", 2)).skipped
        assert skipped == {SkipReason.SERVER_DOWN: 2}
        assert load(namespace, keys, found).blocks == 3  # leased, and in shared memory
    eventually(lambda: load(namespace, keys).blocks == 3)


def test_a_stopped_server_ends_in_time_and_leaves_nothing_behind(folder: Path, name: str) -> None:
    with ServerProcess(folder, cpu_bytes="8MiB") as server:
        with raw(server.target) as client:
            arena = Path(client.answer.arena_path)
        socket = folder / "kvstore.sock"
        assert arena.exists()
        assert socket.exists()
        with (
            kvstore.connect(server.target) as shm,
            kvstore.connect(f"unix:{socket}", share_memory=False) as streams,
            raw(server.target),
        ):
            keys = chain(name, 3)
            store(shm.open(info_of(name)), keys)
            found = streams.open(info_of(name)).lookup(keys)
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait() == 0
            assert not arena.exists()
            assert not socket.exists()
            assert not (folder / "valkey" / "valkey.sock").exists()
            eventually(lambda: not shm.attached and not streams.attached)
            loaded = streams.open(info_of(name)).load(found, lambda index, view: None)
            assert loaded.miss_reason is MissReason.SERVER_DOWN
    assert "Traceback" not in server.log.read_text()
