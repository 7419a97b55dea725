"""The class that vLLM loads: each method passes a call on to the side that it concerns."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvstore
from engine.plugins.vllm import identity
from engine.plugins.vllm.messages import Step, WorkerLayout, WorkerReport
from engine.plugins.vllm.metrics import UsageMetrics, UsageStats
from engine.plugins.vllm.options import Options
from engine.plugins.vllm.scheduler import SchedulerSide
from engine.plugins.vllm.worker import WorkerSide
from kvstore.errors import ConfigError
from kvstore.types import TierName

log = logging.getLogger("kvstore.vllm")

_SOURCES = {TierName.CPU: CacheHitSource.HOST}


class KVStoreConnector(KVConnectorBase_V1):
    """kvstore as vLLM's KV connector. Loads run between steps; saves after a request's end."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        """Raises UnsupportedModel or ConfigError when this engine can't be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = Options.parse(transfer.kv_connector_extra_config)
        if transfer.kv_role != "kv_both":
            # Only then does vLLM keep pages that a step under way may still write from loads.
            raise ConfigError(f'kvstore needs "kv_role": "kv_both", not {transfer.kv_role!r}')
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._pool: BlockPool | None = None
        identity.check_supported(vllm_config, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self._store = kvstore.connect(self._options.target, wait_s=0, quiet=True)
            self._worker = WorkerSide(self._store, self._options)
            return
        self._store = kvstore.connect(self._options.target)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r: a request whose KV can't be loaded will end in an "
                'error. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
                transfer.kv_load_failure_policy,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a miss later, no more."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return None if self._worker.layout is None else WorkerLayout(self._worker.layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self._worker.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before a request is computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves begin when a request has ended."""

    def wait_for_save(self) -> None:
        """vLLM keeps the pages until `get_finished` names the request."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        saved, loaded = self._worker.finished()
        return saved or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_bad_pages()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        assert self._worker is not None
        return self._worker.take_report()

    # -- scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        layouts = []
        for _, worker in sorted(metadata.items()):
            assert isinstance(worker, WorkerLayout)
            layouts.append(worker.layout)
        page_tokens = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._scheduler = SchedulerSide(self._store, self._options, layouts, page_tokens)
        if self._pool is not None:
            self._scheduler.watch_pool(self._pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.watch_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self._scheduler.sources(request).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        if self._scheduler is None:
            return Step(0, idle=False)
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.output(report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        return self._scheduler is None or self._scheduler.reset()

    # -- both

    def get_kv_connector_stats(self) -> UsageStats | None:
        if self._scheduler is None:
            return None
        stats = UsageStats.between(*self._scheduler.take_usage())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> UsageStats | None:
        return UsageStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> UsageMetrics:
        return UsageMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._store.close()


__all__ = ["KVStoreConnector"]
