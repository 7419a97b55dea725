from __future__ import annotations

import json

import pytest

from kvstore.report.ledger import Ledger
from kvstore.report.order import busiest, total, windows
from kvstore.report.snapshot import ControlStatus, History, ServerInfo, Snapshot, snapshot
from kvstore.types import BlockCount, Fingerprint, MissReason, NamespaceInfo, TierName, Usage


class StillClock:
    def monotonic_s(self) -> float:
        return 20.0

    def wall_s(self) -> float:
        return 1_000_000.0


def snapshot_of(*usages: Usage) -> Snapshot:
    ledger = Ledger(StillClock())
    for usage in usages:
        ledger.record(NamespaceInfo(Fingerprint(bytes(32)), 4096, 16, "m", "t"), usage)
    server = ServerInfo("0.1.0", 255, 999_990.0, 10.0, ["127.0.0.1:1"], 1)
    return snapshot(ledger, server, [], [], ControlStatus())


def test_rates_are_hits_of_the_prompt_in_tokens_blocks_and_bytes() -> None:
    usage = Usage(
        requests=1,
        prompt=BlockCount(100, 6, 600),
        hits={TierName.CPU: BlockCount(32, 2, 300), TierName.GPU: BlockCount(16, 1, 150)},
        misses={MissReason.EVICTED: BlockCount(52, 3, 150)},
    )
    for group in (
        snapshot_of(usage)["totals"],
        snapshot_of(usage)["by_model"]["m"],
        snapshot_of(usage)["by_tenant"]["t"],
    ):
        assert group["token_hit_rate"] == pytest.approx(0.48)
        assert group["block_hit_rate"] == pytest.approx(0.5)
        assert group["byte_hit_rate"] == pytest.approx(0.75)


def test_rates_are_null_when_there_is_nothing_to_divide_by() -> None:
    totals = snapshot_of()["totals"]
    assert totals["token_hit_rate"] is None
    assert totals["block_hit_rate"] is None
    assert totals["byte_hit_rate"] is None


def test_a_prompt_without_full_blocks_has_a_token_rate_and_no_block_rate() -> None:
    tail = {MissReason.TAIL: BlockCount(7, 0, 0)}
    totals = snapshot_of(Usage(requests=1, prompt=BlockCount(7, 0, 0), misses=tail))["totals"]
    assert totals["token_hit_rate"] == 0.0
    assert totals["block_hit_rate"] is None


def test_the_document_survives_json_unchanged(busy: Snapshot) -> None:
    assert json.loads(json.dumps(busy, allow_nan=False)) == busy


def test_keys_are_plain_names(busy: Snapshot) -> None:
    assert list(busy["totals"]["hits"]) == ["gpu", "cpu", "redis"]
    assert all(type(key) is str for key in busy["totals"]["misses"])
    assert busy["namespaces"][0]["fingerprint"] == "ab" * 32
    assert busy["server"]["epoch"] == "000000000000beef"


def test_history_has_the_recorded_tokens_by_tier(busy: Snapshot) -> None:
    (point,) = busy["history"]
    assert point["requests"] == busy["totals"]["requests"]
    assert point["prompt_tokens"] == busy["totals"]["prompt"]["tokens"]
    assert point["hit_tokens"] == {
        tier: count["tokens"] for tier, count in busy["totals"]["hits"].items()
    }


def test_the_busiest_groups_come_first_and_the_rest_is_counted(busy: Snapshot) -> None:
    small = snapshot_of(
        Usage(requests=1, prompt=BlockCount(1), misses={MissReason.TAIL: BlockCount(1)})
    )["totals"]
    groups = {"a": small, "z": busy["totals"], "b": small}
    shown, left = busiest(groups, 2)
    assert [name for name, _ in shown] == ["z", "a"]
    assert left == 1


def test_a_window_sums_only_its_buckets() -> None:
    history: list[History] = [
        {"t": t, "requests": 1, "prompt_tokens": 100, "hit_tokens": {"cpu": 10, "gpu": 5}}
        for t in (100.0, 900.0, 990.0)
    ]
    minute, quarter, hour = windows(history, 1000.0, (60, 120, 3600))
    assert (minute.requests, quarter.requests, hour.requests) == (1, 2, 3)
    assert (hour.prompt_tokens, hour.hit_tokens) == (300, 45)


def test_a_total_adds_tokens_blocks_and_bytes_apart() -> None:
    assert total([{"tokens": 1, "blocks": 2, "bytes": 3}] * 2) == {
        "tokens": 2,
        "blocks": 4,
        "bytes": 6,
    }
