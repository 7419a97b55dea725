"""The store's control flow, with time set by hand and a remote tier that fails as it is told."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore import codec
from kvstore.arena import Arena
from kvstore.demand import Demand
from kvstore.errors import InvalidRequest, UnknownLease
from kvstore.eviction.lru import LRU
from kvstore.history import History
from kvstore.index import Block
from kvstore.leases import LeaseId, Leases, SessionId
from kvstore.pace import Pace
from kvstore.store import STORE_LEASE_S, LookupResult, Store
from kvstore.testing import FakeClock
from kvstore.tiers.base import RemoteTier
from kvstore.tiers.cpu import Answer, CpuTier
from kvstore.types import (
    BlockKey,
    Fingerprint,
    MissReason,
    NamespaceInfo,
    Outcome,
    TierName,
    TierState,
    TierStatus,
)
from kvstore.watch import Watchers

SIZE = 4032  # a slot of one page
INFO = NamespaceInfo(Fingerprint(b"n" * 32), SIZE, 16)
SLOTS = 8


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


KEYS = [key(number) for number in range(4)]


def content(block_key: BlockKey) -> bytes:
    return hashlib.shake_128(block_key).digest(SIZE)


class FakeRemote(RemoteTier):
    """Holds every key of `held`; `faults` says what a get of some of them comes to."""

    name = TierName.REDIS

    def __init__(self) -> None:
        self.held: set[BlockKey] = set()
        self.faults: dict[BlockKey, Outcome] = {}
        self.down = False
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.fetched: list[BlockKey] = []

    def find(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool] | None:
        return None if self.down else [one in self.held for one in keys]

    def get_summed(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        timeout_s: float | None = None,
    ) -> list[tuple[Outcome, int]]:
        self.started.set()
        assert self.gate.wait(20.0)
        if self.error is not None:
            raise self.error
        self.fetched.extend(keys)
        results = []
        for one, buffer in zip(keys, into, strict=True):
            outcome = self.faults.get(one, Outcome.OK)
            # A tier may leave rubbish behind when it fails.
            buffer[:] = content(one) if outcome is Outcome.OK else b"?" * SIZE
            results.append((outcome, codec.checksum(content(one))))
        return results

    def contains(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> list[bool]:
        raise NotImplementedError

    def get(self, *arguments: Any, **named: Any) -> list[Outcome]:
        raise NotImplementedError

    def put(self, *arguments: Any, **named: Any) -> list[Outcome]:
        raise NotImplementedError

    def put_summed(self, *arguments: Any, **named: Any) -> list[Outcome]:
        raise NotImplementedError

    def evict(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        raise NotImplementedError

    def clear(self, namespace: NamespaceInfo | None = None) -> int:
        count = len(self.held)
        self.held.clear()
        return count

    def status(self) -> TierStatus:
        return TierStatus(TierName.REDIS, TierState.UP, 0, 0, len(self.held))

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """A store and what it stands on."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor):
        self.clock = FakeClock()
        self.remote = FakeRemote()
        self.arena = Arena(folder / "a.arena", 4096 + SLOTS * 4096, 1, SLOTS * 4096)
        self.cpu = CpuTier(self.arena, LRU)
        self.leases: Leases[Any] = Leases(self.clock, random.Random(1))
        self.demand = Demand(self.clock, 1 << 20)
        self.store = Store(
            self.cpu,
            self.remote,
            None,
            self.leases,
            History(self.clock),
            Watchers(),
            self.clock,
            executor,
            self.demand,
            Pace(),
        )
        self.store.open_namespace(INFO)
        self.session = self.leases.open_session("test")

    @property
    def namespace(self) -> Any:
        return self.store.namespace(INFO.fingerprint)

    async def lookup(self, keys: Sequence[BlockKey] = KEYS, lease_s: float = 60.0) -> LookupResult:
        return await self.store.lookup(INFO.fingerprint, keys, self.session, lease_s)

    async def fetch(
        self, found: LookupResult, session: SessionId | None = None
    ) -> dict[int, Block | MissReason]:
        assert found.lease is not None
        arrivals = self.store.fetch(session or self.session, found.lease, 0, len(found.blocks))
        return {index: arrived async for index, arrived in arrivals}

    def reserve(self, keys: Sequence[BlockKey]) -> tuple[list[Answer], LeaseId | None]:
        answers, blocks, lease = self.store.reserve(
            INFO.fingerprint, keys, None, SIZE, self.session
        )
        for block in blocks:
            self.cpu.view(block)[:] = content(block.key)
        return answers, lease

    def put(self, keys: Sequence[BlockKey]) -> None:
        answers, lease = self.reserve(keys)
        assert set(answers) == {Answer.RESERVED}
        assert lease is not None
        self.store.commit(self.session, lease)

    def check_nothing_is_held(self) -> None:
        assert len(self.leases) == 0
        assert list(self.namespace.pending) == []
        assert self.cpu.set_aside_slots == 0
        assert [block.pins for block in self.namespace] == [0] * len(self.namespace)
        assert self.arena.used_bytes == len(self.namespace) * SIZE

    def check_contents(self) -> None:
        for block in self.namespace:
            assert bytes(self.cpu.view(block)) == content(block.key)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ThreadPoolExecutor(4) as executor:
        made = World(tmp_path, executor)
        yield made
        made.remote.gate.set()
    made.arena.close()


Scene = Callable[[], Coroutine[Any, Any, None]]


def play(scene: Scene) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20.0):
            await scene()

    asyncio.run(limited())


# -- promotions


def test_what_the_remote_tier_has_is_promoted_once_and_then_resident(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        found = await world.lookup()
        assert found.runs == [(TierName.REDIS, 4)]
        assert found.miss_reason is None
        arrived = await world.fetch(found)
        assert [arrived[i].key for i in range(4)] == KEYS  # type: ignore[union-attr]
        assert (await world.lookup(lease_s=0.0)).runs == [(TierName.CPU, 4)]
        assert world.remote.fetched == KEYS
        assert found.lease is not None
        world.store.release(world.session, [found.lease])
        world.check_contents()
        world.check_nothing_is_held()

    play(scene)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.ABSENT, MissReason.EVICTED),
        (Outcome.CORRUPT, MissReason.CORRUPT),
        (Outcome.TIMED_OUT, MissReason.TOO_SLOW),
        (Outcome.FAILED, MissReason.TIER_DOWN),
    ],
)
def test_a_block_that_does_not_come_is_a_miss_with_its_own_reason(
    world: World, outcome: Outcome, reason: MissReason
) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        world.remote.faults[KEYS[2]] = outcome
        found = await world.lookup()
        arrived = await world.fetch(found)
        assert arrived[2] is reason
        assert [i for i in range(4) if isinstance(arrived[i], Block)] == [0, 1, 3]
        world.store.close_session(world.session)
        world.check_contents()
        world.check_nothing_is_held()

    play(scene)


def test_a_remote_tier_that_raises_leaves_no_slot_reserved(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        world.remote.error = OSError("the disk is on fire")
        found = await world.lookup()
        with pytest.raises(OSError, match="on fire"):
            await world.fetch(found)
        world.remote.error = None
        arrived = await world.fetch(found)  # the same lease can try again
        assert all(isinstance(arrived[i], Block) for i in range(4))
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_a_remote_tier_that_cannot_be_asked_is_tier_down_behind_what_the_arena_has(
    world: World,
) -> None:
    async def scene() -> None:
        world.put(KEYS[:2])
        world.remote.down = True
        found = await world.lookup(lease_s=0.0)
        assert (found.runs, found.miss_reason) == ([(TierName.CPU, 2)], MissReason.TIER_DOWN)
        world.check_nothing_is_held()

    play(scene)


def test_many_askers_cost_one_fetch(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        found = [await world.lookup() for _ in range(5)]
        world.remote.gate.clear()
        fetches = [asyncio.create_task(world.fetch(one)) for one in found]
        await asyncio.to_thread(world.remote.started.wait, 20.0)
        world.remote.gate.set()
        for arrived in await asyncio.gather(*fetches):
            assert all(isinstance(arrived[i], Block) for i in range(4))
        assert sorted(world.remote.fetched) == sorted(KEYS)
        assert [block.pins for block in world.namespace] == [5] * 4
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_an_asker_that_gives_up_takes_nothing_from_the_others(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        first, second = await world.lookup(), await world.lookup()
        world.remote.gate.clear()
        impatient = asyncio.create_task(world.fetch(first))
        await asyncio.to_thread(world.remote.started.wait, 20.0)
        patient = asyncio.create_task(world.fetch(second))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        world.remote.gate.set()
        arrived = await patient
        assert all(isinstance(arrived[i], Block) for i in range(4))
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_a_fetch_into_an_arena_that_is_leased_full_is_no_space(world: World) -> None:
    async def scene() -> None:
        world.put([key(100 + number) for number in range(SLOTS - 2)])
        held = await world.lookup([key(100 + number) for number in range(SLOTS - 2)])
        world.remote.held.update(KEYS)
        found = await world.lookup()
        arrived = await world.fetch(found)
        assert [isinstance(arrived[i], Block) for i in range(4)] == [True, True, False, False]
        assert arrived[2] is arrived[3] is MissReason.NO_SPACE
        assert held.lease is not None
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_a_block_that_another_is_storing_is_too_slow_to_fetch(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        _, lease = world.reserve(KEYS[1:2])
        arrived = await world.fetch(await world.lookup())
        assert arrived[1] is MissReason.TOO_SLOW
        assert lease is not None
        world.store.abort(world.session, lease)
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


# -- leases that end during a fetch


@pytest.mark.parametrize("end", ["expiry", "release", "detach"])
def test_a_lease_that_ends_during_its_fetch_pins_nothing_afterwards(world: World, end: str) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        found = await world.lookup(lease_s=5.0)
        assert found.lease is not None
        world.remote.gate.clear()
        fetching = asyncio.create_task(world.fetch(found))
        await asyncio.to_thread(world.remote.started.wait, 20.0)
        if end == "expiry":
            world.clock.advance(5.0)
            world.store.sweep()
        elif end == "release":
            world.store.release(world.session, [found.lease])
        else:
            world.store.close_session(world.session)
        assert list(world.namespace.pending)  # the thread still writes to these slots
        world.remote.gate.set()
        assert set((await fetching).values()) == {MissReason.TOO_SLOW}
        assert len(world.namespace) == 4  # paid for, so kept
        world.check_contents()
        world.check_nothing_is_held()

    play(scene)


def test_a_clear_during_a_fetch_waits_for_nobody_and_breaks_nothing(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        found = await world.lookup()
        world.remote.gate.clear()
        fetching = asyncio.create_task(world.fetch(found))
        await asyncio.to_thread(world.remote.started.wait, 20.0)
        assert await world.store.clear() == (0, 4)
        world.remote.gate.set()
        await fetching
        world.check_contents()
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_leased_blocks_outlive_a_clear_and_go_with_the_next(world: World) -> None:
    async def scene() -> None:
        world.put(KEYS)
        found = await world.lookup(KEYS[:2])
        assert await world.store.clear() == (2, 0)
        assert (await world.lookup(lease_s=0.0)).runs == [(TierName.CPU, 2)]
        assert (await world.lookup(lease_s=0.0)).miss_reason is MissReason.CLEARED
        world.check_contents()
        assert found.lease is not None
        world.store.release(world.session, [found.lease])
        assert await world.store.clear() == (2, 0)
        world.check_nothing_is_held()

    play(scene)


# -- reservations


def test_a_late_reservation_is_set_aside_given_to_nobody_and_refused(world: World) -> None:
    async def scene() -> None:
        _, lease = world.reserve(KEYS[:3])
        assert lease is not None
        offsets = {block.offset for block in world.namespace.pending}
        world.clock.advance(STORE_LEASE_S - 0.001)
        world.store.sweep()
        assert world.cpu.set_aside_slots == 0
        world.clock.advance(0.001)
        world.store.sweep()
        assert world.cpu.set_aside_slots == 3
        others = [key(100 + number) for number in range(SLOTS)]
        answers, second = world.reserve(others)  # the same keys could be stored again, too
        assert answers == [Answer.RESERVED] * (SLOTS - 3) + [Answer.NO_SPACE] * 3
        assert offsets.isdisjoint(block.offset for block in world.namespace.pending)
        with pytest.raises(UnknownLease, match="had expired before its commit"):
            world.store.commit(world.session, lease)
        assert world.cpu.set_aside_slots == 0
        assert world.namespace.longest_prefix(KEYS) == []
        assert second is not None
        world.store.abort(world.session, second)
        world.check_nothing_is_held()

    play(scene)


def test_a_dead_clients_slots_are_free_at_its_leases_deadline_and_not_before(
    world: World,
) -> None:
    async def scene() -> None:
        _, lease = world.reserve(KEYS)
        assert lease is not None
        world.clock.advance(10.0)
        world.store.close_session(world.session)
        assert world.cpu.set_aside_slots == 4
        assert list(world.namespace.pending) == []
        world.clock.advance(STORE_LEASE_S - 10.001)
        world.store.sweep()
        assert world.arena.used_bytes == 4 * SIZE
        world.clock.advance(0.001)
        world.store.sweep()
        assert world.arena.used_bytes == 0
        world.check_nothing_is_held()

    play(scene)


def test_a_stopped_clients_slots_are_free_when_its_session_ends(world: World) -> None:
    async def scene() -> None:
        world.reserve(KEYS)
        world.clock.advance(STORE_LEASE_S * 10)
        world.store.sweep()
        assert world.cpu.set_aside_slots == 4
        world.store.close_session(world.session)
        world.check_nothing_is_held()

    play(scene)


def test_a_store_of_the_same_blocks_meanwhile_is_not_undone_by_the_late_one(world: World) -> None:
    async def scene() -> None:
        _, late = world.reserve(KEYS)
        world.clock.advance(STORE_LEASE_S)
        world.store.sweep()
        world.put(KEYS)
        assert late is not None
        with pytest.raises(UnknownLease):
            world.store.commit(world.session, late)
        assert (await world.lookup(lease_s=0.0)).runs == [(TierName.CPU, 4)]
        world.check_contents()
        world.check_nothing_is_held()

    play(scene)


def test_a_range_beyond_the_lease_is_refused_before_anything_is_fetched(world: World) -> None:
    async def scene() -> None:
        world.remote.held.update(KEYS)
        found = await world.lookup()
        assert found.lease is not None
        with pytest.raises(InvalidRequest, match="not within the lease's 4"):
            async for _ in world.store.fetch(world.session, found.lease, 2, 3):
                pass
        assert world.remote.fetched == []

    play(scene)
