"""Two snapshots that the report's tests look at: a busy server's and a fresh one's."""

from __future__ import annotations

import pytest

from kvstore.report.ledger import Ledger
from kvstore.report.snapshot import (
    ControlStatus,
    NamespaceStatus,
    ServerInfo,
    Snapshot,
    snapshot,
)
from kvstore.types import (
    BlockCount,
    Fingerprint,
    MissReason,
    NamespaceInfo,
    SkipReason,
    TierName,
    TierState,
    TierStatus,
    Usage,
)

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e\"'&"


class StillClock:
    def monotonic_s(self) -> float:
        return 5000.0

    def wall_s(self) -> float:
        return 1_700_000_000.0


def _blocks(count: int) -> BlockCount:
    return BlockCount(count * 16, count, count * 4096)


@pytest.fixture
def hostile_name() -> str:
    """The name of one model and tenant of `busy`."""
    return HOSTILE


@pytest.fixture
def busy() -> Snapshot:
    """Every tier, miss reason and skip reason, in two models, one with a hostile name."""
    ledger = Ledger(StillClock())
    info = NamespaceInfo(Fingerprint(b"\xab" * 32), 4096, 16, "llama", "search")
    hostile = NamespaceInfo(Fingerprint(b"\xcd" * 32), 4096, 16, HOSTILE, HOSTILE)
    hits = {tier: _blocks(100 * n) for n, tier in enumerate(TierName, 1)}
    misses = {reason: _blocks(10 * n) for n, reason in enumerate(MissReason, 1)}
    usage = Usage(
        requests=7,
        prompt=sum([*hits.values(), *misses.values()], BlockCount()),
        output_tokens=70,
        hits=hits,
        misses=misses,
        stored=_blocks(30),
        already_present=_blocks(20),
        skipped={reason: _blocks(n) for n, reason in enumerate(SkipReason, 1)},
        prefill_saved_s=12.5,
        load_s=1.5,
        prefill_s=30.0,
        total_s=60.0,
    )
    ledger.record(info, usage)
    ledger.record(hostile, usage)
    return snapshot(
        ledger,
        ServerInfo("1.2.3", 0xBEEF, 1_699_990_000.0, 10_000.0, ["127.0.0.1:7707"], 2),
        [
            TierStatus(TierName.GPU, TierState.ABSENT, 0, 0, 0),
            TierStatus(TierName.CPU, TierState.UP, 1 << 30, 1 << 29, 131_072, {"evictions": 42}),
            TierStatus(TierName.REDIS, TierState.DOWN, 0, 4096, 1),
        ],
        [NamespaceStatus(info, 10, 40_960), NamespaceStatus(hostile, 5, 20_480)],
        ControlStatus(3, 4, 5, 6, {"Lookup": 99, "Commit": 0}),
    )


@pytest.fixture
def fresh() -> Snapshot:
    """A server that nothing was reported to."""
    return snapshot(
        Ledger(StillClock()),
        ServerInfo("1.2.3", 1, 1_699_999_990.0, 10.0, [], 0),
        [TierStatus(TierName.CPU, TierState.UP, 1 << 30, 0, 0)],
        [],
        ControlStatus(),
    )
