"""One prompt's way through the engine: what was found, what is loaded, kept, and told.

Made by `engine.session`, which plugins talk to. Knows nothing of how bytes travel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine import planner
from engine.admission import Override, StoreDecision, StorePolicy, decide_store
from engine.costs import CostModel
from engine.hashing import Tokens, block_keys
from engine.planner import LoadPlan, Run, tier_at
from engine.reuse import reuse_of
from engine.transfer import Arrived, StoreJob
from engine.transfer import load as load_measured
from kvstore.client import Found, Sink, Stored
from kvstore.types import (
    BlockCount,
    BlockKey,
    Decision,
    MissReason,
    Outlook,
    SkipReason,
    TierName,
    Usage,
)

if TYPE_CHECKING:
    from engine.session import EngineSession

log = logging.getLogger("kvstore.engine")

LATE_FACTOR = 1.5
LATE_SHARE = 0.05
"""A load is given up when it has taken `LATE_FACTOR` times as long as expected, and this share of
the prefill time that it was to save: so much a request may lose to a tier that is slow today."""
LOAD_TIMEOUT_S_MIN = 0.05
"""Of a load that takes a millisecond, a thread that waits for a core is no sign."""
LOAD_TIMEOUT_S_MAX = 10.0
"""While the engine's prefill has not been measured, there is nothing to compare loading with; and
who insists on loading has no use for the comparison."""

STORE_TIERS = (TierName.CPU, TierName.REDIS)
"""From near to far."""

Extras = Mapping[int, Sequence[bytes]]
"""By a block's position, the ids of what else decides its KV: see `engine.hashing`."""

Tensor = TypeVar("Tensor")


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
    def outlook(self) -> Outlook:
        """What the server knows of the blocks after the first rank's."""
        return self.found[0].outlook

    @property
    def blocks(self) -> int:
        """How many blocks, from `first` on, all ranks have."""
        return min(found.blocks for found in self.found)

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the block after them isn't there; None when all that was asked for is."""
        return min(self.found, key=lambda found: found.blocks).miss_reason


class Request(Generic[Tensor]):
    """One prompt's way through the engine. Made by `EngineSession.begin`, or `plan`."""

    def __init__(
        self,
        session: EngineSession[Tensor],
        looked_up: LookedUp,
        plan: LoadPlan,
        pooled: int,
        insists: bool = False,
    ):
        """`insists`: the caller wants what was found, also where computing were quicker."""
        self.plan = plan
        self._session = session
        self._looked_up = looked_up
        self._pooled = pooled
        self._insists = insists
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
        """Seconds after which the load is given up, and what has not come is computed."""
        blocks = self.plan.blocks - self._pooled
        known = self._session.costs.prefill.known_for(blocks * self.plan.shape.block_tokens)
        if self._insists or not known:
            return LOAD_TIMEOUT_S_MAX
        decision = self.plan.decision
        late_s = LATE_FACTOR * decision.load_s + LATE_SHARE * decision.prefill_saved_s
        return max(late_s, LOAD_TIMEOUT_S_MIN)

    def take_pool(self, blocks: int) -> None:
        """Notes that the engine uses its own first `blocks`, and has loaded nothing yet."""
        self._loaded = [(TierName.GPU, blocks)] if blocks else []
        self._failed = MissReason.NOT_WORTH_LOADING if blocks < self.plan.blocks else None

    def arrived(self, arrived: Arrived) -> None:
        """Notes what the store gave of the planned blocks, and learns what that took."""
        self._loaded.extend(arrived.loaded.runs)
        self._failed = arrived.loaded.miss_reason
        self._load_s = arrived.load_s
        measured = list(arrived.tiers)
        if arrived.loaded.miss_reason is MissReason.TOO_SLOW and arrived.load_s:
            # It would have taken longer yet. Where nothing came, nothing else would be learnt.
            tier, blocks = self._late_part()
            measured.append((tier, blocks * self._session.block_bytes, arrived.load_s))
        for tier, size_bytes, seconds in measured:

            def observe(
                costs: CostModel,
                tier: TierName = tier,
                size_bytes: int = size_bytes,
                seconds: float = seconds,
            ) -> CostModel:
                return costs.observe_load(tier, size_bytes, seconds)

            self._session.learn(observe)

    def _late_part(self) -> tuple[TierName, int]:
        """The tier that the first missing block was to come from, and all that was to."""
        tier = tier_at(self.plan.runs, self.loaded_blocks)
        return tier, sum(count for name, count in self.plan.runs if name is tier)

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
        full = len(tokens) // info.block_tokens
        if full * info.block_tokens > prompt_tokens:
            session.note_answer(keys[0][full - 1])
        if session.pool is not None and pool_source is not None:
            try:
                session.pool.write(info, keys[0], pool_source)
            except Exception:
                # The answer is there. A device that ran out of memory must not take it back.
                log.exception("keeping %d blocks in the engine's pool failed", len(keys[0]))
        hits, misses = self.plan.settle(self._loaded, self._failed)
        loaded_tokens = self.loaded_blocks * info.block_tokens
        first, count = self._storable(len(tokens))
        store = self._decide_store(first, count, timing.total_s, override)
        refused = keys[0][first + store.blocks : first + count]
        session.record(
            Usage(
                requests=1,
                prompt=self.plan.shape.total(),
                output_tokens=output_tokens,
                hits=hits,
                misses=misses,
                skipped={store.reason: self._count(len(refused))} if store.reason else {},
                prefill_saved_s=session.costs.saved_s(loaded_tokens, 0) - self._load_s,
                load_s=self._load_s,
                prefill_s=timing.prefill_s,
                total_s=timing.total_s,
            ),
            refused,
            self._told(store, count, timing, output_tokens),
        )
        if store.blocks:
            self._store(keys, first, store.blocks, source)

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

    def _storable(self, sequence_tokens: int) -> tuple[int, int]:
        """The first block that may be new to the store, and how many from there."""
        computed_from = self.loaded_blocks * self.plan.shape.block_tokens
        # Where the pool's blocks were not asked for in the store, they are offered with the rest.
        present = 0 if self._looked_up.first else self._looked_up.blocks
        return planner.storable_blocks(
            sequence_tokens, computed_from, present, self.plan.shape.block_tokens
        )

    def _decide_store(
        self, first: int, count: int, request_s: float, override: Override
    ) -> StoreDecision:
        session, shape, looked_up = self._session, self.plan.shape, self._looked_up
        known = looked_up.outlook
        decision = decide_store(
            session.costs,
            StorePolicy(override),
            reuse_of(
                first,
                first + count,
                shape.prompt_tokens,
                shape.block_tokens,
                known.reuse,
                looked_up.first + looked_up.found[0].blocks,
                session.answers.probability,
            ),
            first * shape.block_tokens,
            shape.block_bytes,
            shape.block_tokens,
            request_s,
            known.crowded,
        )
        if decision.reason is SkipReason.COSTS_MORE_THAN_IT_SAVES:
            session.learn(lambda costs: costs.after_refused_store())
        return decision

    def _told(
        self, store: StoreDecision, storable: int, timing: Timing, output_tokens: int
    ) -> Decision:
        """Both decisions as the server's report has them."""
        plan, block_tokens = self.plan, self.plan.shape.block_tokens
        return Decision(
            prompt_tokens=plan.shape.prompt_tokens,
            output_tokens=output_tokens,
            found_tokens=plan.found_blocks * block_tokens,
            loaded_tokens=self.loaded_blocks * block_tokens,
            load_reason=self._failed or plan.decision.reason if self._missed_some() else None,
            load_expected_s=plan.decision.found_load_s,
            prefill_expected_s=plan.decision.found_saved_s,
            load_s=self._load_s,
            prefill_s=timing.prefill_s,
            total_s=timing.total_s,
            storable_tokens=storable * block_tokens,
            stored_tokens=store.blocks * block_tokens,
            skip_reason=store.reason,
            reuse=store.reuse,
            gain_s=store.gain_s,
            cost_s=store.cost_s,
            crowded=self._looked_up.outlook.crowded,
        )

    def _missed_some(self) -> bool:
        return self.loaded_blocks < self.plan.found_blocks

    def _store(
        self, keys: tuple[Sequence[BlockKey], ...], first: int, count: int, source: Any
    ) -> None:
        """Queues blocks to be stored."""
        session, end = self._session, first + count
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
