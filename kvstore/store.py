"""All control flow over the tiers: lookup, fetch, reserve, commit, clear (D5, D6, D7).

Runs within one event loop, which is the only thread that touches the index, so there are no
locks; what takes long (Redis, checksums) goes to threads, which touch payloads alone. A block
that a thread works on is pinned or reserved, so its slot can't be given away.

Knows nothing of the wire, of engines, or of why a block is worth keeping.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from kvstore.clock import Clock
from kvstore.demand import ROOM_SHARE, Demand
from kvstore.errors import (
    ChecksumRequired,
    InvalidRequest,
    RequestError,
    UnknownLease,
    UnknownNamespace,
)
from kvstore.history import History
from kvstore.index import Block, Namespace
from kvstore.inflight import Inflight
from kvstore.leases import Lease, LeaseId, Leases, SessionId
from kvstore.outbox import Outbox
from kvstore.pace import Pace
from kvstore.tiers.base import RemoteTier
from kvstore.tiers.cpu import Answer, CpuTier
from kvstore.types import (
    BlockKey,
    Fingerprint,
    MissReason,
    NamespaceInfo,
    Outcome,
    Outlook,
    TierName,
    TierStatus,
)
from kvstore.watch import EventKind, Watchers

STORE_LEASE_S = 30.0
"""How long a client may take to write what it reserved."""

READ_LEASE_S_MAX = 600.0

PROBE_BLOCKS = (8, 32, 128, 512)
"""How many keys the remote tier is asked for at a time: most prefixes end early."""

FIND_TIMEOUT_S = 1.0
"""How long a lookup waits for the remote tier in all. A client waits 2 s for its answer, and must
not lose what the arena holds with what a slow tier may hold."""

FETCH_BYTES = 16 << 20
"""Payload bytes that one thread brings at a time, so that the first blocks are readable early."""

DRAIN_S_MAX = 20.0
"""How long `clear` waits for the write-through: a steady stream of stores never ends."""

FETCH_TIMEOUT_S = 10.0
SWEEP_S = 0.2
REFRESH_S = 2.0


@dataclass(slots=True)
class ReadLease:
    """Blocks pinned for reading. None stands for one that only the remote tier has."""

    namespace: Namespace
    keys: Sequence[BlockKey]
    blocks: list[Block | None]


@dataclass(slots=True)
class WriteLease:
    """Blocks reserved for writing; after expiry, only their slots, kept aside."""

    blocks: list[Block]


Pinned = ReadLease | WriteLease


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The longest run of present blocks."""

    blocks: Sequence[Block | None]
    """One for each block of the run; None: the remote tier has it."""
    miss_reason: MissReason | None
    """Why the next block is absent; None when all are present."""
    lease: LeaseId | None

    @property
    def runs(self) -> list[tuple[TierName, int]]:
        """The tiers of the run in order, with how many blocks each has."""
        if all(self.blocks):  # a tenth of the time that looking for None takes
            return [(TierName.CPU, len(self.blocks))] if self.blocks else []
        names = (TierName.REDIS if block is None else TierName.CPU for block in self.blocks)
        return [(name, len(list(group))) for name, group in groupby(names)]


class Store:
    """The tiers as one."""

    def __init__(
        self,
        cpu: CpuTier,
        remote: RemoteTier | None,
        outbox: Outbox | None,
        leases: Leases[Pinned],
        history: History,
        watchers: Watchers,
        clock: Clock,
        executor: Executor,
        demand: Demand,
        pace: Pace,
        verify_always: bool = False,
    ):
        """`pace` is the remote tier's."""
        self.cpu = cpu
        self.remote = remote
        self.outbox = outbox
        self.leases = leases
        self.history = history
        self.watchers = watchers
        self.verify_always = verify_always
        self._clock = clock
        self._executor = executor
        self._demand = demand
        self._pace = pace
        self._orphans: list[Lease[Pinned]] = []
        self._inflight: Inflight[tuple[Fingerprint, BlockKey], Block | MissReason] = Inflight()

    # -- namespaces and sessions

    def open_namespace(self, info: NamespaceInfo) -> None:
        """Declares a namespace. Raises NamespaceConflict or InvalidRequest."""
        self.cpu.open(info)

    def namespace(self, fingerprint: Fingerprint) -> Namespace:
        """An open namespace. Raises UnknownNamespace."""
        found = self.cpu.find_namespace(fingerprint)
        if found is None:
            raise UnknownNamespace(
                f"namespace {fingerprint.hex()[:16]} is not open: call OpenNamespace first, "
                "also after the server restarted"
            )
        return found

    def close_session(self, session: SessionId) -> None:
        """Ends all leases of a client that has detached or died.

        Slots that it was writing to are free at their lease's deadline, not before: a stream can
        break while its client lives, and copies on. Clients don't write past the deadline.
        """
        for lease in self.leases.close_session(session):
            if isinstance(lease.pinned, WriteLease) and not lease.late:
                for block in lease.pinned.blocks:
                    self.cpu.set_aside(block)
                lease.late = True
                self._orphans.append(lease)
            else:
                self._undo(lease)

    # -- reading

    async def lookup(
        self,
        fingerprint: Fingerprint,
        keys: Sequence[BlockKey],
        session: SessionId | None = None,
        lease_s: float = 0.0,
        near_only: bool = False,
    ) -> LookupResult:
        """The longest present prefix; with `lease_s`, pinned for the session so long.

        With `near_only`, the remote tier is not asked.

        Raises:
            UnknownNamespace, UnknownLease, InvalidRequest: and nothing is pinned.
        """
        namespace = self.namespace(fingerprint)
        if lease_s:
            if session is None or not 0 < lease_s <= READ_LEASE_S_MAX:
                raise InvalidRequest(
                    f"a lease needs a session and a time of up to {READ_LEASE_S_MAX:.0f} s"
                )
            self.leases.check_session(session)
        blocks: list[Block | None] = list(namespace.longest_prefix(keys))
        _pin(blocks)
        lease = None
        try:
            reason = None
            if len(blocks) < len(keys):
                if self.remote is None:
                    reason = self.history.reason(keys[len(blocks)])
                elif near_only:
                    reason = MissReason.NOT_WORTH_LOADING
                else:
                    reason = await self._extend(self.remote, namespace, keys, blocks)
            if lease_s and session is not None and blocks:
                pinned = ReadLease(namespace, keys[: len(blocks)], blocks)
                lease = self.leases.grant(session, pinned, lease_s)
                self.cpu.touch([block for block in blocks if block is not None])
            return LookupResult(tuple(blocks), reason, lease)
        finally:
            if lease is None:
                _unpin(blocks)

    def outlook(
        self, fingerprint: Fingerprint, keys: Sequence[BlockKey], first: int, found: LookupResult
    ) -> Outlook:
        """Notes that a request asked for these blocks, from position `first` of its prefix on.

        Returns what is known about those that it lacks.
        """
        self.watchers.publish(EventKind.ASKED, fingerprint, keys)
        arena = self.cpu.arena
        full = arena.capacity_bytes - arena.used_bytes < ROOM_SHARE * arena.capacity_bytes
        info = self.namespace(fingerprint).info
        chances, crowded = self._demand.note(info, keys, first, full)
        latency_s, bytes_per_s = self._pace.measured or (0.0, 0.0)
        return Outlook(chances[len(found.blocks) :], crowded, latency_s, bytes_per_s)

    async def _extend(
        self,
        remote: RemoteTier,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        blocks: list[Block | None],
    ) -> MissReason | None:
        """Goes on where the arena's run ended, with the remote tier's help; pins what it adds.

        Returns why the run ends; None when it doesn't.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + FIND_TIMEOUT_S
        step = 0
        while len(blocks) < len(keys):
            window = keys[len(blocks) : len(blocks) + PROBE_BLOCKS[step]]
            step = min(step + 1, len(PROBE_BLOCKS) - 1)
            asked = [key for key in window if namespace.get(key) is None]
            asked_s = loop.time()
            finding = loop.run_in_executor(self._executor, remote.find, namespace.info, asked)
            # Not cancelled when it takes too long: the breaker must hear how it ends.
            await asyncio.wait([finding], timeout=max(deadline_s - loop.time(), 0.0))
            answer = finding.result() if finding.done() else None
            if answer is not None and asked:
                self._pace.note_answer(loop.time() - asked_s)
            there = dict(zip(asked, answer or [], strict=False))
            for key in window:
                block = namespace.get(key)
                if block is None and not there.get(key, False):
                    return MissReason.TIER_DOWN if answer is None else self.history.reason(key)
                _pin([block])
                blocks.append(block)
        return None

    async def fetch(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int
    ) -> AsyncIterator[tuple[int, Block | MissReason]]:
        """Brings leased blocks into the arena; yields each one's index as it is readable or lost.

        Raises:
            UnknownLease: it has ended.
            InvalidRequest: the range is not within the lease, or the lease is for writing.
        """
        lease = self.leases.get(session, lease_id)
        pinned = lease.pinned
        if not isinstance(pinned, ReadLease):
            raise InvalidRequest(f"lease {lease_id:#x} is for writing")
        if first < 0 or count < 0 or first + count > len(pinned.keys):
            raise InvalidRequest(
                f"blocks {first} to {first + count} are not within the lease's {len(pinned.keys)}"
            )
        missing = []
        for index in range(first, first + count):
            block = pinned.blocks[index]
            if block is not None:
                yield index, block
            else:
                missing.append(index)
        waiting = {
            asyncio.ensure_future(self._arrived(future, lease, index))
            for index, future in self._bring(pinned, missing)
        }
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for result in done:
                    yield result.result()
        finally:
            for task in waiting:
                task.cancel()

    def _bring(
        self, pinned: ReadLease, indexes: Sequence[int]
    ) -> list[tuple[int, asyncio.Future[Block | MissReason]]]:
        """Starts, or joins, the fetches of these blocks of a lease."""
        namespace = pinned.namespace
        size = max(1, FETCH_BYTES // namespace.info.block_bytes)
        arrivals: list[tuple[int, asyncio.Future[Block | MissReason]]] = []
        for start in range(0, len(indexes), size):
            batch = indexes[start : start + size]
            parents = {
                pinned.keys[index]: pinned.keys[index - 1] if index else None for index in batch
            }
            futures = self._inflight.share(
                [(namespace.info.fingerprint, pinned.keys[index]) for index in batch],
                partial(self._promote, namespace, parents),
            )
            arrivals.extend(zip(batch, futures, strict=True))
        return arrivals

    async def _arrived(
        self, future: asyncio.Future[Block | MissReason], lease: Lease[Pinned], index: int
    ) -> tuple[int, Block | MissReason]:
        # Shielded: others may wait for the same block.
        result = await asyncio.shield(future)
        if isinstance(result, MissReason):
            return index, result
        assert isinstance(lease.pinned, ReadLease)
        try:
            self.leases.get(lease.session, lease.id)
        except UnknownLease:
            return index, MissReason.TOO_SLOW
        if not result.generation:
            return index, MissReason.OVERWRITTEN
        if lease.pinned.blocks[index] is None:
            _pin([result])
            lease.pinned.blocks[index] = result
        return index, result

    async def _promote(
        self,
        namespace: Namespace,
        parents: dict[BlockKey, BlockKey | None],
        wanted: Sequence[tuple[Fingerprint, BlockKey]],
    ) -> dict[tuple[Fingerprint, BlockKey], Block | MissReason]:
        """Copies blocks from the remote tier into the arena."""
        assert self.remote is not None
        results: dict[BlockKey, Block | MissReason] = {}
        reserved: list[Block] = []
        for _, key in wanted:
            present = namespace.get(key)
            if present is not None:
                results[key] = present
                continue
            reservation = self.cpu.reserve(namespace, [key], parents[key])
            reserved.extend(reservation.blocks)
            if reservation.answers == [Answer.NO_SPACE]:
                results[key] = MissReason.NO_SPACE
            elif reservation.answers == [Answer.BUSY]:
                # Another client is storing it: it will be here, but nobody knows when.
                results[key] = MissReason.TOO_SLOW
        if reserved:
            started_s = self._clock.monotonic_s()
            try:
                fetched = await asyncio.get_running_loop().run_in_executor(
                    self._executor,
                    self.remote.get_summed,
                    namespace.info,
                    [block.key for block in reserved],
                    [self.cpu.view(block) for block in reserved],
                    FETCH_TIMEOUT_S,
                )
            except Exception:
                for block in reserved:
                    self.cpu.abort(block)
                raise
            for block, (outcome, checksum) in zip(reserved, fetched, strict=True):
                if outcome is Outcome.OK:
                    self.cpu.commit(block, checksum)
                    results[block.key] = block
                else:
                    self.cpu.abort(block)
                    results[block.key] = self._reason(block.key, outcome)
            stored = [block for block in reserved if block.generation]
            self._pace.note_batch(
                len(stored) * namespace.info.block_bytes, self._clock.monotonic_s() - started_s
            )
            if stored:
                self.cpu.touch(stored)
                self._stored(stored)
        return {(fingerprint, key): results[key] for fingerprint, key in wanted}

    def _reason(self, key: BlockKey, outcome: Outcome) -> MissReason:
        if outcome is Outcome.ABSENT:
            # It was there when the lease was given.
            reason = self.history.reason(key)
            return MissReason.EVICTED if reason is MissReason.NEVER_SEEN else reason
        return {
            Outcome.CORRUPT: MissReason.CORRUPT,
            Outcome.TIMED_OUT: MissReason.TOO_SLOW,
        }.get(outcome, MissReason.TIER_DOWN)

    def release(self, session: SessionId, leases: Iterable[LeaseId]) -> None:
        """Ends leases; unknown ones have ended already."""
        for lease_id in leases:
            lease = self.leases.end(session, lease_id)
            if lease is not None:
                self._undo(lease)

    # -- writing

    def reserve(
        self,
        fingerprint: Fingerprint,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        block_bytes: int,
        session: SessionId,
    ) -> tuple[list[Answer], list[Block], LeaseId | None]:
        """Takes slots for the blocks that are not here yet, leased to the session.

        Raises:
            UnknownNamespace, UnknownLease: the namespace or session is not known.
            InvalidRequest: the block size is not the namespace's, or the session holds too much.
        """
        namespace = self.namespace(fingerprint)
        self.leases.check_session(session)
        if block_bytes != namespace.info.block_bytes:
            raise InvalidRequest(
                f"blocks of {block_bytes} bytes, but this namespace's have "
                f"{namespace.info.block_bytes}"
            )
        if len({*keys, parent}) <= len(keys):
            raise InvalidRequest("the same key twice: keys and parent are blocks of one prefix")
        reservation = self.cpu.reserve(namespace, keys, parent)
        lease = None
        if reservation.blocks:
            try:
                lease = self.leases.grant(session, WriteLease(reservation.blocks), STORE_LEASE_S)
            except RequestError:
                for block in reservation.blocks:
                    self.cpu.abort(block)
                raise
        return reservation.answers, reservation.blocks, lease

    def commit(
        self,
        session: SessionId,
        lease_id: LeaseId,
        checksums: Sequence[int] | None = None,
        failed: Iterable[int] = (),
    ) -> int:
        """Makes the lease's blocks readable, but for the failed ones; returns how many.

        Raises:
            UnknownLease: its time was up, and nothing was stored.
            InvalidRequest: the checksums or positions don't match; the lease stays.
        """
        lease = self._write_lease(session, lease_id)
        blocks = lease.blocks
        if checksums is None and self.verify_always:
            raise ChecksumRequired("this server verifies always: commit needs checksums")
        if checksums is not None and len(checksums) != len(blocks):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(blocks)} reserved blocks")
        dropped = set(failed)
        if not dropped <= set(range(len(blocks))):
            raise InvalidRequest(f"failed positions {sorted(dropped)} of {len(blocks)} blocks")
        self.leases.end(session, lease_id)
        stored = []
        for position, block in enumerate(blocks):
            if position in dropped:
                self.cpu.abort(block)
                continue
            self.cpu.commit(block, checksums[position] if checksums is not None else None)
            stored.append(block)
        if stored:
            self.cpu.touch(stored)
            self._stored(stored)
            if self.outbox is not None:
                for block in stored:
                    self.outbox.add(block)
        return len(stored)

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        """Gives reserved slots back. Raises UnknownLease, or InvalidRequest for a read lease."""
        lease = self.leases.get(session, lease_id)
        if not isinstance(lease.pinned, WriteLease):
            raise InvalidRequest(f"lease {lease_id:#x} is for reading; release it")
        self.leases.end(session, lease_id)
        self._undo(lease)

    def _write_lease(self, session: SessionId, lease_id: LeaseId) -> WriteLease:
        lease = self.leases.get(session, lease_id)
        if not isinstance(lease.pinned, WriteLease):
            raise InvalidRequest(f"lease {lease_id:#x} is for reading")
        if lease.late:
            self.leases.end(session, lease_id)
            self._undo(lease)
            raise UnknownLease(f"lease {lease_id:#x} had expired before its commit")
        return lease.pinned

    def _stored(self, blocks: Sequence[Block]) -> None:
        keys = [block.key for block in blocks]
        self.history.forget(keys)
        self.watchers.publish(
            EventKind.STORED, blocks[0].namespace.info.fingerprint, keys, TierName.CPU
        )

    # -- ending leases

    def _undo(self, lease: Lease[Pinned]) -> None:
        """Gives back what a lease that has ended pinned."""
        pinned = lease.pinned
        if isinstance(pinned, ReadLease):
            _unpin(pinned.blocks)
            return
        for block in pinned.blocks:
            if lease.late:
                self.cpu.free_aside(block)
            else:
                self.cpu.abort(block)

    def sweep(self) -> None:
        """Ends the leases whose time is up.

        A reservation's blocks are forgotten, so that others can store them. Its slots are not
        given away while its session lives: a client that was stopped may go on writing to them.
        """
        for lease in self.leases.expire():
            if isinstance(lease.pinned, ReadLease):
                self._undo(lease)
                continue
            for block in lease.pinned.blocks:
                self.cpu.set_aside(block)
            self.leases.keep_aside(lease)
        now_s = self._clock.monotonic_s()
        for lease in [lease for lease in self._orphans if lease.expires_s <= now_s]:
            self._orphans.remove(lease)
            self._undo(lease)

    # -- the rest

    async def clear(
        self, fingerprint: Fingerprint | None = None, *, arena_only: bool = False
    ) -> tuple[int, int]:
        """Drops blocks that nobody has leased; returns how many, in the arena and remotely.

        What is on its way to the remote tier gets there first, within `DRAIN_S_MAX`.
        """
        info = self.namespace(fingerprint).info if fingerprint is not None else None
        if self.outbox is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.outbox.drained(), DRAIN_S_MAX)
        chosen = self.cpu.namespaces if fingerprint is None else [self.namespace(fingerprint)]
        keys = {index: [block.key for block in index] for index in chosen}
        dropped = self.cpu.clear(info)
        dropped_remotely = 0
        if self.remote is not None and not arena_only:
            dropped_remotely = await asyncio.get_running_loop().run_in_executor(
                self._executor, self.remote.clear, info
            )
        for index, before in keys.items():
            gone = [key for key in before if index.get(key) is None]
            if gone:
                self.watchers.publish(EventKind.EVICTED, index.info.fingerprint, gone, TierName.CPU)
            if self.remote is None or not arena_only:
                self.history.note(gone, MissReason.CLEARED)
        return dropped, dropped_remotely

    def tier_status(self) -> list[TierStatus]:
        """The tiers as they are now."""
        tiers = [self.cpu.status()]
        if self.remote is not None:
            tiers.append(self.remote.status())
        return tiers

    async def run(self) -> None:
        """Sweeps, writes through and refreshes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep_forever())
            if self.outbox is not None:
                group.create_task(self.outbox.run())
            if self.remote is not None:
                group.create_task(self._refresh_forever(self.remote))

    async def drain(self) -> None:
        """Waits for fetches and write-through that are under way."""
        await self._inflight.drain()
        if self.outbox is not None:
            await self.outbox.drained()

    async def _sweep_forever(self) -> None:
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def _refresh_forever(self, remote: RemoteTier) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(self._executor, remote.refresh)
            await asyncio.sleep(REFRESH_S)


def _pin(blocks: Iterable[Block | None]) -> None:
    for block in blocks:
        if block is not None:
            block.pins += 1


def _unpin(blocks: Iterable[Block | None]) -> None:
    for block in blocks:
        if block is not None:
            block.pins -= 1
