"""What was stored comes back, bit for bit, over both data planes, or not at all."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvstore
from kvstore import slots
from kvstore.client import Store
from kvstore.client.store import Namespace
from kvstore.testing import ServerProcess
from kvstore.types import BlockKey, MissReason, NamespaceInfo, SkipReason, TierName
from tests.helpers import eventually
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    Raw,
    chain,
    content,
    control,
    info_of,
    load,
    raw,
    report,
    store,
    tier,
    tiers,
)


def test_what_was_stored_is_loaded_bit_for_bit(namespace: Namespace, name: str) -> None:
    keys = chain(name, 9)
    stored = store(namespace, keys)
    assert (stored.stored, stored.present, stored.skipped) == (9, 0, {})
    checked = load(namespace, keys)
    assert checked.found.miss_reason is None
    assert checked.found.runs == checked.loaded.runs == ((TierName.CPU, 9),)
    assert checked.loaded.miss_reason is None


def test_a_block_whose_size_is_no_multiple_of_anything_comes_back_whole(
    client: Store, name: str
) -> None:
    namespace = client.open(info_of(name, block_bytes=(1 << 20) + 4097))  # more than one chunk
    keys = chain(name, 3)
    assert store(namespace, keys).stored == 3
    assert load(namespace, keys).blocks == 3


def test_only_the_present_prefix_is_found(namespace: Namespace, name: str) -> None:
    keys = chain(name, 12)
    store(namespace, keys[:7])
    found = namespace.lookup(keys)
    assert (found.blocks, found.miss_reason) == (7, MissReason.NEVER_SEEN)
    assert load(namespace, keys, found).blocks == 7


def test_blocks_behind_a_gap_are_not_found(namespace: Namespace, name: str) -> None:
    keys = chain(name, 6)
    store(namespace, keys[:2])
    store(namespace, keys[3:], parent=keys[2])
    assert load(namespace, keys).blocks == 2
    store(namespace, keys[2:3], parent=keys[1])
    assert load(namespace, keys).blocks == 6


def test_a_part_of_what_was_found_can_be_loaded(namespace: Namespace, name: str) -> None:
    keys = chain(name, 8)
    store(namespace, keys)
    assert load(namespace, keys, first=3, count=4).blocks == 4
    assert load(namespace, keys, first=8).blocks == 0


def test_no_keys_are_no_error(namespace: Namespace) -> None:
    found = namespace.lookup([])
    assert (found.blocks, found.miss_reason, found.lease) == (0, None, None)
    assert load(namespace, [], found).loaded == kvstore.client.Loaded((), None)
    stored = store(namespace, [])
    assert (stored.stored, stored.present, stored.skipped) == (0, 0, {})


def test_a_second_store_finds_the_blocks_present_and_calls_no_source(
    namespace: Namespace, name: str
) -> None:
    keys = chain(name, 5)
    store(namespace, keys[:3])
    sources: list[int] = []

    def source(index: int, into: memoryview) -> None:
        sources.append(index)
        into[:] = content(keys[index])

    stored = namespace.store(keys, source)
    assert (stored.stored, stored.present) == (2, 3)
    assert sources == [3, 4]
    assert load(namespace, keys).blocks == 5


def test_namespaces_do_not_share_blocks(client: Store, name: str) -> None:
    keys = chain(name, 2)
    store(client.open(info_of(name)), keys)
    found = client.open(info_of(name + " of another tenant")).lookup(keys)
    assert (found.blocks, found.miss_reason) == (0, MissReason.NEVER_SEEN)


def test_clients_that_store_the_same_prefix_at_once_keep_one_copy(
    server: ServerProcess, share_memory: bool, name: str
) -> None:
    keys = chain(name, 20)
    info = info_of(name)
    together = threading.Barrier(4)
    stores = [kvstore.connect(server.target, share_memory=share_memory) for _ in range(4)]
    try:
        stores[0].clear()

        def store_all(client: Store) -> kvstore.client.Stored:
            namespace = client.open(info)
            together.wait()
            return store(namespace, keys)

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(store_all, stores))
        assert [result.skipped for result in results] == [{}] * 4
        assert [result.stored + result.present for result in results] == [20] * 4
        assert sum(result.stored for result in results) == 20
        cpu = tier(stores[0], "cpu")
        assert (cpu["blocks"], cpu["used_bytes"]) == (20, 20 * BLOCK_BYTES)
        assert load(stores[1].open(info), keys).blocks == 20
        eventually(lambda: control(stores[0]) == NOTHING_HELD)
    finally:
        for client in stores:
            client.close()


@pytest.mark.parametrize("writer_shares", [True, False], ids=["from-shm", "from-stream"])
def test_a_block_stored_over_one_plane_is_loaded_over_the_other(
    server: ServerProcess, writer_shares: bool, name: str
) -> None:
    keys = chain(name, 6)
    with (
        kvstore.connect(server.target, share_memory=writer_shares) as writer,
        kvstore.connect(server.target, share_memory=not writer_shares) as reader,
    ):
        assert writer.shares_memory is not reader.shares_memory
        store(writer.open(info_of(name)), keys)
        assert load(reader.open(info_of(name)), keys).blocks == 6


def test_more_blocks_than_the_arena_holds_are_refused_or_evict_but_never_wrong(
    namespace: Namespace, client: Store, name: str
) -> None:
    one_prefix = chain(name, 250)  # the arena holds 189
    stored = store(namespace, one_prefix)
    assert stored.stored + stored.present + sum(stored.skipped.values()) == 250
    assert set(stored.skipped) == {SkipReason.NO_SPACE}
    assert load(namespace, one_prefix).blocks == stored.stored
    prefixes = [chain(f"{name} {i}", 30) for i in range(12)]
    for keys in prefixes:
        assert store(namespace, keys).stored == 30
        assert load(namespace, keys).blocks == 30
    loaded = [load(namespace, keys) for keys in prefixes]
    assert loaded[-1].blocks == 30
    assert loaded[0].found.miss_reason is MissReason.EVICTED
    cpu = tier(client, "cpu")
    assert cpu["used_bytes"] == cpu["blocks"] * BLOCK_BYTES <= cpu["capacity_bytes"]


def test_nothing_is_evicted_while_it_is_leased(
    namespace: Namespace, client: Store, other: Store, name: str
) -> None:
    client.clear()
    keys = chain(name, 100)
    store(namespace, keys)
    found = namespace.lookup(keys)
    pusher = other.open(namespace.info)
    for i in range(3):
        store(pusher, chain(f"{name} {i}", 80))
    assert load(namespace, keys, found).blocks == 100


def test_block_sizes_take_room_from_each_other(client: Store, name: str) -> None:
    for size in (4 << 10, 256 << 10, 1 << 20, BLOCK_BYTES):
        namespace = client.open(info_of(f"{name} {size}", block_bytes=size))
        for i in range(6):
            keys = chain(f"{name} {size} {i}", 3)
            assert store(namespace, keys).stored == 3
            assert load(namespace, keys).blocks == 3


# -- the redis tier


@pytest.fixture
def redis_client(redis_server: ServerProcess, share_memory: bool) -> Iterator[Store]:
    with kvstore.connect(redis_server.target, share_memory=share_memory) as client:
        yield client


def test_blocks_cleared_from_the_arena_come_back_from_redis_and_are_promoted(
    redis_client: Store, name: str
) -> None:
    namespace = redis_client.open(info_of(name))
    keys = chain(name, 20)
    assert store(namespace, keys).stored == 20
    redis_client.clear(arena_only=True)
    first = load(namespace, keys)
    assert first.found.runs == first.loaded.runs == ((TierName.REDIS, 20),)
    again = load(namespace, keys)
    assert again.loaded.runs == ((TierName.CPU, 20),)


def test_a_run_that_begins_in_the_arena_goes_on_in_redis(redis_client: Store, name: str) -> None:
    namespace = redis_client.open(info_of(name))
    keys = chain(name, 10)
    store(namespace, keys)
    redis_client.clear(arena_only=True)
    assert load(namespace, keys[:4]).blocks == 4  # these are in the arena again
    checked = load(namespace, keys)
    assert checked.found.runs == ((TierName.CPU, 4), (TierName.REDIS, 6))
    assert checked.found.miss_reason is None
    assert checked.loaded.runs == ((TierName.CPU, 4), (TierName.REDIS, 6))


def test_a_run_that_alternates_between_the_tiers_comes_back_in_order(
    redis_client: Store, name: str
) -> None:
    namespace = redis_client.open(info_of(name))
    keys = chain(name, 12)
    store(namespace, keys)
    redis_client.clear(arena_only=True)
    for index in (1, 2, 5, 9):  # in the arena, as orphans
        store(namespace, keys[index : index + 1], parent=keys[index - 1])
    checked = load(namespace, keys)
    assert tiers(checked.loaded.runs) == {TierName.CPU: 4, TierName.REDIS: 8}
    assert checked.found.runs == checked.loaded.runs
    for first in range(12):
        assert load(namespace, keys, first=first, count=12 - first).blocks == 12 - first


def test_after_a_full_clear_a_miss_says_that_it_was_cleared(redis_client: Store, name: str) -> None:
    namespace = redis_client.open(info_of(name))
    keys = chain(name, 4)
    store(namespace, keys)
    redis_client.clear(namespace.info)
    found = namespace.lookup(keys)
    assert (found.blocks, found.miss_reason) == (0, MissReason.CLEARED)


def test_a_fetch_for_many_readers_promotes_each_block_once(redis_client: Store, name: str) -> None:
    namespace = redis_client.open(info_of(name))
    keys = chain(name, 20)
    store(namespace, keys)
    redis_client.clear(arena_only=True)
    before = tier(redis_client, "redis")["counters"]["loaded"]
    found = [namespace.lookup(keys) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        loads = list(pool.map(lambda one: load(namespace, keys, one), found))
    assert [checked.blocks for checked in loads] == [20] * 4
    assert tier(redis_client, "redis")["counters"]["loaded"] - before == 20


# -- flipped bytes


class Arena:
    """A second mapping of the server's arena."""

    def __init__(self, answer: Raw):
        fd = os.open(answer.answer.arena_path, os.O_RDWR)
        try:
            self._mapping = mmap.mmap(fd, answer.answer.arena_bytes)
        finally:
            os.close(fd)

    def flip(self, key: BlockKey, at: int) -> None:
        """Flips one bit of the block's payload."""
        at += self._mapping.find(key) - 8 + slots.HEADER_BYTES
        self._mapping[at] ^= 0x10


def flip(target: str, info: NamespaceInfo, key: BlockKey) -> None:
    with raw(target) as client:
        Arena(client).flip(key, info.block_bytes // 2)


def test_a_flipped_byte_is_corrupt_when_the_server_verifies_always(folder: Path, name: str) -> None:
    info = info_of(name)
    keys = chain(name, 6)
    with ServerProcess(folder, "--no-redis", "--verify=always", cpu_bytes="16MiB") as server:
        for share_memory in (True, False):
            with kvstore.connect(server.target, share_memory=share_memory) as client:
                client.clear()
                namespace = client.open(info)
                assert store(namespace, keys).stored == 6
                assert load(namespace, keys).blocks == 6
                flip(server.target, info, keys[3])
                checked = load(namespace, keys)
                assert (checked.blocks, checked.loaded.miss_reason) == (3, MissReason.CORRUPT)


def test_a_flipped_byte_is_corrupt_over_a_stream_once_the_checksum_is_known(
    server: ServerProcess, name: str
) -> None:
    info = info_of(name)
    keys = chain(name, 6)
    with kvstore.connect(server.target, share_memory=False) as client:
        namespace = client.open(info)
        store(namespace, keys)  # over the stream: the checksum came along
        flip(server.target, info, keys[3])
        checked = load(namespace, keys)
        assert (checked.blocks, checked.loaded.miss_reason) == (3, MissReason.CORRUPT)


def test_a_block_whose_header_names_another_key_is_overwritten(
    server: ServerProcess, other: Store, name: str
) -> None:
    namespace = other.open(info_of(name))
    keys = chain(name, 3)
    store(namespace, keys)
    found = namespace.lookup(keys)
    with raw(server.target) as client:
        arena = Arena(client)
        arena.flip(keys[1], -slots.HEADER_BYTES + 20)  # within the key of its header
        checked = load(namespace, keys, found)
        assert (checked.blocks, checked.loaded.miss_reason) == (1, MissReason.OVERWRITTEN)


def test_the_report_agrees_with_what_was_stored(other: Store, name: str) -> None:
    other.clear()
    namespace = other.open(info_of(name, model="m", tenant="t"))
    store(namespace, chain(name, 7))
    document = report(other)
    entry = next(
        entry
        for entry in document["namespaces"]
        if entry["fingerprint"] == namespace.info.fingerprint.hex()
    )
    assert (entry["model"], entry["tenant"]) == ("m", "t")
    assert (entry["blocks"], entry["bytes"]) == (7, 7 * BLOCK_BYTES)
