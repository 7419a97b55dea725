"""The simulated store against the real CPU tier, and the bounds against plain models."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arena import Arena
from kvstore.eviction import POLICIES
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.optimal import Future, infinite_hits, optimal_hits
from kvstore.replay.simulator import TraceClock, replay
from kvstore.replay.trace import Request, Trace, TraceBuilder
from kvstore.tiers.cpu import CpuTier
from kvstore.types import Fingerprint, NamespaceInfo

PATHS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.floats(0, 50)),
    min_size=1,
    max_size=40,
)
INFO = NamespaceInfo(Fingerprint(bytes(32)), block_bytes=4096, block_tokens=16)


def trace_of(paths: Sequence[tuple[Sequence[int], float]]) -> Trace:
    """A request a path; a block is named by the path that leads to it."""
    builder = TraceBuilder(16)
    names: dict[tuple[int, ...], int] = {}
    now_s = 0.0
    for path, gap_s in paths:
        now_s += gap_s
        steps = [tuple(path[: depth + 1]) for depth in range(len(path))]
        ids = array("Q", [names.setdefault(step, len(names)) for step in steps])
        builder.add(Request(now_s, len(path) * 16 - 5, ids))
    return builder.build("made up")


@contextmanager
def small_arena(factory: pytest.TempPathFactory, capacity: int) -> Iterator[Arena]:
    """An arena with room for so many blocks: the other slots are taken."""
    arena = Arena(factory.mktemp("arena") / "arena", 1 << 18, epoch=1, slab_bytes=1 << 16)
    try:
        taken = []
        while (offset := arena.allocate(INFO.block_bytes)) is not None:
            taken.append(offset)
        for offset in taken[:capacity]:
            arena.free(offset)
        yield arena
    finally:
        arena.close()


def in_the_real_tier(trace: Trace, policy: str, arena: Arena) -> list[int]:
    clock = TraceClock()
    tier = CpuTier(arena, lambda: POLICIES[policy](clock))
    namespace = tier.open(INFO)
    hits = []
    for request in trace:
        clock.now_s = request.time_s
        keys = [key + bytes(16) for key in request.keys]
        found = namespace.longest_prefix(keys)  # type: ignore[arg-type]
        tier.touch(found)
        hits.append(len(found))
        new = keys[len(found) :]
        if new:
            parent = keys[len(found) - 1] if found else None
            reserved = tier.reserve(namespace, new, parent)  # type: ignore[arg-type]
            for block in reserved.blocks:
                tier.commit(block)
            tier.touch(reserved.blocks)
    return hits


@pytest.mark.parametrize("policy", POLICIES)
@given(paths=PATHS, capacity=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_simulated_store_hits_what_the_real_one_hits(
    tmp_path_factory: pytest.TempPathFactory,
    policy: str,
    paths: list[tuple[list[int], float]],
    capacity: int,
) -> None:
    trace = trace_of(paths)
    with small_arena(tmp_path_factory, capacity) as arena:
        expected = in_the_real_tier(trace, policy, arena)
    done = replay(trace, POLICIES[policy], ADMISSIONS["all"], capacity)
    assert done.hits.tolist() == expected


@given(
    paths=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 4)),
        min_size=1,
        max_size=30,
    ),
    capacity=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_so_it_does_when_prompts_begin_in_the_middle(
    tmp_path_factory: pytest.TempPathFactory,
    paths: list[tuple[list[int], int]],
    capacity: int,
) -> None:
    """An engine that has the first blocks itself asks for the others alone."""
    builder = TraceBuilder(16)
    names: dict[tuple[int, ...], int] = {}
    for number, (path, first) in enumerate(paths):
        steps = [tuple(path[: depth + 1]) for depth in range(min(first, len(path) - 1), len(path))]
        ids = [names.setdefault(step, len(names)) for step in steps]
        builder.add(Request(float(number), 16 * len(ids), ids))
    trace = builder.build("from the middle")
    with small_arena(tmp_path_factory, capacity) as arena:
        expected = in_the_real_tier(trace, "lru", arena)
    done = replay(trace, POLICIES["lru"], ADMISSIONS["all"], capacity)
    assert done.hits.tolist() == expected


@given(
    prompts=st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), min_size=1, max_size=30
    ),
    capacity=st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_blocks_that_are_no_prefixes_do_no_harm(prompts: list[list[int]], capacity: int) -> None:
    builder = TraceBuilder(16)
    for number, ids in enumerate(prompts):
        builder.add(Request(float(number), 16 * len(ids), ids))
    trace = builder.build("no prefixes")
    infinite = infinite_hits(trace)
    best, _ = optimal_hits(Future(trace), capacity)
    assert (best <= infinite).all()
    for rule in ADMISSIONS.values():
        done = replay(trace, POLICIES["lru"], rule, capacity, ttl_s=3.0)
        assert (done.hits <= infinite).all()


@given(paths=PATHS)
@settings(deadline=None)
def test_the_infinite_store_hits_what_was_ever_asked_for(
    paths: list[tuple[list[int], float]],
) -> None:
    trace = trace_of(paths)
    seen: set[int] = set()
    for index, (start, end) in enumerate(pairwise(trace.starts.tolist())):
        ids = trace.ids[start:end].tolist()
        hits = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
        assert infinite_hits(trace)[index] == hits
        seen.update(ids)
    everything = replay(trace, POLICIES["lru"], ADMISSIONS["all"], trace.unique_blocks)
    assert everything.hits.tolist() == infinite_hits(trace).tolist()
    assert everything.stored.sum() == trace.unique_blocks


def best_possible(trace: Trace, capacity: int) -> int:
    """The most hits that any store could have, found by trying all."""
    requests = [
        tuple(trace.ids[start:end].tolist()) for start, end in pairwise(trace.starts.tolist())
    ]
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for request in requests:
        prefixes = [request[: depth + 1] for depth in range(len(request))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hits in states.items():
            hit = next((d for d, p in enumerate(prefixes) if p not in held), len(prefixes))
            # Whatever of the old and the new may be kept, as long as prefixes are whole.
            for kept in _whole_subsets(held | frozenset(prefixes), capacity):
                following[kept] = max(following.get(kept, 0), hits + hit)
        states = following
    return max(states.values())


def _whole_subsets(
    blocks: frozenset[tuple[int, ...]], capacity: int
) -> set[frozenset[tuple[int, ...]]]:
    grown: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for block in sorted(blocks, key=len):
        grown |= {
            kept | {block}
            for kept in grown
            if len(kept) < capacity and (len(block) == 1 or block[:-1] in kept)
        }
    return grown


@given(
    paths=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.just(1.0)),
        min_size=1,
        max_size=6,
    ),
    capacity=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_no_store_beats_the_optimal_one_and_it_can_be_had(
    paths: list[tuple[list[int], float]], capacity: int
) -> None:
    trace = trace_of(paths)
    hits, _ = optimal_hits(Future(trace), capacity)
    assert hits.sum() == best_possible(trace, capacity)


@pytest.mark.parametrize("admission", ADMISSIONS)
@given(paths=PATHS, capacity=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_every_store_stays_below_the_bounds_and_within_its_capacity(
    admission: str, paths: list[tuple[list[int], float]], capacity: int
) -> None:
    trace = trace_of(paths)
    best, written = optimal_hits(Future(trace), capacity)
    infinite = infinite_hits(trace)
    assert (best <= infinite).all()
    done = replay(trace, POLICIES["lru"], ADMISSIONS[admission], capacity)
    assert done.hits.sum() <= best.sum()
    assert ((done.hits + done.stored) <= trace.lengths).all()
    assert ((best + written) <= trace.lengths).all()


@given(paths=PATHS, ttl_s=st.floats(1, 100))
@settings(deadline=None)
def test_what_was_not_used_for_its_time_to_live_is_gone(
    paths: list[tuple[list[int], float]], ttl_s: float
) -> None:
    trace = trace_of(paths)
    done = replay(trace, POLICIES["lru"], ADMISSIONS["all"], trace.unique_blocks, ttl_s)
    used_s: dict[int, float] = {}
    for index, (start, end) in enumerate(pairwise(trace.starts.tolist())):
        now_s, ids = trace.times_s[index], trace.ids[start:end].tolist()
        alive = [one in used_s and used_s[one] + ttl_s > now_s for one in ids]
        assert done.hits[index] == (alive.index(False) if False in alive else len(ids))
        used_s.update(dict.fromkeys(ids, now_s))


def test_the_same_replay_gives_the_same_result(tmp_path: Path) -> None:
    trace = trace_of([([n % 3, n % 2, n % 5], 1.0) for n in range(200)])
    for rule in ADMISSIONS.values():
        first, second = (replay(trace, POLICIES["lru"], rule, 7) for _ in range(2))
        assert first.hits.tolist() == second.hits.tolist()
