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

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from engine import planner
from engine.admission import (
    Override,
)
from engine.costs import CostModel
from engine.hashing import Tokens, block_keys
from engine.layout import KVLayout
from engine.request import Extras, LookedUp, Request
from engine.reuse import Answers
from engine.transfer import Storing, Transfer
from kvstore.client import Found, Namespace, Store
from kvstore.errors import InvalidRequest, RequestError
from kvstore.types import (
    BlockKey,
    Decision,
    MissReason,
    NamespaceInfo,
    Outlook,
    TierName,
    TierStatus,
    Usage,
)

log = logging.getLogger("kvstore.engine")

KEEP_COSTS_S = 10.0
"""How often the server is sent what was measured."""

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
        self._answers = Answers()
        self._far = Outlook()
        """The last one that knew the far tier."""
        self._kept_costs_s = time.monotonic()
        self._warned = False
        if costs is None and self.namespace.last_costs:
            self._costs = _earlier_costs(self.namespace.last_costs)
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

    @property
    def answers(self) -> Answers:
        """How often this engine's answers come back in later prompts."""
        return self._answers

    def note_answer(self, last: BlockKey) -> None:
        """A request has ended, and this block of it has generated tokens."""
        with self._lock:
            self._answers.note_end(last)

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
        insists = load is Override.ALWAYS
        looked_up = self.look_up(len(tokens), keys, pooled, insists=insists)
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
        self,
        prompt_tokens: int,
        keys: tuple[Sequence[BlockKey], ...],
        first: int = 0,
        again: bool = False,
        insists: bool = False,
    ) -> LookedUp:
        """Asks the store for a prompt's loadable blocks from `first` on, and pins what it has.

        `again` says that it was asked for this very request before, and `insists` that all that
        is found is to be loaded, whatever it costs.
        """
        end = self._shape(prompt_tokens).loadable_blocks
        near_only = not insists and self._far_is_useless(end)
        asking = {"first": first, "again": again, "near_only": near_only}
        found = tuple(
            self._find(rank, rank_keys[first:end], asking) if first < end else Found((), None)
            for rank, rank_keys in zip(self.ranks, keys, strict=True)
        )
        if not again:
            with self._lock:
                self._answers.note_prompt(keys[0])
        if found[0].outlook.far_bytes_per_s:
            self._far = found[0].outlook
        if near_only:
            self.learn(lambda costs: costs.after_refused_load(TierName.REDIS))
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
            self._hinted_costs(),
            load,
            pool_tokens,
            settled_blocks=pooled if self.pool is None else 0,
        )
        return Request(self, looked_up, plan, pooled, insists=load is Override.ALWAYS)

    def release(self, looked_up: LookedUp) -> None:
        """Unpins what a lookup found."""
        for rank, found in zip(self.ranks, looked_up.found, strict=True):
            rank.release(found)

    def _shape(self, prompt_tokens: int) -> planner.PromptShape:
        return planner.PromptShape(prompt_tokens, self.layout.block_tokens, self.block_bytes)

    def _hinted_costs(self) -> CostModel:
        """What was measured here, and by the server where nothing was."""
        far = self._far
        return self._costs.hinted(TierName.REDIS, far.far_latency_s, far.far_bytes_per_s)

    def _far_is_useless(self, blocks: int) -> bool:
        """Whether the far tier takes longer for each of so many blocks than computing it.

        The last one is the dearest to compute. Then the far tier need not even be asked.
        """
        costs, tokens = self._hinted_costs(), self.layout.block_tokens
        known = costs.prefill.known_for(blocks * tokens) and costs.tier(TierName.REDIS).known
        saved_s = costs.saved_s(tokens, max(blocks - 1, 0) * tokens)
        return known and costs.load_s(TierName.REDIS, self.block_bytes) > saved_s

    def _find(self, rank: Namespace, keys: Sequence[BlockKey], asking: Mapping[str, Any]) -> Found:
        """Looks up; a server that can't serve this namespace is as good as none."""
        try:
            return rank.lookup(keys, **asking)
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
        self._keep_costs()

    def record(
        self,
        usage: Usage,
        refused: Sequence[BlockKey] = (),
        decision: Decision | None = None,
    ) -> None:
        """Adds to the server's report, and to `usage`."""
        with self._lock:
            self._usage += usage
        pool = None if self.pool_use is None else self.pool_use()
        self.namespace.record(usage, refused, pool, decision)
        if time.monotonic() - self._kept_costs_s > KEEP_COSTS_S:
            self._keep_costs()

    def _keep_costs(self) -> None:
        """Has the server keep what was measured, for this engine's next start."""
        self._kept_costs_s = time.monotonic()
        self.namespace.keep(json.dumps(self._costs.to_dict()))


def _earlier_costs(text: str) -> CostModel:
    """What an engine of this namespace had measured; nothing if that can't be understood."""
    try:
        return CostModel.from_dict(json.loads(text))
    except (InvalidRequest, ValueError):
        log.warning("the costs that the server has kept are not of this version; starting anew")
        return CostModel()
