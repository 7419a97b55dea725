"""What a plugin talks to: one session an engine, one request a prompt.

    request = session.begin(tokens)             # asks the pool and the store, decides
    loaded = request.load(pool_sink, sink)      # copies; the number of tokens that need no prefill
    ...                                         # the engine computes the rest, and the answer
    request.finish(tokens, source, timing)      # keeps what is worth keeping, and reports

The session knows tokens, keys and blocks; what the bytes are is the plugin's, which gives sinks
and sources. The server's absence shows only in the report. Every request ends with `finish` or
`cancel`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine import planner
from engine.admission import (
    Override,
    StorePolicy,
    decide_store,
    expected_reuse,
)
from engine.costs import CostModel
from engine.hashing import Tokens, block_keys
from engine.layout import KVLayout
from engine.planner import LoadPlan, Run, tier_at
from engine.transfer import StoreJob, Transfer
from kvstore.client import Found, Namespace, Sink, Source, Store, Stored
from kvstore.errors import RequestError
from kvstore.types import (
    BlockCount,
    BlockKey,
    MissReason,
    NamespaceInfo,
    SkipReason,
    TierName,
    TierStatus,
    Usage,
)

log = logging.getLogger("kvstore.engine")

LOAD_TIMEOUT_S_MIN = 1.0
LOAD_TIMEOUT_S_UNKNOWN = 10.0
"""While the engine's prefill has not been measured, there is nothing to compare loading with."""

Tensor = TypeVar("Tensor")
Pooled_co = TypeVar("Pooled_co", covariant=True)


class Pool(Protocol[Pooled_co]):
    """The engine's own blocks, its gpu tier: `kvstore.tiers.gpu.GpuTier`, or nothing."""

    def longest_prefix(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        """How many blocks from the start are here."""
        ...

    def read(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        sink: Callable[[int, Pooled_co], None],
    ) -> int:
        """Hands present blocks to the sink; returns how many."""
        ...

    def write(
        self,
        namespace: NamespaceInfo,
        keys: Sequence[BlockKey],
        source: Callable[[int, Pooled_co], None],
        parent: BlockKey | None = None,
    ) -> object:
        """Keeps blocks that are not here yet."""
        ...

    def status(self) -> TierStatus:
        """How full it is."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """What one request took, in seconds."""

    prefill_s: float
    """From the end of loading to the first token."""
    decode_s: float
    """From the first token to the last."""
    total_s: float
    """The whole request, loading included."""
    alone: bool = True
    """Whether the engine worked on nothing else meanwhile; only then is it a measurement."""


class EngineSession(Generic[Tensor]):
    """One engine's use of the store. Requests may overlap, each used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        layout: KVLayout,
        pool: Pool[Tensor] | None = None,
        costs: CostModel | None = None,
    ):
        """The store stays the caller's to close, after `close`.

        Raises:
            NamespaceConflict, InvalidRequest: the server can't hold this layout's blocks.
        """
        self.layout = layout
        self.pool = pool
        self.namespace: Namespace = store.open(layout.namespace_info())
        self._info = self.namespace.info
        self._costs = costs or CostModel()
        self._lock = threading.Lock()
        self._usage = Usage()
        self._warned = False
        self._transfer = Transfer()

    @property
    def costs(self) -> CostModel:
        """What this engine's work costs, as measured so far."""
        return self._costs

    @property
    def usage(self) -> Usage:
        """What this session has reported so far, as one sum."""
        return self._usage

    def learn(self, observe: Callable[[CostModel], CostModel]) -> None:
        """Replaces the cost model by what `observe` makes of it."""
        with self._lock:
            self._costs = observe(self._costs)

    def begin(
        self,
        tokens: Tokens,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        load: Override = Override.DEFAULT,
    ) -> Request[Tensor]:
        """Looks the prompt up and decides what to load. Pins it until loaded or cancelled.

        `extras` are the ids of what else decides a block's KV: see `engine.hashing`.

        Raises:
            InvalidRequest: a token id is impossible.
        """
        info = self._info
        keys = block_keys(info.fingerprint, tokens, info.block_tokens, extras)
        shape = planner.PromptShape(len(tokens), info.block_tokens, info.block_bytes)
        loadable = keys[: shape.loadable_blocks]
        runs: list[Run] = []
        pooled = self.pool.longest_prefix(info, loadable) if self.pool is not None else 0
        if pooled:
            runs.append((TierName.GPU, pooled))
        found = Found((), None)
        if pooled < len(loadable):
            # What the pool has, the store need not be asked for.
            found = self._lookup(loadable[pooled:])
            runs.extend(found.runs)
        plan = planner.plan_load(
            shape.prompt_tokens,
            info.block_tokens,
            info.block_bytes,
            runs,
            found.miss_reason,
            self._costs,
            load,
        )
        if plan.decision.reason is MissReason.NOT_WORTH_LOADING:
            refused = tier_at(runs, plan.blocks)
            self.learn(lambda costs: costs.after_refused_load(refused))
        return Request(self, keys, plan, pooled, found)

    def _lookup(self, keys: Sequence[BlockKey]) -> Found:
        """Looks up; a server that can't serve this namespace is as good as none."""
        try:
            return self.namespace.lookup(keys)
        except RequestError as error:
            if not self._warned:
                log.error("the kvstore server can't be used: %s", error)
                self._warned = True
            return Found((), MissReason.SERVER_DOWN)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all that was to be stored is; False when that takes longer."""
        return self._transfer.flush(timeout_s)

    def close(self) -> None:
        """Stores what is queued, and ends the session's threads."""
        self._transfer.close()

    def record(self, usage: Usage, refused: Sequence[BlockKey] = ()) -> None:
        """Adds to the server's report, and to `usage`."""
        with self._lock:
            self._usage += usage
        pool = None
        if self.pool is not None:
            status = self.pool.status()
            pool = (status.capacity_bytes, status.used_bytes)
        self.namespace.record(usage, refused, pool)


class Request(Generic[Tensor]):
    """One prompt's way through the engine. Made by `EngineSession.begin`."""

    def __init__(
        self,
        session: EngineSession[Tensor],
        keys: Sequence[BlockKey],
        plan: LoadPlan,
        pooled: int,
        found: Found,
    ):
        self.plan = plan
        self._session = session
        self._keys = keys
        self._pooled = pooled
        self._found = found
        self._loaded: list[Run] = []
        # Until something is loaded, whatever was planned is not: the engine may choose so.
        self._failed: MissReason | None = MissReason.NOT_WORTH_LOADING
        self._load_s = 0.0
        self._released = False

    @property
    def keys(self) -> Sequence[BlockKey]:
        """The keys of the prompt's full blocks."""
        return self._keys

    @property
    def loaded_blocks(self) -> int:
        """Blocks whose prefill the engine skips."""
        return sum(count for _, count in self._loaded)

    def load(self, pool_sink: Callable[[int, Tensor], None], sink: Sink) -> int:
        """Copies the planned blocks to the sinks; returns how many tokens need no prefill.

        Both sinks take a block's position in the prompt. `pool_sink` gets the blocks of the
        engine's pool, `sink` those of the store. What they were given beyond the returned
        tokens is void.
        """
        started_s = time.perf_counter()
        planned = self.plan.blocks
        pool, info = self._session.pool, self._session.namespace.info
        from_pool = min(self._pooled, planned)
        self._failed = None
        if pool is not None and from_pool:
            read = pool.read(info, self._keys[:from_pool], pool_sink)
            self._loaded.append((TierName.GPU, read))
            if read < from_pool:  # evicted by another request since `begin`
                self._failed = MissReason.EVICTED
                planned = read
        if planned > from_pool and self._failed is None:
            self._load_from_store(planned - from_pool, sink)
        self.release()
        self._load_s = time.perf_counter() - started_s
        return self.loaded_blocks * info.block_tokens

    def truncate(self, blocks: int) -> None:
        """Notes that the engine uses only the first `blocks` of what was loaded."""
        if blocks < self.loaded_blocks:
            self._loaded = list(planner.cut_runs(self._loaded, blocks))
            self._failed = MissReason.NOT_WORTH_LOADING

    def _load_from_store(self, count: int, sink: Sink) -> None:
        """Loads the first `count` blocks that the store found, and measures each tier."""
        session, offset = self._session, self._pooled
        started_s = time.perf_counter()
        last_s: dict[TierName, float] = {}
        tiers = [tier for tier, blocks in self._found.runs for _ in range(blocks)]

        def timed(position: int, view: memoryview) -> None:
            sink(position + offset, view)
            last_s[tiers[position]] = time.perf_counter()

        saved_s = self.plan.decision.prefill_saved_s
        known = session.costs.prefill.known_for(count * session.namespace.info.block_tokens)
        timeout_s = max(saved_s, LOAD_TIMEOUT_S_MIN) if known else LOAD_TIMEOUT_S_UNKNOWN
        loaded = session.namespace.load(self._found, timed, count=count, timeout_s=timeout_s)
        self._released = True
        self._loaded.extend(loaded.runs)
        self._failed = loaded.miss_reason
        block_bytes = session.namespace.info.block_bytes
        # Tiers are read one after the other, but not always in the order of the prefix.
        for tier in sorted({tier for tier, _ in loaded.runs}, key=last_s.__getitem__):
            blocks = sum(count for name, count in loaded.runs if name is tier)
            size_bytes, seconds = blocks * block_bytes, last_s[tier] - started_s
            started_s = last_s[tier]

            def observe(
                costs: CostModel,
                tier: TierName = tier,
                size_bytes: int = size_bytes,
                seconds: float = seconds,
            ) -> CostModel:
                return costs.observe_load(tier, size_bytes, seconds)

            session.learn(observe)

    def release(self) -> None:
        """Ends the lookup's lease. Idempotent."""
        if not self._released:
            self._session.namespace.release(self._found)
            self._released = True

    def cancel(self) -> None:
        """Ends a request that came to nothing; it is not counted."""
        self.release()

    def finish(
        self,
        tokens: Tokens,
        source: Source,
        timing: Timing,
        pool_source: Callable[[int, Tensor], None] | None = None,
        override: Override = Override.DEFAULT,
        output_tokens: int | None = None,
    ) -> None:
        """Ends the request: keeps what is worth keeping, and reports what happened.

        `tokens` are those whose KV the engine has: the prompt, then what it generated. The
        sources give a block's bytes by its position in them: `source` on another thread, until
        the session is flushed, `pool_source` during this call. `output_tokens` were generated:
        mostly one more than have their KV, since the last one's is never computed.
        """
        self.release()
        session, info = self._session, self._session.namespace.info
        prompt_tokens = self.plan.shape.prompt_tokens
        keys = self._all_keys(tokens)
        if output_tokens is None:
            output_tokens = len(tokens) - prompt_tokens
        self._learn(timing, output_tokens)
        if session.pool is not None and pool_source is not None:
            try:
                session.pool.write(info, keys, pool_source)
            except Exception:
                # The answer is there. A device that ran out of memory must not take it back.
                log.exception("keeping %d blocks in the engine's pool failed", len(keys))
        hits, misses = self.plan.settle(self._loaded, self._failed)
        loaded_tokens = self.loaded_blocks * info.block_tokens
        session.record(
            Usage(
                requests=1,
                prompt=self.plan.shape.total(),
                output_tokens=output_tokens,
                hits=hits,
                misses=misses,
                prefill_saved_s=session.costs.saved_s(loaded_tokens, 0) - self._load_s,
                load_s=self._load_s,
                prefill_s=timing.prefill_s,
                total_s=timing.total_s,
            )
        )
        self._store(keys, len(tokens), source, timing.total_s, override)

    def _all_keys(self, tokens: Tokens) -> list[BlockKey]:
        info = self._session.namespace.info
        done = len(self._keys)
        parent = self._keys[-1] if self._keys else info.fingerprint
        rest = block_keys(parent, tokens[done * info.block_tokens :], info.block_tokens)
        return [*self._keys, *rest]

    def _learn(self, timing: Timing, output_tokens: int) -> None:
        if not timing.alone:
            return
        context = self.loaded_blocks * self._session.namespace.info.block_tokens
        computed = self.plan.shape.prompt_tokens - context

        def observe(costs: CostModel) -> CostModel:
            costs = costs.observe_prefill(computed, context, timing.prefill_s)
            if output_tokens > 1:
                costs = costs.observe_decode(output_tokens - 1, timing.decode_s)
            return costs

        self._session.learn(observe)

    def _store(
        self,
        keys: Sequence[BlockKey],
        sequence_tokens: int,
        source: Source,
        request_s: float,
        override: Override,
    ) -> None:
        """Decides, and queues the blocks that are to be stored."""
        session, info = self._session, self._session.namespace.info
        present = self._found.blocks
        computed_from = self.loaded_blocks * info.block_tokens
        # The pool's blocks were never asked for in the store: they are offered with the rest.
        first, count = planner.storable_blocks(
            sequence_tokens, computed_from, 0 if self._pooled else present, info.block_tokens
        )
        if not count:
            return
        first_token, end_token = first * info.block_tokens, (first + count) * info.block_tokens
        decision = decide_store(
            session.costs,
            StorePolicy(override),
            count * info.block_tokens,
            first_token,
            info.block_bytes,
            info.block_tokens,
            expected_reuse(first_token, self.plan.shape.prompt_tokens, end_token),
            request_s,
        )
        if decision.reason is not None:
            skipped = self._count(count)
            session.record(Usage(skipped={decision.reason: skipped}), keys[first:])
            if decision.reason is SkipReason.COSTS_MORE_THAN_IT_SAVES:
                session.learn(lambda costs: costs.after_refused_store())
            return
        started_s = time.perf_counter()

        def shifted(position: int, view: memoryview) -> None:
            source(position + first, view)

        parent = keys[first - 1] if first else None
        session._transfer.store(
            StoreJob(session.namespace, keys[first:], shifted, parent, self._stored)
        )
        waited_s = time.perf_counter() - started_s
        session.learn(lambda costs: costs.observe_store(count * info.block_bytes, waited_s))

    def _stored(self, stored: Stored) -> None:
        skipped: dict[SkipReason, BlockCount] = {
            reason: self._count(blocks) for reason, blocks in stored.skipped.items()
        }
        self._session.record(
            Usage(
                stored=self._count(stored.stored),
                already_present=self._count(stored.present),
                skipped=skipped,
            )
        )

    def _count(self, blocks: int) -> BlockCount:
        return self.plan.shape.count(blocks)
