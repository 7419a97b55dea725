"""The report is the sum of what engines saw: exactly, once, and also when the server was away."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvstore
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import BlockCount, MissReason, NamespaceInfo, SkipReason, TierName, Usage
from tests.helpers import eventually
from tests.integration.support import chain, info_of, report


def blocks(count: int) -> BlockCount:
    return BlockCount(count * 16, count, count * 4096)


def a_true_usage(chance: random.Random) -> Usage:
    """What one request could have seen; seconds are multiples of 1/8, so that sums are exact."""
    hits = {tier: blocks(chance.randrange(20)) for tier in TierName if chance.random() < 0.6}
    misses = {r: blocks(chance.randrange(9)) for r in MissReason if chance.random() < 0.3}
    misses[MissReason.TAIL] = BlockCount(chance.randrange(1, 17))
    return Usage(
        requests=1,
        prompt=sum([*hits.values(), *misses.values()], BlockCount()),
        output_tokens=chance.randrange(1000),
        hits=hits,
        misses=misses,
        stored=blocks(chance.randrange(9)),
        already_present=blocks(chance.randrange(9)),
        skipped={r: blocks(chance.randrange(5)) for r in SkipReason if chance.random() < 0.3},
        prefill_saved_s=chance.randrange(-8, 80) / 8,
        load_s=chance.randrange(16) / 8,
        prefill_s=chance.randrange(80) / 8,
        total_s=chance.randrange(160) / 8,
    )


def as_group(usage: Usage) -> dict[str, Any]:
    """A usage as the report shows it, but for the rates."""

    def count(one: BlockCount) -> dict[str, int]:
        return {"tokens": one.tokens, "blocks": one.blocks, "bytes": one.bytes}

    return {
        "requests": usage.requests,
        "prompt": count(usage.prompt),
        "output_tokens": usage.output_tokens,
        "hits": {str(tier): count(one) for tier, one in usage.hits.items()},
        "misses": {str(reason): count(one) for reason, one in usage.misses.items()},
        "stored": count(usage.stored),
        "already_present": count(usage.already_present),
        "skipped": {str(reason): count(one) for reason, one in usage.skipped.items()},
        "prefill_saved_s": usage.prefill_saved_s,
        "load_s": usage.load_s,
        "prefill_s": usage.prefill_s,
        "total_s": usage.total_s,
    }


def without_rates(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if not name.endswith("_hit_rate")}


def total(usages: list[Usage]) -> Usage:
    return sum(usages, Usage())


def test_the_report_is_the_sum_of_what_all_clients_recorded(folder: Path) -> None:
    infos = [
        info_of(f"{model} {tenant}", 4096, model=model, tenant=tenant)
        for model in ("llama", "qwen", "gemma")
        for tenant in ("search", "chat")
    ]
    with ServerProcess(folder, "--no-redis", cpu_bytes="8MiB") as server:

        def engine(seed: int) -> list[tuple[NamespaceInfo, Usage]]:
            chance, recorded = random.Random(seed), []
            with kvstore.connect(server.target, share_memory=seed % 2 == 0) as client:
                for _ in range(60):
                    info, usage = chance.choice(infos), a_true_usage(chance)
                    client.open(info).record(usage)
                    recorded.append((info, usage))
            return recorded  # closing has sent the rest

        with ThreadPoolExecutor(4) as pool:
            recorded = [entry for part in pool.map(engine, range(4)) for entry in part]
        with kvstore.connect(server.target) as client:
            document = report(client)
        assert without_rates(document["totals"]) == as_group(total([u for _, u in recorded]))
        for name in ("model", "tenant"):
            groups = document[f"by_{name}"]
            for value in {getattr(info, name) for info in infos}:
                part = total([usage for info, usage in recorded if getattr(info, name) == value])
                assert without_rates(groups[value]) == as_group(part)
            assert sum(group["requests"] for group in groups.values()) == 240
        totals = document["totals"]
        counted = [*totals["hits"].values(), *totals["misses"].values()]
        assert sum(count["tokens"] for count in counted) == totals["prompt"]["tokens"]
        hit = sum(count["tokens"] for count in totals["hits"].values())
        assert totals["token_hit_rate"] == hit / totals["prompt"]["tokens"]
        assert sum(point["requests"] for point in document["history"]) == 240


def requests(client: Store) -> int:
    return int(report(client)["totals"]["requests"])


def test_usage_recorded_while_the_server_is_away_arrives_once_when_it_is_back(
    folder: Path, name: str
) -> None:
    one = Usage(requests=1, prompt=BlockCount(7), misses={MissReason.TAIL: BlockCount(7)})
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="8MiB") as server,
        kvstore.connect(server.target) as client,
    ):
        namespace = client.open(info_of(name, model="m"))
        namespace.record(one)
        eventually(lambda: requests(client) == 1)
        server.kill()
        eventually(lambda: not client.attached)
        for _ in range(5):
            namespace.record(one)
        server.start()
        eventually(lambda: client.attached)
        # Nothing else wakes the client.
        eventually(lambda: requests(client) == 5)
        namespace.record(one)
        eventually(lambda: requests(client) == 6)
        assert report(client)["totals"]["misses"]["tail"]["tokens"] == 42


def test_refused_keys_are_the_reason_of_a_later_miss(other: Store, name: str) -> None:
    namespace, keys = other.open(info_of(name)), chain(name, 3)
    namespace.record(Usage(), refused=keys[:2])
    eventually(lambda: namespace.lookup(keys).miss_reason is MissReason.REFUSED)
    assert namespace.lookup(keys[2:]).miss_reason is MissReason.NEVER_SEEN


def test_an_engines_own_pool_is_the_gpu_tier_while_it_is_attached(
    server: ServerProcess, other: Store, name: str
) -> None:
    one = Usage(requests=1, prompt=BlockCount(1), misses={MissReason.TAIL: BlockCount(1)})

    def gpu() -> tuple[str, int, int]:
        tier = report(other)["tiers"][0]
        return tier["state"], tier["capacity_bytes"], tier["used_bytes"]

    with kvstore.connect(server.target) as engine:
        engine.open(info_of(name)).record(one, pool=(1000, 250))
        eventually(lambda: gpu() == ("up", 1000, 250))
    eventually(lambda: gpu() == ("absent", 0, 0))


def test_usage_that_cannot_be_true_is_refused_and_does_not_block_what_follows(
    other: Store, name: str
) -> None:
    before = requests(other)
    namespace = other.open(info_of(name))
    namespace.record(Usage(requests=5, prompt=BlockCount(10)))
    eventually(lambda: namespace._usage == Usage())
    true = Usage(requests=1, prompt=BlockCount(3), misses={MissReason.TAIL: BlockCount(3)})
    namespace.record(true)
    eventually(lambda: requests(other) == before + 1)
