"""The connector in vLLM's scheduler: looks up, plans, and decides what is loaded and stored.

A request's life here: `match` asks the store, in the background, until the answer is there;
`allocated` sends a load job to the workers; `output` hears that it has arrived; `finished`
decides what to store, and sends that. In all of it the scheduler waits for nothing but, once a
step, for a millisecond, within which a lookup on this host mostly comes back.

An error that left here would end the engine, whose requests can do without the store: so what
might raise is caught, logged, and costs a recompute or a store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from functools import partial

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request as VllmRequest

from engine.admission import Override
from engine.layout import KVLayout
from engine.plugins.vllm.extras import Adapters, extras_of, has_known_identity
from engine.plugins.vllm.messages import LoadJob, Pages, RequestId, Step, WorkerReport
from engine.plugins.vllm.options import Options
from engine.plugins.vllm.saves import Saves
from engine.request import Extras, LookedUp, Request, Timing
from engine.session import EngineSession
from engine.transfer import Arrived
from kvstore.client import Found, Store
from kvstore.errors import ConfigError
from kvstore.types import MissReason, TierName, Usage

log = logging.getLogger("kvstore.vllm")

PATIENCE_S = 0.001
"""How long lookups may keep the scheduler waiting in one step, all together."""
LOOKUP_S_MAX = 0.5
"""A lookup that takes longer is given up, and the prompt computed."""
LOOKUP_FRESH_S = 10.0
"""After which a lookup of a request that still waits for memory is made anew."""
LOOKUP_THREADS = 4
STEPS_MAX = 64
"""Steps under way whose beginning is remembered."""
DECODE_STEPS = 64
"""So many steps of decoding are one measurement."""


@dataclass
class _Work:
    """What one step of the engine computes, and when it began."""

    began_s: float
    prefilling: list[tuple[RequestId, int, int]]
    """Requests in prefill: tokens in this step, and tokens before them."""
    tokens: int


@dataclass
class _Tracked:
    """A request from its first being asked about to its end."""

    started_s: float
    options: Options
    lookup: Future[LookedUp] | None = None
    asked_s: float = 0.0
    asked: bool = False
    request: Request[None] | None = None
    """The plan in use."""
    first: Request[None] | None = None
    """The plan of before the request was preempted: its prompt is counted once."""
    preemptions: int = 0
    allocated: bool = False
    loading: bool = False
    arrived: list[Arrived] = field(default_factory=list)
    """From those ranks that have loaded."""
    prefill_s: float = 0.0
    unusable: bool = False


class SchedulerSide:
    """All requests of one engine. Its methods are called on the scheduler's thread."""

    def __init__(
        self,
        store: Store,
        options: Options,
        layouts: Sequence[KVLayout],
        page_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`layouts` are the workers', by rank.

        Raises:
            NamespaceConflict, InvalidRequest: the server can't hold their blocks.
        """
        self._store = store
        self._options = options
        self._page_tokens = page_tokens
        self._block_tokens = layouts[0].block_tokens
        self._clock = clock
        self._adapters = Adapters()
        self._saves = Saves(page_tokens, self._block_tokens, len(layouts))
        self.session: EngineSession[None] = EngineSession(store, layouts, storing=self._saves)
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kvstore-lookup")
        self._tracked: dict[RequestId, _Tracked] = {}
        self._loads: list[LoadJob] = []
        self._step = 0
        self._steps: dict[int, _Work] = {}
        self._output_s = 0.0
        self._decode = (0, 0.0)
        self._patience_s = PATIENCE_S
        """What is left of it in this step."""
        self._late: Future[LookedUp] | None = None
        """A lookup that was given up. Until it ends, no request waits for another one."""
        self._off = False
        self._told = Usage()

    # -- a request's life

    def match(self, request: VllmRequest, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load beyond those that vLLM has; None while that is unknown.

        The second value is whether they come between steps: always, if there are any.
        """
        if not self._serves(request):
            return 0, False
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(self._clock(), self._options_of(request))
            self._tracked[request.request_id] = tracked
        if request.num_preemptions > tracked.preemptions:
            self._start_anew(tracked, request.num_preemptions)
        if tracked.unusable or tracked.allocated:
            return 0, False  # a load that failed is not tried again
        try:
            looked_up = self._look_up(tracked, request)
            if looked_up is None:
                return None, False
            tracked.request = self.session.plan(looked_up, local_tokens, tracked.options.load)
        except Exception:
            log.exception("a lookup failed; the prompt is computed")
            tracked.unusable, tracked.request = True, None
            return 0, False
        tokens = tracked.request.plan.blocks * self._block_tokens - local_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def _options_of(self, request: VllmRequest) -> Options:
        try:
            return self._options.for_request(request.kv_transfer_params)
        except ConfigError as error:
            log.warning("request %s goes without the store: %s", request.request_id, error)
            return replace(self._options, load=Override.NEVER, store=Override.NEVER)

    def _serves(self, request: VllmRequest) -> bool:
        adapter = request.lora_request
        return (
            not self._off
            and has_known_identity(request)
            and (adapter is None or self._adapters.is_known(adapter))
        )

    def _start_anew(self, tracked: _Tracked, preemptions: int) -> None:
        """A preempted request has lost its pages, and asks again."""
        if tracked.request is not None and tracked.allocated:
            tracked.first = tracked.first or tracked.request
        self._forget_lookup(tracked)
        tracked.preemptions = preemptions
        tracked.request, tracked.allocated, tracked.loading = None, False, False
        tracked.arrived.clear()

    def _look_up(self, tracked: _Tracked, request: VllmRequest) -> LookedUp | None:
        """The lookup's answer; None while it is under way. Raises what the lookup raised."""
        now_s = self._clock()
        old = tracked.lookup is not None and tracked.lookup.done()
        if old and now_s - tracked.asked_s > LOOKUP_FRESH_S:
            self._forget_lookup(tracked)
        if tracked.lookup is None:
            tracked.asked_s = now_s
            if self._late is not None and not self._late.done():
                return self._give_up(tracked, request)
            tokens, again = list(request.all_token_ids), tracked.asked
            tracked.asked = True
            insists = tracked.options.load is Override.ALWAYS
            tracked.lookup = self._lookups.submit(self._ask, request, tokens, again, insists)
        try:
            return tracked.lookup.result(self._patience_s)
        except NotYet:
            pass
        finally:
            self._patience_s = max(self._patience_s - (self._clock() - now_s), 0.0)
        if now_s - tracked.asked_s < LOOKUP_S_MAX:
            return None
        self._late = tracked.lookup
        self._forget_lookup(tracked)
        return self._give_up(tracked, request)

    def _ask(self, request: VllmRequest, tokens: list[int], again: bool, insists: bool) -> LookedUp:
        keys = self.session.keys_of(tokens, self._extras_of(request, len(tokens)))
        return self.session.look_up(len(tokens), keys, again=again, insists=insists)

    def _extras_of(self, request: VllmRequest, tokens: int, first: int = 0) -> Extras:
        adapter = request.lora_request
        digest = None if adapter is None else self._adapters.digest(adapter)
        return extras_of(request, tokens, self._block_tokens, first, digest)

    def _give_up(self, tracked: _Tracked, request: VllmRequest) -> LookedUp:
        """In place of the answer: nothing is there. The keys can be made when they are needed."""
        nothing = Found((), MissReason.TOO_SLOW)
        ranks = self.session.ranks
        looked_up = LookedUp(
            request.num_tokens, tuple([] for _ in ranks), 0, tuple(nothing for _ in ranks)
        )
        tracked.lookup = Future()
        tracked.lookup.set_result(looked_up)
        return looked_up

    def _forget_lookup(self, tracked: _Tracked) -> None:
        """Unpins what the lookup found or will have found."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is not None and not lookup.cancel():
            lookup.add_done_callback(self._release)

    def _release(self, lookup: Future[LookedUp]) -> None:
        if lookup.exception() is None:
            self.session.release(lookup.result())

    def allocated(self, request: VllmRequest, pages: Pages, external_tokens: int) -> None:
        """vLLM has given the request its pages; `external_tokens` of them are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is None or tracked.allocated:
            return  # the second call, after the load
        tracked.allocated = True
        plan = tracked.request
        plan.take_pool(plan.pooled_blocks)
        if not external_tokens:
            plan.release()
            return
        first, end = plan.pooled_blocks, plan.plan.blocks
        assert tracked.lookup is not None
        keys = tracked.lookup.result().keys
        step = self._block_tokens // self._page_tokens
        kept_tokens = end * self._block_tokens - external_tokens - first * self._block_tokens
        tracked.loading = True
        self._loads.append(
            LoadJob(
                request.request_id,
                tuple(list(rank_keys[first:end]) for rank_keys in keys),
                pages[first * step : end * step],
                kept_tokens // self._page_tokens,
                plan.load_timeout_s,
            )
        )

    def finished(self, request: VllmRequest, pages: Pages) -> bool:
        """The request is over; whether its pages must stay for a while, being stored."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        running = tracked.allocated and not tracked.loading
        if tracked.request is None or not running:
            self._forget_lookup(tracked)
        else:
            tracked.request.release()
        plan = tracked.first or (tracked.request if running else None)
        if plan is None or not self._serves(request):
            return False  # nothing was computed, or nobody knows of what
        # Steps under way may yet be dropped, and a preempted request has no pages.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        computed = max(0, min(computed, request.num_tokens, len(pages) * self._page_tokens))
        computed = computed if running else 0
        total_s = self._clock() - tracked.started_s
        try:
            plan.finish(
                list(request.all_token_ids[:computed]),
                (request.request_id, pages),
                Timing(tracked.prefill_s, total_s - tracked.prefill_s, total_s, alone=False),
                override=tracked.options.store,
                output_tokens=request.num_output_tokens,
                extras=self._extras_of(request, computed, len(plan.keys)),
            )
        except Exception:
            log.exception("a request could not be stored")
        return request.request_id in self._saves

    # -- steps

    def step(self, scheduled: SchedulerOutput) -> Step:
        """What the workers are to do with this step."""
        self._step += 1
        self._patience_s = PATIENCE_S
        try:
            self._note_work(scheduled)
        except Exception:
            log.exception("a step could not be measured")
        loads, self._loads = self._loads, []
        idle = not scheduled.total_num_scheduled_tokens
        return Step(self._step, idle, loads, self._saves.take())

    def _note_work(self, scheduled: SchedulerOutput) -> None:
        if not scheduled.total_num_scheduled_tokens:
            return
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prefilling = []
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.request is None:
                continue
            context = before.get(request_id, 0)
            if context < tracked.request.plan.shape.prompt_tokens:
                prefilling.append((request_id, tokens, context))
        work = _Work(self._clock(), prefilling, scheduled.total_num_scheduled_tokens)
        self._steps[self._step] = work
        while len(self._steps) > STEPS_MAX:
            del self._steps[next(iter(self._steps))]

    def output(self, report: WorkerReport) -> None:
        """The workers have ended a step, and tell what became of loads and saves."""
        for part in (
            partial(self._note_output, report.step),
            *(partial(self._loaded, *load) for load in report.arrived),
            *(partial(self._saves.heard, *save) for save in report.stored),
        ):
            try:
                part()
            except Exception:
                log.exception("what a step did could not be counted")

    def _loaded(self, request_id: RequestId, arrived: Arrived) -> None:
        """A rank has ended its part of a load."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.request is None or not tracked.loading:
            return
        tracked.arrived.append(arrived)
        if len(tracked.arrived) < len(self.session.ranks):
            return
        tracked.loading = False
        tracked.request.release()
        # A block is of use where all ranks have it, and when the last one has.
        worst = min(tracked.arrived, key=lambda one: one.loaded.blocks)
        slowest = max(tracked.arrived, key=lambda one: one.load_s)
        tracked.request.arrived(Arrived(worst.loaded, slowest.load_s, slowest.tiers))

    def _note_output(self, step: int) -> None:
        """Measures a step: from its beginning, or from the end of the one before it."""
        work = self._steps.pop(step, None)
        if work is None:
            return
        now_s = self._clock()
        seconds = now_s - max(work.began_s, self._output_s)
        self._output_s = now_s
        for request_id, _, _ in work.prefilling:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.prefill_s += seconds
        if not work.prefilling:
            self._note_decode(seconds)
        elif len(work.prefilling) == 1:
            _, tokens, context = work.prefilling[0]
            if tokens > 0.9 * work.tokens:  # some others decode in the same step
                self.session.learn(lambda costs: costs.observe_prefill(tokens, context, seconds))

    def _note_decode(self, seconds: float) -> None:
        steps, spent_s = self._decode[0] + 1, self._decode[1] + seconds
        if steps == DECODE_STEPS:
            self.session.learn(lambda costs: costs.observe_decode(DECODE_STEPS, spent_s))
            steps, spent_s = 0, 0.0
        self._decode = (steps, spent_s)

    # -- the rest

    def watch_pool(self, pool: BlockPool) -> None:
        """Counts vLLM's own paged cache as the gpu tier."""
        page_bytes = self.session.block_bytes * self._page_tokens // self._block_tokens
        self._saves.pool_pages = pool.num_gpu_blocks

        def use() -> tuple[int, int]:
            capacity = pool.num_gpu_blocks - 1  # one page is a placeholder
            return capacity * page_bytes, len(pool.cached_block_hash_to_block) * page_bytes

        self.session.pool_use = use

    def sources(self, request: VllmRequest) -> dict[TierName, int]:
        """The tokens to be loaded, by tier."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is None:
            return {}
        hits = tracked.request.plan.hits
        return {tier: hit.tokens for tier, hit in hits.items() if tier is not TierName.GPU}

    def take_usage(self) -> tuple[Usage, Usage]:
        """All that was counted, until the last call and until now."""
        told, self._told = self._told, self.session.usage
        return told, self._told

    def reset(self) -> bool:
        """Goes without the store from now on: the weights may have changed.

        What is stored belongs to the files, and stays right for them; what this engine computes
        may not any more. False while loads are under way.
        """
        if not self._off:
            log.warning("vLLM was reset: weights may differ from their files; kvstore is off")
        self._off = True
        for tracked in self._tracked.values():
            if not tracked.loading:
                self._forget_lookup(tracked)
        return not any(tracked.loading for tracked in self._tracked.values())

    def close(self) -> None:
        """Unpins everything, and ends the threads."""
        for tracked in self._tracked.values():
            self._forget_lookup(tracked)
        self._lookups.shutdown()
        self.session.close()
