"""The connector in a worker: copies between vLLM's pages and the store, in the background."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from engine.layout import KVLayout
from engine.plugins.vllm import identity
from engine.plugins.vllm.messages import LoadJob, RequestId, SaveJob, Step, WorkerReport
from engine.plugins.vllm.options import Options
from engine.plugins.vllm.paged import PagedCache, Scatter
from engine.transfer import Arrived, StoreJob, Transfer
from kvstore.client import Loaded, Namespace, Store, Stored
from kvstore.types import MissReason

log = logging.getLogger("kvstore.vllm")

IDLE_WAIT_S = 0.005
"""As long as a request that arrives meanwhile may have to wait."""


class WorkerSide:
    """Carries out what the scheduler's side decided, and reports how it came out.

    Its methods are called on the worker's thread, in the order of vLLM's steps.
    """

    def __init__(self, store: Store, options: Options):
        self._store = store
        self._options = options
        self._layout: KVLayout | None = None
        self._cache: PagedCache | None = None
        self._namespace: Namespace | None = None
        self._transfer: Transfer | None = None
        self._step = Step(0, idle=False)
        # The transfer's threads put what they have done, the worker's thread takes it.
        self._done: SimpleQueue[tuple[LoadJob, Arrived] | tuple[SaveJob, Stored]] = SimpleQueue()
        self._under_way = 0
        self._report = WorkerReport(0)
        self._bad_pages: set[int] = set()

    def register(
        self, config: VllmConfig, kv_cache: KVCacheConfig, layers: Mapping[str, torch.Tensor]
    ) -> None:
        """Takes the KV caches of all layers, by name.

        Raises:
            UnsupportedModel: this engine's KV can't be stored; the message says why.
        """
        identity.check_supported(config, kv_cache)
        group = kv_cache.kv_cache_groups[0]
        named = {name: layers[name] for name in group.layer_names}
        self._layout = identity.layout_of(config, kv_cache, named, self._options)
        pages_a_block = self._layout.block_tokens // group.kv_cache_spec.block_size
        self._cache = PagedCache(
            list(named.values()), kv_cache.num_blocks, pages_a_block, staged=None
        )
        assert self._cache.block_bytes == self._layout.block_bytes
        self._namespace = self._store.open(self._layout.namespace_info())
        self._transfer = Transfer(self._namespace)

    @property
    def layout(self) -> KVLayout | None:
        """What this worker's KV bytes mean; None before the caches are registered."""
        return self._layout

    def start(self, step: Step) -> None:
        """Starts a step's loads and saves."""
        self._step = step
        self._under_way += len(step.loads) + len(step.saves)
        for load in step.loads:
            self._load(load)
        for save in step.saves:
            self._save(save)

    def _load(self, job: LoadJob) -> None:
        assert self._cache is not None
        assert self._transfer is not None
        assert self._layout is not None
        keys = job.keys[self._layout.tensor_rank]
        scatter = self._cache.scatter(job.pages, job.kept_pages)
        future = self._transfer.load(keys, scatter.sink, job.timeout_s)
        # Whatever happens, the outcome must come: vLLM waits for it.
        future.add_done_callback(lambda done: self._done.put((job, _outcome(done, scatter))))

    def _save(self, job: SaveJob) -> None:
        assert self._cache is not None
        assert self._transfer is not None
        assert self._layout is not None
        rank = self._layout.tensor_rank
        keys = job.keys[rank]
        self._transfer.store(
            StoreJob(
                (keys,),
                (job.parents[rank],),
                0,
                self._cache.gather(job.pages).source,
                len(keys) * self._cache.block_bytes,
                lambda stored: self._done.put((job, stored)),
            )
        )

    def finished(self) -> tuple[set[RequestId], set[RequestId]]:
        """The requests whose saves, and those whose loads, have ended since the last call."""
        saved: set[RequestId] = set()
        loaded: set[RequestId] = set()
        # The engine repeats empty steps while requests wait for loads. Waiting here instead
        # leaves the interpreter to the threads that load.
        wait_s = IDLE_WAIT_S if self._step.idle and self._under_way else 0.0
        while True:
            try:
                job, outcome = self._done.get(timeout=wait_s)
            except Empty:
                return saved, loaded
            wait_s = 0.0
            self._under_way -= 1
            if isinstance(outcome, Stored):
                saved.add(job.request_id)
                self._report.stored.append((job.request_id, outcome))
            else:
                assert isinstance(job, LoadJob)
                loaded.add(job.request_id)
                self._report.arrived.append((job.request_id, outcome))
                self._bad_pages.update(self._missing(job, outcome))

    def _missing(self, job: LoadJob, arrived: Arrived) -> list[int]:
        assert self._cache is not None
        blocks = arrived.loaded.blocks
        start = blocks * self._cache.pages_a_block if blocks else job.kept_pages
        return job.pages[start:]

    def take_bad_pages(self) -> set[int]:
        """Pages that were to be loaded and were not, since the last call."""
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def take_report(self) -> WorkerReport:
        """What happened since the last call."""
        report, self._report = self._report, WorkerReport(0)
        report.step = self._step.number
        return report

    def close(self) -> None:
        """Stores what is queued, and ends the threads."""
        if self._transfer is not None:
            self._transfer.close()


def _outcome(done: Future[Arrived], scatter: Scatter) -> Arrived:
    """What a load came to. A load that broke is one that brought nothing."""
    try:
        arrived = done.result()
        scatter.finish()
    except Exception:
        log.exception("loading failed; the engine computes instead")
        return Arrived(Loaded((), MissReason.FAILED), 0.0)
    return arrived
