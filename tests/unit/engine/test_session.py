"""Sessions against a store in memory: what is loaded, kept, counted and released.

The store here answers as a real one may, faults included; that a real one does so is tested in
`tests/integration`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import request as request_module
from engine.admission import Override
from engine.costs import CostModel, DecodeCost, PrefillCost, StoreCost, TierCost
from engine.hashing import block_keys
from engine.layout import KVLayout
from engine.request import Request, Timing
from engine.session import EngineSession
from kvstore.client import Found, Loaded, Stored
from kvstore.errors import NamespaceConflict
from kvstore.types import (
    BlockCount,
    BlockKey,
    Decision,
    MissReason,
    NamespaceInfo,
    Outlook,
    SkipReason,
    TierName,
    TierState,
    TierStatus,
    Usage,
)

BLOCK = 4
LAYOUT = KVLayout(
    model="m", revision="r", dtype="float32", kv_dtype="float32", layers=1, kv_heads=1,
    head_size=1, value_head_size=1, rope="none", arrangement="test", block_tokens=BLOCK,
)  # fmt: skip
TIMING = Timing(prefill_s=0.1, decode_s=0.1, total_s=0.3)
FAULTS = (MissReason.CORRUPT, MissReason.TOO_SLOW, MissReason.OVERWRITTEN, MissReason.SERVER_DOWN)


@dataclass
class FakeNamespace:
    """Blocks by key, each in a tier; loads stop before `fails_at`, for `why`."""

    info: NamespaceInfo
    blocks: dict[BlockKey, tuple[TierName, bytes]] = field(default_factory=dict)
    fails_at: int | None = None
    why: MissReason = MissReason.CORRUPT
    refuses: Exception | None = None
    leases: int = 0
    offered: int = 0
    usage: Usage = field(default_factory=Usage)
    refused: list[BlockKey] = field(default_factory=list)
    pools: list[Any] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    outlook: Outlook = field(default_factory=Outlook)
    decisions: list[Decision] = field(default_factory=list)
    near_only: list[bool] = field(default_factory=list)
    costs: str = ""
    last_costs: str = ""

    def lookup(
        self, keys: Sequence[BlockKey], *, first: int, again: bool, near_only: bool
    ) -> Found:
        if self.refuses is not None:
            raise self.refuses
        self.near_only.append(near_only)
        self.asked.append(len(keys))
        runs: list[tuple[TierName, int]] = []
        for key in keys:
            if key not in self.blocks:
                break
            tier = self.blocks[key][0]
            if runs and runs[-1][0] is tier:
                runs[-1] = (tier, runs[-1][1] + 1)
            else:
                runs.append((tier, 1))
        found = sum(count for _, count in runs)
        self.leases += found > 0
        lease: Any = list(keys[:found]) or None
        reason = MissReason.NEVER_SEEN if found < len(keys) else None
        return Found(tuple(runs), reason, lease, outlook=self.outlook)

    def load(self, found: Found, sink: Any, *, count: int, timeout_s: float) -> Loaded:
        self.timeouts_s.append(timeout_s)
        self.release(found)
        keys: Any = found.lease
        tiers = [tier for tier, blocks in found.runs for _ in range(blocks)][:count]
        # What is in the arena is read first.
        for position in sorted(range(count), key=lambda index: tiers[index] is not TierName.CPU):
            spoilt = self.fails_at is not None and position >= self.fails_at
            sink(position, memoryview(b"?" if spoilt else self.blocks[keys[position]][1]))
        good = count if self.fails_at is None else min(self.fails_at, count)
        runs = tuple((tier, 1) for tier in tiers[:good])
        return Loaded(runs, None if good == count else self.why)

    def release(self, found: Found) -> None:
        self.leases -= found.lease is not None

    def store(self, keys: Sequence[BlockKey], source: Any, parent: BlockKey | None) -> Stored:
        stored = Stored()
        self.offered += len(keys)
        for index, key in enumerate(keys):
            if key in self.blocks:
                stored.present += 1
                continue
            view = memoryview(bytearray(self.info.block_bytes))
            source(index, view)
            self.blocks[key] = (TierName.CPU, bytes(view))
            stored.stored += 1
        return stored

    def record(
        self, usage: Usage, refused: Sequence[BlockKey], pool: Any, decision: Decision | None
    ) -> None:
        self.usage += usage
        self.refused += refused
        self.pools.append(pool)
        if decision is not None:
            self.decisions.append(decision)

    def keep(self, costs: str) -> None:
        self.costs = costs


class FakeStore:
    def __init__(self, last_costs: str = "") -> None:
        self.last_costs = last_costs

    def open(self, info: NamespaceInfo) -> FakeNamespace:
        self.namespace = FakeNamespace(info, last_costs=self.last_costs)
        return self.namespace


class FakePool:
    """The engine's own blocks, without a bound; `lost` of them go when they are read."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}
        self.lost = 0

    def longest_prefix(self, namespace: NamespaceInfo, keys: Sequence[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(self, namespace: NamespaceInfo, keys: Sequence[BlockKey], sink: Any) -> int:
        there = max(len(keys) - self.lost, 0)
        for position, key in enumerate(keys[:there]):
            sink(position, self.blocks[key])
        return there

    def write(
        self, namespace: NamespaceInfo, keys: Sequence[BlockKey], source: Any, parent: Any = None
    ) -> None:
        for position, key in enumerate(keys):
            if key not in self.blocks:
                view = bytearray(namespace.block_bytes)
                source(position, view)
                self.blocks[key] = bytes(view)

    def status(self) -> TierStatus:
        used = len(self.blocks) * LAYOUT.block_bytes
        return TierStatus(TierName.GPU, TierState.UP, 999, used, len(self.blocks))


class Engine:
    """A session, and what an engine does around it. A block's bytes are its position, repeated."""

    def __init__(self, pool: bool = False, costs: CostModel | None = None, last_costs: str = ""):
        store: Any = FakeStore(last_costs)
        self.pool = FakePool() if pool else None
        self.session: EngineSession[Any] = EngineSession(store, LAYOUT, self.pool, costs)
        self.namespace: FakeNamespace = store.namespace
        self.got: dict[int, bytes] = {}

    def begin(self, tokens: Sequence[int], **options: Any) -> Request[Any]:
        return self.session.begin(tokens, **options)

    def load(self, request: Request[Any]) -> int:
        self.got = {}
        taken: Callable[[int, Any], None] = lambda position, view: self.got.update(  # noqa: E731
            {position: bytes(view)}
        )
        tokens = request.load(taken, taken)
        blocks = range(tokens // BLOCK)
        assert [self.got[block] for block in blocks] == [block_bytes(block) for block in blocks]
        return tokens

    def finish(self, request: Request[Any], tokens: Sequence[int], **options: Any) -> None:
        def source(position: int, view: Any) -> None:
            view[:] = block_bytes(position)

        timing = options.pop("timing", TIMING)
        request.finish(tokens, source, timing, source if self.pool else None, **options)
        assert self.session.flush(20)

    def keep(self, tokens: Sequence[int], tier: TierName = TierName.CPU, blocks: int = 99) -> None:
        """Puts the first blocks of these tokens into the store."""
        keys = block_keys(self.namespace.info.fingerprint, tokens, BLOCK)
        for position, key in enumerate(keys[:blocks]):
            self.namespace.blocks.setdefault(key, (tier, block_bytes(position)))

    def run(self, tokens: Sequence[int], answer: Sequence[int] = (), **options: Any) -> int:
        request = self.begin(tokens, load=options.pop("load", Override.ALWAYS))
        loaded = self.load(request)
        self.finish(request, [*tokens, *answer], **{"override": Override.ALWAYS, **options})
        return loaded


def block_bytes(position: int) -> bytes:
    return bytes([position % 251]) * LAYOUT.block_bytes


@pytest.fixture
def engine() -> Any:
    engine = Engine()
    yield engine
    engine.session.close()


@pytest.fixture
def pooled() -> Any:
    engine = Engine(pool=True)
    yield engine
    engine.session.close()


def known_costs(**changes: Any) -> CostModel:
    """Where a token takes 10 ms to compute, and a byte a microsecond to load."""
    return CostModel(
        **{
            "prefill": PrefillCost.of(0.0, 0.01, 0.0),
            "decode": DecodeCost.of(0.01),
            "store": StoreCost.of(0.0, 1e9),
            "tiers": {tier: TierCost.of(0.0, 1e6) for tier in TierName},
            **changes,
        }
    )


# -- loading


def test_what_is_in_the_pool_is_not_asked_for_in_the_store(pooled: Engine) -> None:
    tokens = range(17)
    pooled.run(tokens)
    pooled.namespace.asked.clear()
    assert pooled.run(tokens) == 16
    assert pooled.namespace.asked == []
    assert pooled.namespace.leases == 0
    assert pooled.session.usage.hits[TierName.GPU].tokens == 16
    pooled.pool.blocks.popitem()  # type: ignore[union-attr]
    assert pooled.run(tokens) == 16
    assert pooled.namespace.asked == [1]
    assert pooled.session.usage.hits[TierName.CPU].tokens == 4


def test_what_the_pool_lost_since_the_lookup_ends_the_load(pooled: Engine) -> None:
    tokens = range(33)
    pooled.run(tokens)
    pooled.pool.lost = 3  # type: ignore[union-attr]
    assert pooled.run(tokens) == 20
    assert pooled.session.usage.misses[MissReason.EVICTED].tokens == 12
    assert pooled.namespace.leases == 0


@pytest.mark.parametrize(
    ("costs", "timeout_s"),
    [
        pytest.param(CostModel(), request_module.LOAD_TIMEOUT_S_MAX, id="nothing known"),
        pytest.param(known_costs(), request_module.LOAD_TIMEOUT_S_MIN, id="little saved"),
        pytest.param(
            known_costs(prefill=PrefillCost.of(0.0, 0.5, 0.0)),
            0.05 * 0.5 * 32 + 1.5 * 32 * LAYOUT.block_bytes / BLOCK / 1e6,
            id="much saved",
        ),
    ],
)
def test_a_load_may_be_late_by_a_small_part_of_the_prefill_it_saves(
    costs: CostModel, timeout_s: float
) -> None:
    engine = Engine(costs=costs)
    engine.keep(range(32))
    engine.run(range(33), load=Override.DEFAULT)
    assert engine.namespace.timeouts_s == [pytest.approx(timeout_s)]
    engine.run(range(33), load=Override.ALWAYS)
    assert engine.namespace.timeouts_s[1] == request_module.LOAD_TIMEOUT_S_MAX
    engine.session.close()


@pytest.mark.parametrize("why", FAULTS)
@pytest.mark.parametrize("fails_at", [0, 3, 7])
def test_a_load_that_breaks_off_counts_the_rest_for_its_reason(
    fails_at: int, why: MissReason, engine: Engine
) -> None:
    engine.keep(range(32))
    engine.namespace.fails_at, engine.namespace.why = fails_at, why
    assert engine.run(range(40)) == fails_at * BLOCK
    usage = engine.session.usage
    assert usage.misses[why].blocks == 8 - fails_at
    assert usage.misses[MissReason.NEVER_SEEN].blocks == 1
    # What could not be loaded was computed, and is offered again.
    assert usage.already_present.blocks + usage.stored.blocks == 10 - fails_at


def test_a_tier_that_was_too_slow_is_known_to_be_slow(engine: Engine) -> None:
    """Also when nothing came from it, and so nothing else was measured."""
    engine.keep(range(32), TierName.REDIS)
    engine.namespace.fails_at, engine.namespace.why = 0, MissReason.TOO_SLOW
    for _ in range(2):
        engine.run(range(40))
    assert engine.session.costs.tier(TierName.REDIS).estimate.seen == 2
    assert engine.session.costs.tier(TierName.CPU).estimate.seen == 0


def test_a_far_tier_that_the_server_knows_to_be_slow_is_not_tried() -> None:
    engine = Engine(costs=known_costs(tiers={}))
    engine.keep(range(32), TierName.REDIS)
    engine.namespace.outlook = Outlook(far_latency_s=0.05, far_bytes_per_s=10.0)
    assert engine.run(range(33), load=Override.DEFAULT) == 0
    # Then it is not even asked, unless the caller insists.
    assert engine.run(range(33), load=Override.DEFAULT) == 0
    assert engine.run(range(33), load=Override.ALWAYS) == 32
    assert engine.namespace.near_only == [False, True, False]
    engine.session.close()


def test_a_far_tier_that_gets_quick_again_is_asked_again() -> None:
    engine = Engine(costs=known_costs(tiers={}))
    engine.keep(range(32), TierName.REDIS)
    engine.namespace.outlook = Outlook(far_latency_s=0.05, far_bytes_per_s=10.0)
    engine.run(range(33), load=Override.DEFAULT)
    engine.namespace.outlook = Outlook(far_latency_s=1e-6, far_bytes_per_s=1e9)
    engine.run(range(33), load=Override.DEFAULT)  # still not asked, but told
    assert engine.run(range(33), load=Override.DEFAULT) == 32
    engine.session.close()


def test_what_was_measured_is_kept_for_the_engines_next_start() -> None:
    first = Engine(costs=known_costs())
    first.run(range(16))
    first.session.close()
    second = Engine(last_costs=first.namespace.costs)
    assert second.session.costs == first.session.costs
    second.session.close()


def test_costs_that_cannot_be_read_are_measured_anew() -> None:
    engine = Engine(last_costs='{"version": 99}')
    assert engine.session.costs == CostModel()
    engine.session.close()


def test_every_decision_is_told_with_its_numbers() -> None:
    engine = Engine(costs=known_costs())
    engine.namespace.outlook = Outlook([0.25] * 9, crowded=True)
    engine.keep(range(16))
    engine.run(range(33), range(3), load=Override.DEFAULT, override=Override.DEFAULT)
    (told,) = engine.namespace.decisions
    assert (told.prompt_tokens, told.output_tokens) == (33, 3)
    assert (told.found_tokens, told.loaded_tokens, told.load_reason) == (16, 16, None)
    assert told.prefill_expected_s == pytest.approx(0.16)
    assert (told.storable_tokens, told.stored_tokens, told.skip_reason) == (20, 20, None)
    assert 0.05 < told.reuse < 0.25
    assert told.crowded
    engine.session.close()


def test_answers_that_come_back_are_stored_sooner(engine: Engine) -> None:
    before = engine.session.answers.probability
    tokens = list(range(10))
    for turn in range(6):
        answer = range(100 * turn, 100 * turn + 8)
        engine.run(tokens, answer)
        tokens += answer
    assert engine.session.answers.probability > 4 * before
    for conversation in range(200):
        engine.run([conversation] * 10, range(8))
    assert engine.session.answers.probability < before


def test_a_tier_that_comes_first_in_the_prefix_may_be_read_last(engine: Engine) -> None:
    engine.keep(range(16), TierName.REDIS)
    engine.keep(range(32), TierName.CPU)
    engine.keep(range(48), TierName.REDIS)
    assert engine.run(range(49)) == 48
    costs = engine.session.costs
    assert costs.tier(TierName.REDIS).estimate.seen == costs.tier(TierName.CPU).estimate.seen == 1


def test_a_request_that_was_never_loaded_counts_as_the_engines_choice(engine: Engine) -> None:
    engine.keep(range(32))
    request = engine.begin(range(40), load=Override.ALWAYS)
    engine.finish(request, range(40))
    assert engine.namespace.leases == 0
    misses = engine.session.usage.misses
    assert misses[MissReason.NOT_WORTH_LOADING].blocks == 8
    assert misses[MissReason.NEVER_SEEN].blocks == 1


def test_blocks_that_the_engine_has_no_use_for_are_no_hits(engine: Engine) -> None:
    engine.keep(range(32))
    request = engine.begin(range(40), load=Override.ALWAYS)
    assert engine.load(request) == 32
    request.truncate(9)
    assert request.loaded_blocks == 8
    request.truncate(3)
    engine.finish(request, range(40))
    usage = engine.session.usage
    assert usage.hit().blocks == 3
    assert usage.misses[MissReason.NOT_WORTH_LOADING].blocks == 5


def test_a_cancelled_request_leaves_no_lease_and_no_count(engine: Engine) -> None:
    engine.keep(range(32))
    request = engine.begin(range(40))
    assert engine.namespace.leases == 1
    request.cancel()
    request.cancel()
    assert engine.namespace.leases == 0
    assert engine.session.usage == Usage()


def test_a_server_that_refuses_the_namespace_is_as_good_as_none(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.namespace.refuses = NamespaceConflict("opened with other sizes")
    for _ in range(2):
        assert engine.run(range(9)) == 0
    assert engine.session.usage.misses[MissReason.SERVER_DOWN].tokens == 16
    assert caplog.text.count("opened with other sizes") == 1


# -- storing


def test_the_answers_blocks_have_the_keys_of_the_next_prompt(engine: Engine) -> None:
    engine.run(range(10), answer=range(10, 31))
    assert engine.run(range(40)) == 28
    assert engine.session.usage.stored.blocks == 7 + 3


def test_what_admission_refuses_is_told_to_the_server_with_its_keys() -> None:
    engine = Engine(costs=known_costs())
    engine.run(range(16), override=Override.NEVER)
    assert engine.session.usage.skipped == {SkipReason.BY_REQUEST: engine_count(4)}
    assert engine.namespace.refused == block_keys(LAYOUT.fingerprint(), range(16), BLOCK)
    slow = Timing(prefill_s=0.001, decode_s=99.0, total_s=100.0)
    engine.run(range(8), override=Override.DEFAULT, timing=slow)
    assert engine.session.usage.skipped[SkipReason.GAIN_TOO_SMALL].blocks == 2
    assert engine.namespace.blocks == {}
    engine.session.close()


def engine_count(blocks: int) -> BlockCount:
    return BlockCount(blocks * BLOCK, blocks, blocks * LAYOUT.block_bytes)


def test_a_full_queue_is_counted_for_the_request(engine: Engine) -> None:
    engine.session._storing._queue_bytes_max = 0  # type: ignore[attr-defined]
    engine.session._storing._queued_bytes = 1  # something that takes long
    request = engine.begin(range(16))
    engine.load(request)
    request.finish(range(16), lambda *_: None, TIMING, override=Override.ALWAYS)
    engine.session._storing._queued_bytes = 0
    assert engine.session.usage.skipped == {SkipReason.QUEUE_FULL: engine_count(4)}


def test_a_source_that_fails_is_counted_for_the_request(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(position: int, view: memoryview) -> None:
        raise RuntimeError("gone")

    request = engine.begin(range(16))
    request.finish(range(16), broken, TIMING, override=Override.ALWAYS)
    engine.session.flush()
    assert engine.session.usage.skipped == {SkipReason.FAILED: engine_count(4)}
    engine.run(range(16))
    assert engine.session.usage.stored.blocks == 4


def test_a_pool_that_fails_costs_its_blocks_and_not_the_request(
    pooled: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("none left")

    pooled.pool.write = full  # type: ignore[union-attr,method-assign]
    pooled.run(range(16))
    assert "none left" in caplog.text
    assert pooled.session.usage.stored.blocks == 4


def test_closing_stores_what_is_queued() -> None:
    engine = Engine()
    request = engine.begin(range(64))
    request.finish(range(64), lambda position, view: None, TIMING, override=Override.ALWAYS)
    engine.session.close()
    assert len(engine.namespace.blocks) == 16
    assert engine.namespace.usage.stored.blocks == 16


# -- measuring


def test_a_request_that_was_not_alone_measures_no_computing(engine: Engine) -> None:
    busy = Timing(prefill_s=9.0, decode_s=9.0, total_s=20.0, alone=False)
    engine.run(range(16), answer=range(4), timing=busy)
    assert engine.session.costs.prefill.estimate.seen == 0
    assert engine.session.costs.decode.estimate.seen == 0


def test_decoding_is_measured_by_the_tokens_after_the_first(engine: Engine) -> None:
    for _ in range(6):  # 11 tokens, of which the last has no KV
        engine.run(range(16), range(10), timing=Timing(1.0, 5.0, 6.0), output_tokens=11)
    assert engine.session.usage.output_tokens == 66
    assert engine.session.costs.decode_s(1) == pytest.approx(0.5, rel=0.01)


def test_the_pools_size_is_reported_with_each_request(pooled: Engine) -> None:
    pooled.run(range(16))
    assert pooled.namespace.pools[-1] == (999, 4 * LAYOUT.block_bytes)


# -- the sums


@st.composite
def episodes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests on few prompts, with whatever may happen to them."""
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "prompt": st.integers(1, 50),
                    "answer": st.integers(0, 20),
                    "branch": st.integers(0, 2),
                    "branches_at": st.integers(0, 40),
                    "kept": st.tuples(st.sampled_from(TierName), st.integers(0, 12)),
                    "fails_at": st.none() | st.integers(0, 12),
                    "why": st.sampled_from(FAULTS),
                    "load": st.sampled_from(Override),
                    "override": st.sampled_from(Override),
                    "lost": st.integers(0, 3),
                    "truncate": st.none() | st.integers(0, 12),
                    "ends": st.sampled_from(["finish", "cancel", "never loaded", "source fails"]),
                    "alone": st.booleans(),
                    "down": st.booleans(),
                }
            ),
            max_size=8,
        )
    )


@settings(deadline=None, max_examples=60)
@given(episodes(), st.booleans(), st.booleans())
def test_whatever_happens_every_token_and_every_offered_block_is_counted_once(
    requests: list[dict[str, Any]], pool: bool, known: bool
) -> None:
    engine = Engine(pool, known_costs() if known else None)
    try:
        finished = prompts = computed_free = outputs = 0
        for one in requests:
            branch = one["branches_at"]
            tokens = [t if t < branch else t + 100 * one["branch"] for t in range(one["prompt"])]
            tier, blocks = one["kept"]
            if tier is not TierName.GPU:
                engine.keep(tokens, tier, blocks)
            if engine.pool:
                engine.pool.lost = one["lost"]
            engine.namespace.fails_at, engine.namespace.why = one["fails_at"], one["why"]
            engine.namespace.refuses = NamespaceConflict("no") if one["down"] else None
            request = engine.begin(tokens, load=one["load"])
            if one["ends"] != "never loaded":
                loaded = engine.load(request)
                assert loaded <= (len(tokens) - 1) // BLOCK * BLOCK
                if one["truncate"] is not None:
                    request.truncate(one["truncate"])
            if one["ends"] == "cancel":
                request.cancel()
                continue
            if one["ends"] == "source fails":
                engine.pool, kept_pool = None, engine.pool
                engine.session.pool = None
                request.finish(tokens, _broken, TIMING, override=one["override"])
                engine.session.flush()
                engine.pool = engine.session.pool = kept_pool
            else:
                answer = range(1000, 1000 + one["answer"])
                timing = Timing(0.1, 0.1, 0.3, one["alone"])
                engine.finish(request, [*tokens, *answer], timing=timing, override=one["override"])
                outputs += one["answer"]
            finished += 1
            prompts += len(tokens)
            computed_free += request.loaded_blocks * BLOCK
        usage = engine.session.usage
        assert engine.namespace.leases == 0
        assert usage == engine.namespace.usage
        assert usage.requests == finished
        assert usage.prompt.tokens == prompts == usage.hit().tokens + usage.missed().tokens
        assert usage.prompt.blocks == usage.hit().blocks + usage.missed().blocks
        assert usage.prompt.bytes == usage.hit().bytes + usage.missed().bytes
        assert usage.hit().tokens == computed_free
        assert usage.output_tokens == outputs
        by_admission = (
            SkipReason.BY_REQUEST, SkipReason.GAIN_TOO_SMALL, SkipReason.COSTS_MORE_THAN_IT_SAVES,
        )  # fmt: skip
        assert engine.namespace.offered == (
            usage.stored.blocks + usage.already_present.blocks
            + sum(n.blocks for why, n in usage.skipped.items() if why not in by_admission)
        )  # fmt: skip
    finally:
        engine.session.close()


def _broken(position: int, view: memoryview) -> None:
    raise RuntimeError("the engine's buffer is gone")
