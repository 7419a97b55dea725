"""What the connector's scheduler and its workers tell each other, in vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from engine.layout import KVLayout
from engine.transfer import Arrived
from kvstore.client import Stored
from kvstore.types import BlockKey

RequestId = str
Pages = list[int]
"""vLLM's block ids."""
RankKeys = tuple[list[BlockKey], ...]
"""Keys of consecutive blocks, for each rank."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to load into pages of a waiting request."""

    request_id: RequestId
    keys: RankKeys
    pages: Pages
    """For all of these blocks."""
    kept_pages: int
    """So many of the first ones hold what vLLM's own cache had; they may be shared: left alone."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks to store from pages of a finished request."""

    request_id: RequestId
    keys: RankKeys
    parents: tuple[BlockKey | None, ...]
    pages: Pages


@dataclass
class Step(KVConnectorMetadata):
    """To the workers, with each step of the engine."""

    number: int
    idle: bool
    """Whether nothing is computed in this step."""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers, after each step."""

    step: int
    arrived: list[tuple[RequestId, Arrived]] = field(default_factory=list)
    stored: list[tuple[RequestId, Stored]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of two ranks on the same step, as one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            max(self.step, other.step),
            self.arrived + other.arrived,
            self.stored + other.stored,
        )


@dataclass
class WorkerLayout(KVConnectorHandshakeMetadata):
    """From each worker, once: what its KV bytes mean."""

    layout: KVLayout
