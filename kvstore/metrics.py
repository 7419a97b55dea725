"""Every metric that `/metrics` shows, by name: the report's numbers for Prometheus.

The collector asks for a snapshot at each scrape, so a metric can't disagree with the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PROMPT_TOKENS = "kvstore_prompt_tokens"
HIT_TOKENS = "kvstore_hit_tokens"
MISS_TOKENS = "kvstore_miss_tokens"
STORED_BLOCKS = "kvstore_stored_blocks"
STORED_BYTES = "kvstore_stored_bytes"
SKIPPED_BLOCKS = "kvstore_skipped_blocks"
REQUESTS = "kvstore_requests"
PREFILL_SAVED_S = "kvstore_prefill_saved_seconds"
LOAD_S = "kvstore_load_seconds"
PREFILL_S = "kvstore_prefill_seconds"
TIER_UP = "kvstore_tier_up"
TIER_CAPACITY_BYTES = "kvstore_tier_capacity_bytes"
TIER_USED_BYTES = "kvstore_tier_used_bytes"
TIER_BLOCKS = "kvstore_tier_blocks"
TIER_EVENTS = "kvstore_tier_events"
CLIENTS = "kvstore_clients"
LEASES = "kvstore_leases"
RESERVED_SLOTS = "kvstore_reserved_slots"
QUARANTINED_SLOTS = "kvstore_quarantined_slots"
WRITE_THROUGH_QUEUE = "kvstore_write_through_queue_blocks"
CALLS = "kvstore_calls"

Document = Mapping[str, Any]


class SnapshotCollector(Collector):
    """Turns the report's document into metrics."""

    def __init__(self, snapshot: Callable[[], Document]):
        """`snapshot` is called on the scraping thread."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        document = self._snapshot()
        yield from _of_models(document["by_model"])
        yield from _of_tiers(document["tiers"])
        control = document["control"]
        yield _gauge(CLIENTS, "Clients attached", document["server"]["clients"])
        yield _gauge(LEASES, "Leases held", control["leases"])
        yield _gauge(RESERVED_SLOTS, "Slots being written", control["reserved_slots"])
        yield _gauge(
            QUARANTINED_SLOTS,
            "Slots kept aside because a late client may still write to them",
            control["quarantined_slots"],
        )
        yield _gauge(
            WRITE_THROUGH_QUEUE, "Blocks waiting for the Redis tier", control["write_through_queue"]
        )
        calls = CounterMetricFamily(CALLS, "gRPC calls", labels=["method"])
        for method, count in control["rpc"].items():
            calls.add_metric([method], count)
        yield calls


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _of_models(by_model: Mapping[str, Document]) -> Iterator[Metric]:
    plain: dict[str, tuple[str, Callable[[Document], float]]] = {
        REQUESTS: ("Requests reported by engines", lambda group: group["requests"]),
        PROMPT_TOKENS: ("Prompt tokens", lambda group: group["prompt"]["tokens"]),
        STORED_BLOCKS: ("Blocks stored", lambda group: group["stored"]["blocks"]),
        STORED_BYTES: ("Bytes stored", lambda group: group["stored"]["bytes"]),
        LOAD_S: ("Seconds spent loading", lambda group: group["load_s"]),
        PREFILL_S: ("Seconds spent in prefill", lambda group: group["prefill_s"]),
    }
    for name, (text, value) in plain.items():
        family = CounterMetricFamily(name, text, labels=["model"])
        for model, group in by_model.items():
            family.add_metric([model], value(group))
        yield family
    # Loading can take longer than computing would have: then this goes down, so it is no counter.
    saved = GaugeMetricFamily(PREFILL_SAVED_S, "Prefill seconds saved, net", labels=["model"])
    for model, group in by_model.items():
        saved.add_metric([model], group["prefill_saved_s"])
    yield saved
    parts = {
        HIT_TOKENS: ("Prompt tokens loaded, by tier", "hits", "tier", "tokens"),
        MISS_TOKENS: ("Prompt tokens computed, by reason", "misses", "reason", "tokens"),
        SKIPPED_BLOCKS: ("Blocks not stored, by reason", "skipped", "reason", "blocks"),
    }
    for name, (text, part, label, unit) in parts.items():
        family = CounterMetricFamily(name, text, labels=["model", label])
        for model, group in by_model.items():
            for key, count in group[part].items():
                family.add_metric([model, key], count[unit])
        yield family


def _of_tiers(tiers: list[Document]) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, Callable[[Document], float]]] = {
        TIER_UP: ("Whether the tier takes part", lambda tier: tier["state"] == "up"),
        TIER_CAPACITY_BYTES: ("Bytes the tier may hold", lambda tier: tier["capacity_bytes"]),
        TIER_USED_BYTES: ("Bytes the tier holds", lambda tier: tier["used_bytes"]),
        TIER_BLOCKS: ("Blocks the tier holds", lambda tier: tier["blocks"]),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(name, text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier["name"]], value(tier))
        yield family
    events = CounterMetricFamily(TIER_EVENTS, "What happened in a tier", labels=["tier", "event"])
    for tier in tiers:
        for event, count in tier["counters"].items():
            events.add_metric([tier["name"], event], count)
    yield events


def registry(snapshot: Callable[[], Document]) -> CollectorRegistry:
    """A registry with these metrics alone."""
    made = CollectorRegistry()
    made.register(SnapshotCollector(snapshot))
    return made
