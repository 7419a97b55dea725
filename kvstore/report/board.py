"""Gathers what the report shows: what engines saw, and how the store is now.

Used within the server's event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvstore.clock import Clock
from kvstore.leases import SessionId
from kvstore.report.ledger import Ledger
from kvstore.report.snapshot import (
    ControlStatus,
    NamespaceStatus,
    ServerInfo,
    Snapshot,
    snapshot,
)
from kvstore.store import Store
from kvstore.types import (
    Decision,
    Fingerprint,
    NamespaceInfo,
    TierName,
    TierState,
    TierStatus,
    Usage,
)

DECISIONS_KEPT = 1000


class Board:
    """The numbers of one server."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        version: str,
        epoch: int,
        targets: Sequence[str],
        calls: Callable[[], Mapping[str, int]],
    ):
        self._store = store
        self._clock = clock
        self._version = version
        self._epoch = epoch
        self._targets = targets
        self._calls = calls
        self._ledger = Ledger(clock)
        self._started_wall_s = clock.wall_s()
        self._started_s = clock.monotonic_s()
        self._engines: dict[SessionId, tuple[int, int]] = {}
        self._costs: dict[Fingerprint, str] = {}
        self._decisions: deque[tuple[float, NamespaceInfo, Decision]] = deque(maxlen=DECISIONS_KEPT)

    def record(
        self,
        info: NamespaceInfo,
        usage: Usage,
        decisions: Sequence[Decision] = (),
        costs: str = "",
    ) -> None:
        """Adds what an engine saw, decided and measured. Raises InvalidRequest for impossible."""
        self._ledger.record(info, usage)
        now_s = self._clock.wall_s()
        self._decisions.extend((now_s, info, decision) for decision in decisions)
        if costs:
            self._costs[info.fingerprint] = costs

    def costs_of(self, namespace: Fingerprint) -> str:
        """What an engine of this namespace has measured last; empty when none has told."""
        return self._costs.get(namespace, "")

    def explain(self, last: int = 0) -> list[dict[str, Any]]:
        """The last decisions, the latest first."""
        kept = list(self._decisions)[-last:]
        return [
            {"at": at_s, "model": info.model, "tenant": info.tenant, **asdict(decision)}
            for at_s, info, decision in reversed(kept)
        ]

    def note_engine(self, session: SessionId, capacity_bytes: int, used_bytes: int) -> None:
        """Notes how full an engine's own pool, its gpu tier, is now."""
        self._engines[session] = (capacity_bytes, used_bytes)

    def forget_engine(self, session: SessionId) -> None:
        """An engine has gone, and its gpu tier with it."""
        self._engines.pop(session, None)

    def snapshot(self) -> Snapshot:
        """The report's document."""
        store = self._store
        server = ServerInfo(
            self._version,
            self._epoch,
            self._started_wall_s,
            self._clock.monotonic_s() - self._started_s,
            self._targets,
            store.leases.sessions,
        )
        namespaces = [
            NamespaceStatus(index.info, len(index), len(index) * index.info.block_bytes)
            for index in store.cpu.namespaces
        ]
        control = ControlStatus(
            leases=len(store.leases),
            reserved_slots=sum(1 for index in store.cpu.namespaces for _ in index.pending),
            quarantined_slots=store.cpu.set_aside_slots,
            write_through_queue=len(store.outbox) if store.outbox is not None else 0,
            rpc=self._calls(),
        )
        return snapshot(self._ledger, server, self._tiers(), namespaces, control)

    def _tiers(self) -> list[TierStatus]:
        capacity = sum(capacity for capacity, _ in self._engines.values())
        used = sum(used for _, used in self._engines.values())
        state = TierState.UP if self._engines else TierState.ABSENT
        tiers = [TierStatus(TierName.GPU, state, capacity, used, 0)]
        tiers.extend(self._store.tier_status())
        if self._store.remote is None:
            tiers.append(TierStatus(TierName.REDIS, TierState.ABSENT, 0, 0, 0))
        return tiers
