"""What a plugin talks to: one session an engine, one request a prompt.

    request = session.begin(tokens)             # asks the pool and the store, decides
    loaded = request.load(pool_sink, sink)      # copies; the number of tokens that need no prefill
    ...                                         # the engine computes the rest, and the answer
    request.finish(tokens, source, timing)      # keeps what is worth keeping, and reports

The session knows tokens, keys and blocks; what the bytes are is the plugin's, which gives sinks
and sources. The server's absence shows only in the report. Every request ends with `finish` or
`cancel`.

An engine that decides in one process and computes in others, one a rank, uses the parts: in
place of `begin` it calls `look_up`, on a thread of its own, and `plan`; in place of `load`,
`take_pool` and `arrived`, when its ranks have loaded; and it gives the session a `Storing` that
sends store jobs to the ranks. A rank's block is of use only where all ranks have it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

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
from engine.transfer import Arrived, StoreJob, Storing, Transfer
from engine.transfer import load as load_measured
from kvstore.client import Found, Namespace, Sink, Store, Stored
from kvstore.errors import InvalidRequest, RequestError
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

STORE_TIERS = (TierName.CPU, TierName.REDIS)
"""From near to far."""

Extras = Mapping[int, Sequence[bytes]]
"""By a block's position, the ids of what else decides its KV: see `engine.hashing`."""

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


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What the store has of a prompt, for each rank of the engine."""

    prompt_tokens: int
    keys: tuple[Sequence[BlockKey], ...]
    """By rank, of the prompt's full blocks."""
    first: int
    """The first block that was asked for; those before it are the engine's own."""
    found: tuple[Found, ...]
    """By rank, from `first` on."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The prefix that all ranks have, each block in the farthest tier of any rank."""
        if len(self.found) == 1:
            return self.found[0].runs
        by_rank = [
            [tier for tier, count in found.runs for _ in range(count)] for found in self.found
        ]
        farthest = [max(tiers, key=STORE_TIERS.index) for tiers in zip(*by_rank, strict=False)]
        return tuple((tier, len(list(run))) for tier, run in groupby(farthest))

    @property
    def blocks(self) -> int:
        """How many blocks, from `first` on, all ranks have."""
        return min(found.blocks for found in self.found)

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the block after them isn't there; None when all that was asked for is."""
        return min(self.found, key=lambda found: found.blocks).miss_reason


class EngineSession(Generic[Tensor]):
    """One engine's use of the store. Requests may overlap, each used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        layout: KVLayout | Sequence[KVLayout],
        pool: Pool[Tensor] | None = None,
        costs: CostModel | None = None,
        storing: Storing[Any] | None = None,
    ):
        """The store stays the caller's to close, after `close`.

        `layout` is one for each rank of the engine, all with the same number of tokens a block.
        With several ranks, or ranks in other processes, give `storing`.

        Raises:
            NamespaceConflict, InvalidRequest: the server can't hold these layouts' blocks.
        """
        layouts = [layout] if isinstance(layout, KVLayout) else list(layout)
        self.layout = layouts[0]
        if any(one.block_tokens != self.layout.block_tokens for one in layouts):
            raise InvalidRequest("the ranks of an engine have the same number of tokens a block")
        self.pool = pool
        self.pool_use: Callable[[], tuple[int, int]] | None = None
        """Capacity and use, in bytes, of a pool that the engine manages by itself."""
        if pool is not None:
            self.pool_use = lambda: (pool.status().capacity_bytes, pool.status().used_bytes)
        self.ranks: list[Namespace] = [store.open(one.namespace_info()) for one in layouts]
        self.block_bytes = sum(rank.info.block_bytes for rank in self.ranks)
        self._costs = costs or CostModel()
        self._lock = threading.Lock()
        self._usage = Usage()
        self._warned = False
        self._storing = Transfer(self.namespace) if storing is None else storing

    @property
    def namespace(self) -> Namespace:
        """The first rank's, which the engine's usage is counted in."""
        return self.ranks[0]

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
        self, tokens: Tokens, extras: Extras | None = None, load: Override = Override.DEFAULT
    ) -> Request[Tensor]:
        """Looks the prompt up and decides what to load. Pins it until loaded or cancelled.

        Raises:
            InvalidRequest: a token id is impossible.
        """
        keys = self.keys_of(tokens, extras)
        pooled = 0
        if self.pool is not None:
            loadable = self._shape(len(tokens)).loadable_blocks
            pooled = self.pool.longest_prefix(self.namespace.info, keys[0][:loadable])
        # What the pool has, the store need not be asked for.
        looked_up = self.look_up(len(tokens), keys, pooled)
        return self.plan(looked_up, pooled * self.layout.block_tokens, load)

    def keys_of(self, tokens: Tokens, extras: Extras | None = None) -> tuple[list[BlockKey], ...]:
        """The keys of the full blocks of `tokens`, by rank.

        Raises:
            InvalidRequest: a token id is impossible.
        """
        return tuple(
            block_keys(rank.info.fingerprint, tokens, rank.info.block_tokens, extras)
            for rank in self.ranks
        )

    def look_up(
        self, prompt_tokens: int, keys: tuple[Sequence[BlockKey], ...], first: int = 0
    ) -> LookedUp:
        """Asks the store for a prompt's loadable blocks from `first` on, and pins what it has."""
        end = self._shape(prompt_tokens).loadable_blocks
        found = tuple(
            self._find(rank, rank_keys[first:end]) if first < end else Found((), None)
            for rank, rank_keys in zip(self.ranks, keys, strict=True)
        )
        return LookedUp(prompt_tokens, keys, first, found)

    def plan(
        self, looked_up: LookedUp, pool_tokens: int = 0, load: Override = Override.DEFAULT
    ) -> Request[Tensor]:
        """Decides what to load of what was found; the engine has the first `pool_tokens` itself.

        May be called again with the same lookup; only one of the requests is to be used.
        """
        pooled = pool_tokens // self.layout.block_tokens
        runs = [(TierName.GPU, pooled)] if pooled else []
        runs.extend(planner.runs_after(looked_up.runs, pooled - looked_up.first))
        plan = planner.plan_load(
            looked_up.prompt_tokens,
            self.layout.block_tokens,
            self.block_bytes,
            runs,
            looked_up.miss_reason,
            self._costs,
            load,
            pool_tokens,
            settled_blocks=pooled if self.pool is None else 0,
        )
        return Request(self, looked_up, plan, pooled)

    def release(self, looked_up: LookedUp) -> None:
        """Unpins what a lookup found."""
        for rank, found in zip(self.ranks, looked_up.found, strict=True):
            rank.release(found)

    def _shape(self, prompt_tokens: int) -> planner.PromptShape:
        return planner.PromptShape(prompt_tokens, self.layout.block_tokens, self.block_bytes)

    def _find(self, rank: Namespace, keys: Sequence[BlockKey]) -> Found:
        """Looks up; a server that can't serve this namespace is as good as none."""
        try:
            return rank.lookup(keys)
        except RequestError as error:
            if not self._warned:
                log.error("the kvstore server can't be used: %s", error)
                self._warned = True
            return Found((), MissReason.SERVER_DOWN)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all that was to be stored is; False when that takes longer."""
        return self._storing.flush(timeout_s)

    def close(self) -> None:
        """Stores what is queued, and ends the session's threads."""
        self._storing.close()

    def record(self, usage: Usage, refused: Sequence[BlockKey] = ()) -> None:
        """Adds to the server's report, and to `usage`."""
        with self._lock:
            self._usage += usage
        pool = None if self.pool_use is None else self.pool_use()
        self.namespace.record(usage, refused, pool)


class Request(Generic[Tensor]):
    """One prompt's way through the engine. Made by `EngineSession.begin`, or `plan`."""

    def __init__(
        self,
        session: EngineSession[Tensor],
        looked_up: LookedUp,
        plan: LoadPlan,
        pooled: int,
    ):
        self.plan = plan
        self._session = session
        self._looked_up = looked_up
        self._pooled = pooled
        self._loaded: list[Run] = []
        # Until something is loaded, whatever was planned is not: the engine may choose so.
        self._failed: MissReason | None = MissReason.NOT_WORTH_LOADING
        self._load_s = 0.0
        self._released = False

    @property
    def keys(self) -> Sequence[BlockKey]:
        """The keys of the prompt's full blocks, for the first rank."""
        return self._looked_up.keys[0]

    @property
    def pooled_blocks(self) -> int:
        """Blocks that the engine has itself; those planned after them come from the store."""
        return self._pooled

    @property
    def loaded_blocks(self) -> int:
        """Blocks whose prefill the engine skips."""
        return planner.count_of(self._loaded)

    def load(self, pool_sink: Callable[[int, Tensor], None], sink: Sink) -> int:
        """Copies the planned blocks to the sinks; returns how many tokens need no prefill.

        Both sinks take a block's position in the prompt. `pool_sink` gets the blocks of the
        engine's pool, `sink` those of the store. What they were given beyond the returned
        tokens is void.
        """
        started_s = time.perf_counter()
        session, info = self._session, self._session.namespace.info
        from_pool = min(self._pooled, self.plan.blocks)
        read = 0
        if session.pool is not None and from_pool:
            read = session.pool.read(info, self.keys[:from_pool], pool_sink)
        self.take_pool(read)
        if read < from_pool:  # evicted by another request since the lookup
            self._failed = MissReason.EVICTED
        elif self.plan.blocks > from_pool:
            offset = self._pooled
            self._released = True
            self.arrived(
                load_measured(
                    session.namespace,
                    self._looked_up.found[0],
                    lambda position, view: sink(position + offset, view),
                    self.plan.blocks - from_pool,
                    self.load_timeout_s,
                )
            )
        self.release()
        self._load_s = time.perf_counter() - started_s
        return self.loaded_blocks * info.block_tokens

    @property
    def load_timeout_s(self) -> float:
        """Seconds after which computing would have been quicker than going on to load."""
        blocks = self.plan.blocks - self._pooled
        known = self._session.costs.prefill.known_for(blocks * self.plan.shape.block_tokens)
        if not known:
            return LOAD_TIMEOUT_S_UNKNOWN
        return max(self.plan.decision.prefill_saved_s, LOAD_TIMEOUT_S_MIN)

    def take_pool(self, blocks: int) -> None:
        """Notes that the engine uses its own first `blocks`, and has loaded nothing yet."""
        self._loaded = [(TierName.GPU, blocks)] if blocks else []
        self._failed = MissReason.NOT_WORTH_LOADING if blocks < self.plan.blocks else None

    def arrived(self, arrived: Arrived) -> None:
        """Notes what the store gave of the planned blocks, and learns what that took."""
        self._loaded.extend(arrived.loaded.runs)
        self._failed = arrived.loaded.miss_reason
        self._load_s = arrived.load_s
        for tier, size_bytes, seconds in arrived.tiers:

            def observe(
                costs: CostModel,
                tier: TierName = tier,
                size_bytes: int = size_bytes,
                seconds: float = seconds,
            ) -> CostModel:
                return costs.observe_load(tier, size_bytes, seconds)

            self._session.learn(observe)

    def truncate(self, blocks: int) -> None:
        """Notes that the engine uses only the first `blocks` of what was loaded."""
        if blocks < self.loaded_blocks:
            self._loaded = list(planner.cut_runs(self._loaded, blocks))
            self._failed = MissReason.NOT_WORTH_LOADING

    def release(self) -> None:
        """Ends the lookup's lease. Idempotent."""
        if not self._released:
            self._session.release(self._looked_up)
            self._released = True

    def cancel(self) -> None:
        """Ends a request that came to nothing; it is not counted."""
        self.release()

    def finish(
        self,
        tokens: Tokens,
        source: Any,
        timing: Timing,
        pool_source: Callable[[int, Tensor], None] | None = None,
        override: Override = Override.DEFAULT,
        output_tokens: int | None = None,
        extras: Extras | None = None,
    ) -> None:
        """Ends the request: keeps what is worth keeping, and reports what happened.

        `tokens` are those whose KV the engine has: the prompt, then what it generated. The
        sources give a block's bytes by its position in them: `source`, a `Source` unless the
        session has a `Storing` of another kind, on another thread, until the session is
        flushed; `pool_source` during this call. `output_tokens` were generated: mostly one more
        than have their KV, since the last one's is never computed. `extras` are of all `tokens`.
        """
        self.release()
        session, info = self._session, self._session.namespace.info
        prompt_tokens = self.plan.shape.prompt_tokens
        keys = self._all_keys(tokens, extras)
        if output_tokens is None:
            output_tokens = len(tokens) - prompt_tokens
        self._learn(timing, output_tokens)
        if session.pool is not None and pool_source is not None:
            try:
                session.pool.write(info, keys[0], pool_source)
            except Exception:
                # The answer is there. A device that ran out of memory must not take it back.
                log.exception("keeping %d blocks in the engine's pool failed", len(keys[0]))
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

    def _all_keys(self, tokens: Tokens, extras: Extras | None) -> tuple[list[BlockKey], ...]:
        """The keys of all full blocks of the prompt and of `tokens`, by rank."""
        info = self._session.namespace.info
        done = len(self.keys)
        left = {block - done: ids for block, ids in (extras or {}).items() if block >= done}
        rest = tokens[done * info.block_tokens :]
        return tuple(
            [
                *keys,
                *block_keys(
                    keys[-1] if keys else rank.info.fingerprint, rest, info.block_tokens, left
                ),
            ]
            for rank, keys in zip(self._session.ranks, self._looked_up.keys, strict=True)
        )

    def _learn(self, timing: Timing, output_tokens: int) -> None:
        if self.plan.decision.reason is MissReason.NOT_WORTH_LOADING:
            self._session.learn(lambda costs: costs.after_refused_load(self._refused_tier()))
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

    def _refused_tier(self) -> TierName:
        """The tier of the first found block that was not worth loading."""
        if self.plan.blocks < self._pooled:
            return TierName.GPU
        return tier_at(self._looked_up.runs, self.plan.blocks - self._looked_up.first)

    def _store(
        self,
        keys: tuple[Sequence[BlockKey], ...],
        sequence_tokens: int,
        source: Any,
        request_s: float,
        override: Override,
    ) -> None:
        """Decides, and queues the blocks that are to be stored."""
        session, info = self._session, self._session.namespace.info
        computed_from = self.loaded_blocks * info.block_tokens
        # Where the pool's blocks were not asked for in the store, they are offered with the rest.
        present = 0 if self._looked_up.first else self._looked_up.blocks
        first, count = planner.storable_blocks(
            sequence_tokens, computed_from, present, info.block_tokens
        )
        if not count:
            return
        end = first + count
        first_token, end_token = first * info.block_tokens, end * info.block_tokens
        decision = decide_store(
            session.costs,
            StorePolicy(override),
            count * info.block_tokens,
            first_token,
            session.block_bytes,
            info.block_tokens,
            expected_reuse(first_token, self.plan.shape.prompt_tokens, end_token),
            request_s,
        )
        if decision.reason is not None:
            skipped = self._count(count)
            session.record(Usage(skipped={decision.reason: skipped}), keys[0][first:end])
            if decision.reason is SkipReason.COSTS_MORE_THAN_IT_SAVES:
                session.learn(lambda costs: costs.after_refused_store())
            return
        started_s = time.perf_counter()
        size_bytes = count * session.block_bytes
        session._storing.store(
            StoreJob(
                # A request that was cut short has fewer tokens than its prompt has keys.
                tuple(rank_keys[first:end] for rank_keys in keys),
                tuple(rank_keys[first - 1] if first else None for rank_keys in keys),
                first,
                source,
                size_bytes,
                self._stored,
            )
        )
        waited_s = time.perf_counter() - started_s
        session.learn(lambda costs: costs.observe_store(size_bytes, waited_s))

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
