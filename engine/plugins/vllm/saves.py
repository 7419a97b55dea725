"""The saves of one engine, sent to its workers: what they have taken on, and how it came out.

vLLM keeps a request's pages until its save has ended, so they are counted: a server that takes
its time must not take the memory in which other requests are to be computed.
"""

from __future__ import annotations

import math

from engine.plugins.vllm.messages import Pages, RequestId, SaveJob
from engine.transfer import StoreJob
from kvstore.client import Stored
from kvstore.types import SkipReason

HELD_SHARE_MAX = 0.5
"""Share of vLLM's pages that may wait for being stored. A single save may be of any size."""


class Saves:
    """Sends store jobs to the workers, and hears from them. A `Storing` of pages."""

    def __init__(self, page_tokens: int, block_tokens: int, ranks: int):
        self._pages_a_block = block_tokens // page_tokens
        self._ranks = ranks
        self._jobs: dict[RequestId, StoreJob[tuple[RequestId, Pages]]] = {}
        self._heard: dict[RequestId, list[Stored]] = {}
        self._unsent: list[SaveJob] = []
        self._held = 0
        self.pool_pages: float = math.inf
        """How many pages vLLM has, once that is known."""

    def store(self, job: StoreJob[tuple[RequestId, Pages]]) -> bool:
        """Queues a store; False when too many pages wait for theirs, and `done` was called."""
        request_id, pages = job.source
        held = self._held + len(pages)
        if self._held and held > HELD_SHARE_MAX * self.pool_pages:
            refused = Stored()
            refused.skip(SkipReason.QUEUE_FULL, len(job.keys[0]))
            job.done(refused)
            return False
        self._held = held
        start = job.first * self._pages_a_block
        end = start + len(job.keys[0]) * self._pages_a_block
        self._jobs[request_id] = job
        self._unsent.append(
            SaveJob(request_id, tuple(map(list, job.keys)), job.parents, pages[start:end])
        )
        return True

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._jobs

    def take(self) -> list[SaveJob]:
        """The jobs to be sent with this step."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def heard(self, request_id: RequestId, stored: Stored) -> None:
        """A rank has ended its part. What counts is the rank that kept least."""
        heard = self._heard.setdefault(request_id, [])
        heard.append(stored)
        if len(heard) == self._ranks:
            del self._heard[request_id]
            job = self._jobs.pop(request_id)
            self._held -= len(job.source[1])
            job.done(min(heard, key=lambda one: one.stored + one.present))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Only the engine's next step sends jobs, so there is nothing to wait for."""
        return not self._jobs

    def close(self) -> None:
        """The workers end their own parts."""
