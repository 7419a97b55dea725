"""What vLLM's own metrics page shows of the store: the session's usage, as counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstore.types import Usage

COUNTERS = {
    "prompt_tokens": (
        "Prompt tokens by result: the tier that they were reused from, or why they were computed.",
        "result",
    ),
    "offered_blocks": (
        "Blocks offered for storing, by result: stored, already_present, or why not.",
        "result",
    ),
    "loaded_bytes": ("Bytes of KV that were loaded, by tier.", "tier"),
    "stored_bytes": ("Bytes of KV that were stored.", None),
    "load_seconds": ("Seconds that requests waited for loads.", None),
    "prefill_saved_seconds": ("Estimated seconds of prefill saved, loading deducted.", None),
}
"""By name: what it counts, and its label, if it has one."""

SEPARATOR = "|"


def flat(usage: Usage) -> Iterator[tuple[str, float]]:
    """A usage as counters: "name|label" and the value."""
    for tier, hit in usage.hits.items():
        yield f"prompt_tokens|{tier}", hit.tokens
        yield f"loaded_bytes|{tier}", hit.bytes
    for why, miss in usage.misses.items():
        yield f"prompt_tokens|{why}", miss.tokens
    yield "offered_blocks|stored", usage.stored.blocks
    yield "offered_blocks|already_present", usage.already_present.blocks
    for reason, skipped in usage.skipped.items():
        yield f"offered_blocks|{reason}", skipped.blocks
    yield "stored_bytes|", usage.stored.bytes
    yield "load_seconds|", usage.load_s
    yield "prefill_saved_seconds|", usage.prefill_saved_s


class UsageStats(KVConnectorStats):
    """Counters of one interval, by "name|label"."""

    @classmethod
    def between(cls, before: Usage, now: Usage) -> UsageStats:
        """What was counted from `before` until `now`."""
        old = dict(flat(before))
        grown = {name: value - old.get(name, 0) for name, value in flat(now)}
        return cls(data={name: value for name, value in grown.items() if value})

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            name.removesuffix(SEPARATOR).replace(SEPARATOR, ":"): round(value, 3)
            for name, value in self.data.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class UsageMetrics(KVConnectorPromMetrics):
    """The counters on vLLM's metrics page, as `vllm:kvstore_…`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(
                name=f"vllm:kvstore_{name}",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (text, label) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, label = key.split(SEPARATOR)
            if value > 0:  # a counter can't take back what a slow load cost
                self._counters[name].labels(*engine, *([label] if label else [])).inc(value)
