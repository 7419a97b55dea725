"""What every tier guarantees (D7): one suite over gpu, cpu, redis, and redis as a Cluster."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore import slots
from kvstore.errors import InvalidRequest
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier
from kvstore.types import BlockKey, NamespaceInfo, Outcome, TierState
from tests.contract.harness import (
    Bench,
    CpuBench,
    GpuBench,
    RedisBench,
    chain,
    data_of,
    info_of,
    key_of,
)

SIZES = [1, 63, 64, 4097, (1 << 20) + 1]
SMALL = info_of("small", 1000)
OK, PRESENT, ABSENT, NO_SPACE = Outcome.OK, Outcome.PRESENT, Outcome.ABSENT, Outcome.NO_SPACE


def fill(
    bench: Bench, tier: Tier[Any], info: NamespaceInfo, name: str, blocks: int
) -> list[BlockKey]:
    """Stores a prefix; returns its keys."""
    keys = chain(name, blocks)
    outcomes = bench.put(tier, info, keys, [data_of(key, info.block_bytes) for key in keys])
    assert outcomes == [OK] * blocks
    return keys


# -- bytes in, bytes out


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_comes_back_bit_for_bit(bench: Bench, size: int) -> None:
    info = info_of("sizes", size)
    tier = bench.make_for(3, size)
    keys = chain("a", 3)
    blocks = [data_of(("a", index), size) for index in range(3)]
    assert bench.put(tier, info, keys, blocks) == [OK] * 3
    assert bench.get(tier, info, keys) == blocks
    assert tier.contains(info, keys) == [True] * 3


def test_blocks_of_many_sizes_live_side_by_side(bench: Bench) -> None:
    tier = bench.make(64 << 10, 4097)
    stored = {}
    for size in (1, 63, 64, 4097):
        info = info_of(f"size {size}", size)
        keys = chain(size, 2)
        blocks = [data_of(key, size) for key in keys]
        assert bench.put(tier, info, keys, blocks) == [OK, OK]
        stored[info] = (keys, blocks)
    for info, (keys, blocks) in stored.items():
        assert bench.get(tier, info, keys) == blocks


def test_a_block_that_was_never_put_is_absent(bench: Bench) -> None:
    tier = bench.make_for(4, SMALL.block_bytes)
    assert bench.get(tier, SMALL, chain("never", 2)) == [ABSENT, ABSENT]
    assert tier.contains(SMALL, chain("never", 2)) == [False, False]


def test_a_second_put_says_present_and_the_first_bytes_stay(bench: Bench) -> None:
    tier = bench.make_for(4, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 1)
    assert bench.put(tier, SMALL, keys, [b"x" * SMALL.block_bytes]) == [PRESENT]
    assert bench.get(tier, SMALL, keys) == [data_of(keys[0], SMALL.block_bytes)]
    assert tier.status().blocks == 1
    assert tier.status().used_bytes == SMALL.block_bytes


def test_the_tier_keeps_a_copy_and_not_the_callers_buffer(bench: Bench) -> None:
    tier = bench.make_for(4, SMALL.block_bytes)
    buffer = bench.buffer(b"1" * SMALL.block_bytes)
    tier.put(SMALL, chain("a", 1), [buffer])
    buffer[:] = bench.buffer(b"2" * SMALL.block_bytes)
    assert bench.get(tier, SMALL, chain("a", 1)) == [b"1" * SMALL.block_bytes]
    into = bench.buffer(b"0" * SMALL.block_bytes)
    tier.get(SMALL, chain("a", 1), [into])
    into[:] = bench.buffer(b"3" * SMALL.block_bytes)
    assert bench.get(tier, SMALL, chain("a", 1)) == [b"1" * SMALL.block_bytes]


def test_another_namespace_with_the_same_keys_is_absent(bench: Bench) -> None:
    tier = bench.make_for(8, 100)
    one, other = info_of("one", 100), info_of("other", 100)
    keys = fill(bench, tier, one, "a", 2)
    assert bench.get(tier, other, keys) == [ABSENT, ABSENT]
    assert tier.contains(other, keys) == [False, False]
    assert tier.evict(other, keys) == 0
    assert tier.clear(other) == 0
    assert bench.get(tier, one, keys) == [data_of(key, 100) for key in keys]


def test_two_namespaces_keep_their_own_bytes_under_the_same_keys(bench: Bench) -> None:
    tier = bench.make_for(8, 100)
    keys = chain("a", 2)
    infos = [info_of("one", 100), info_of("other", 100)]
    for info in infos:
        blocks = [data_of((info.model, key), 100) for key in keys]
        assert bench.put(tier, info, keys, blocks) == [OK, OK]
    for info in infos:
        assert bench.get(tier, info, keys) == [data_of((info.model, key), 100) for key in keys]
    assert tier.clear(infos[0]) == 2
    assert bench.get(tier, infos[0], keys) == [ABSENT, ABSENT]
    assert bench.get(tier, infos[1], keys) == [data_of(("other", key), 100) for key in keys]


# -- wrong requests


@pytest.mark.parametrize("wrong", [999, 1001, 0])
def test_a_block_of_the_wrong_size_is_refused_and_nothing_changes(bench: Bench, wrong: int) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    kept = fill(bench, tier, SMALL, "kept", 1)
    keys = chain("new", 2)
    blocks = [bench.buffer(b"x" * SMALL.block_bytes), bench.buffer(b"x" * max(wrong, 1))[:wrong]]
    with pytest.raises(InvalidRequest, match="buffer 1"):
        tier.put(SMALL, keys, blocks)
    assert tier.contains(SMALL, [*kept, *keys]) == [True, False, False]
    assert (tier.status().blocks, tier.status().used_bytes) == (1, SMALL.block_bytes)


def test_a_buffer_of_the_wrong_size_is_refused_and_no_buffer_is_written(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 2)
    into = [bench.buffer(b"\0" * 1000), bench.buffer(b"\0" * 1001)]
    with pytest.raises(InvalidRequest, match="1001"):
        tier.get(SMALL, keys, into)
    assert [bench.bytes_of(buffer) for buffer in into] == [b"\0" * 1000, b"\0" * 1001]


def test_one_buffer_too_few_is_refused_and_nothing_changes(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = chain("a", 2)
    with pytest.raises(InvalidRequest, match="2 keys, but 1 buffers"):
        tier.put(SMALL, keys, [bench.buffer(b"x" * 1000)])
    with pytest.raises(InvalidRequest, match="2 keys, but 1 buffers"):
        tier.get(SMALL, keys, [bench.buffer(b"x" * 1000)])
    assert tier.contains(SMALL, keys) == [False, False]
    assert tier.status().used_bytes == 0


def test_an_empty_batch_is_harmless(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 2)
    assert tier.put(SMALL, [], []) == []
    assert tier.get(SMALL, [], []) == []
    assert tier.contains(SMALL, []) == []
    assert tier.evict(SMALL, []) == 0
    assert tier.contains(SMALL, keys) == [True, True]


def test_a_block_larger_than_the_whole_tier_pushes_nothing_out(bench: Bench) -> None:
    tier = bench.make(8000, 1000)
    keys = fill(bench, tier, SMALL, "a", 2)
    huge = info_of("huge", tier.status().capacity_bytes + 1)
    if isinstance(tier, CpuTier):  # it says at once that no slab could ever hold such a block
        with pytest.raises(InvalidRequest, match="doesn't fit"):
            bench.put(tier, huge, chain("huge", 1), [bytes(huge.block_bytes)])
    else:
        outcomes = bench.put(tier, huge, chain("huge", 1), [bytes(huge.block_bytes)])
        assert outcomes == [NO_SPACE]
    assert tier.contains(SMALL, keys) == [True, True]


# -- batches


def test_a_get_tells_of_each_block_on_its_own(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 3)
    asked = [keys[0], key_of("absent"), keys[1], key_of("absent too"), keys[2]]
    data = [data_of(key, 1000) for key in keys]
    assert bench.get(tier, SMALL, asked) == [data[0], ABSENT, data[1], ABSENT, data[2]]
    assert tier.contains(SMALL, asked) == [True, False, True, False, True]


def test_a_put_tells_of_each_block_on_its_own(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = chain("a", 4)
    fill(bench, tier, SMALL, "a", 2)
    blocks = [data_of(key, 1000) for key in keys]
    assert bench.put(tier, SMALL, keys, blocks) == [PRESENT, PRESENT, OK, OK]
    assert bench.get(tier, SMALL, keys) == blocks


def test_a_put_larger_than_the_tier_keeps_the_head_of_the_prefix(bench: Bench) -> None:
    tier = bench.make_for(4, 4096)
    info = info_of("pages", 4096)
    keys = chain("a", 10)
    outcomes = bench.put(tier, info, keys, [data_of(key, 4096) for key in keys])
    kept = outcomes.count(OK)
    assert 4 <= kept <= 6
    assert outcomes == [OK] * kept + [NO_SPACE] * (10 - kept)
    assert tier.contains(info, keys) == [True] * kept + [False] * (10 - kept)
    assert bench.get(tier, info, keys[:kept]) == [data_of(key, 4096) for key in keys[:kept]]


# -- room


def test_the_least_recently_used_prefix_makes_room(bench: Bench) -> None:
    info = info_of("pages", 4096)
    tier = bench.make_for(6, 4096)
    old, used = fill(bench, tier, info, "old", 3), fill(bench, tier, info, "used", 3)
    fill(bench, tier, info, "new", 1)  # now the first one's tail is gone, in every tier
    bench.get(tier, info, old[:2])
    before = sum(tier.contains(info, old))
    bench.get(tier, info, used)
    bench.get(tier, info, old[:2])
    fill(bench, tier, info, "newer", 3)
    assert sum(tier.contains(info, old)) == min(before, 2)
    assert sum(tier.contains(info, used)) < 3


def test_a_put_never_pushes_out_the_prefix_that_it_extends(bench: Bench) -> None:
    info = info_of("pages", 4096)
    tier = bench.make_for(3, 4096)
    head = fill(bench, tier, info, "a", 1)
    stored = 1
    while bench.put(tier, info, [key_of(stored)], [bytes(4096)]) == [OK] and tier.contains(
        info, head
    ) == [True]:
        stored += 1  # until the tier is full, and the head has gone
    tier.clear()
    longest = chain("a", stored + 1)
    for index, key in enumerate(longest):
        parent = longest[index - 1] if index else None
        outcome = bench.put(tier, info, [key], [data_of(key, 4096)], parent)
        assert outcome == [OK if index < stored else NO_SPACE]
    assert tier.contains(info, longest) == [True] * stored + [False]


def test_eviction_takes_a_block_after_all_that_follow_it(bench: Bench) -> None:
    info = info_of("pages", 4096)
    tier = bench.make_for(12, 4096)
    chance = random.Random(7)
    parent_of: dict[BlockKey, BlockKey] = {}
    paths: list[list[BlockKey]] = [chain(root, 1) for root in range(2)]
    for step in range(60):
        path = list(chance.choice(paths))[: chance.randint(1, 4)]
        path += chain(("branch", step), chance.randint(1, 3))
        parent_of.update(zip(path[1:], path, strict=False))
        bench.put(tier, info, path, [data_of(key, 4096) for key in path])
        paths.append(path)
        if step % 3 == 0:
            bench.get(tier, info, chance.choice(paths))
        keys = list(parent_of)
        here = dict(zip(keys, tier.contains(info, keys), strict=True))
        heads = dict(zip(keys, tier.contains(info, [parent_of[key] for key in keys]), strict=True))
        widowed = [key for key in keys if here[key] and not heads[key]]
        assert not widowed, f"after step {step}"


def test_used_bytes_never_exceed_the_capacity(bench: Bench) -> None:
    chance = random.Random(11)
    tier = bench.make(40_000, 5000)
    capacity = tier.status().capacity_bytes
    infos = [info_of(f"of {size}", size) for size in (1, 63, 1500, 5000)]
    seen: dict[NamespaceInfo, set[BlockKey]] = {info: set() for info in infos}
    full = 0
    for step in range(80):
        info = chance.choice(infos)
        keys = chain((info.model, chance.randrange(12)), chance.randint(1, 6))
        outcomes = bench.put(tier, info, keys, [data_of(key, info.block_bytes) for key in keys])
        assert set(outcomes) <= {OK, PRESENT, NO_SPACE}
        seen[info].update(keys)
        used = sum(
            info.block_bytes * sum(tier.contains(info, list(keys))) for info, keys in seen.items()
        )
        assert tier.status().used_bytes == used <= capacity, f"after step {step}"
        full = max(full, used)
    assert full > capacity // 3  # it was not roomy all along


# -- evict and clear


def test_evict_drops_what_is_there_and_counts_it(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 4)
    assert tier.evict(SMALL, [keys[2], keys[3], key_of("absent")]) == 2
    assert tier.contains(SMALL, keys) == [True, True, False, False]
    assert tier.status().used_bytes == 2 * SMALL.block_bytes
    assert tier.evict(SMALL, keys) == 2
    assert tier.status().used_bytes == 0


def test_evict_keeps_a_block_that_another_comes_after(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    keys = fill(bench, tier, SMALL, "a", 3)
    assert tier.evict(SMALL, keys[:2]) == 0
    assert tier.contains(SMALL, keys) == [True, True, True]


def test_clear_of_a_namespace_leaves_the_others(bench: Bench) -> None:
    tier = bench.make(64 << 10, 100)
    infos = [info_of("one", 100), info_of("other", 63)]
    keys = {info.model: fill(bench, tier, info, info.model, 5) for info in infos}
    assert tier.clear(infos[0]) == 5
    assert tier.contains(infos[0], keys["one"]) == [False] * 5
    assert tier.contains(infos[1], keys["other"]) == [True] * 5
    assert tier.status().used_bytes == 5 * 63
    assert tier.clear(infos[0]) == 0


def test_after_clear_nothing_is_used_and_everything_works(bench: Bench) -> None:
    tier = bench.make(64 << 10, 4097)
    for size in (63, 4097):
        for branch in range(3):
            fill(bench, tier, info_of(f"of {size}", size), f"{size} {branch}", 2)
    assert tier.clear() == 12
    status = tier.status()
    assert (status.used_bytes, status.blocks, status.state) == (0, 0, TierState.UP)
    fill(bench, tier, info_of("of 4097", 4097), "again", 2)


def test_status_counts_what_was_stored_and_what_is_here(bench: Bench) -> None:
    tier = bench.make_for(8, SMALL.block_bytes)
    fill(bench, tier, SMALL, "a", 3)
    fill(bench, tier, SMALL, "b", 2)
    status = tier.status()
    assert (status.name, status.state) == (tier.name, TierState.UP)
    assert (status.blocks, status.used_bytes) == (5, 5 * SMALL.block_bytes)
    assert status.counters["stored"] == 5


# -- what only one tier can be given


def test_the_cpu_tier_drops_a_block_whose_header_was_scribbled_over(cpu_bench: CpuBench) -> None:
    tier = cpu_bench.make_for(4, SMALL.block_bytes)
    keys = fill(cpu_bench, tier, SMALL, "a", 2)
    block = tier.open(SMALL).get(keys[1])
    assert block is not None
    slots.write_generation(tier.arena.buffer, block.offset, block.generation + 2)
    first = data_of(keys[0], SMALL.block_bytes)
    assert cpu_bench.get(tier, SMALL, keys) == [first, Outcome.CORRUPT]
    assert cpu_bench.get(tier, SMALL, keys) == [first, ABSENT]


def test_the_gpu_tier_refuses_a_buffer_that_it_could_not_fill_in_place(
    gpu_bench: GpuBench,
) -> None:
    tier = gpu_bench.make_for(4, SMALL.block_bytes)
    keys = fill(gpu_bench, tier, SMALL, "a", 1)
    every_other = torch.zeros(2 * SMALL.block_bytes, dtype=torch.uint8)[::2]
    with pytest.raises(InvalidRequest, match="contiguous"):
        tier.get(SMALL, keys, [every_other])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_the_gpu_tier_takes_tensors_of_any_type_and_shape(
    gpu_bench: GpuBench, dtype: torch.dtype
) -> None:
    tier = gpu_bench.make_for(4, SMALL.block_bytes)
    block = gpu_bench.buffer(data_of("a", SMALL.block_bytes)).view(dtype).reshape(2, -1)
    assert tier.put(SMALL, chain("a", 1), [block]) == [OK]
    into = torch.empty_like(block)
    assert tier.get(SMALL, chain("a", 1), [into]) == [OK]
    assert torch.equal(into.view(torch.uint8), block.view(torch.uint8))


# -- against a model


INFOS = (info_of("m one", 63), info_of("m two", 63), info_of("m three", 1025))
PATHS = [
    [key_of(("m", *branch[: depth + 1])) for depth in range(len(branch))]
    for branch in [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 1)]
]
KEYS = sorted({key for path in PATHS for key in path})


class TierMachine(RuleBasedStateMachine):
    """A tier beside a dict of what was stored under each namespace and key."""

    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.bench.make(12_000, 1025)
        self.tier.clear()
        self.stored: dict[tuple[str, BlockKey], bytes] = {}
        self.puts = 0

    def teardown(self) -> None:
        self.tier.clear()
        assert self.tier.status().used_bytes == 0
        if isinstance(self.bench, RedisBench):
            self.bench.close()

    @rule(
        info=st.sampled_from(INFOS),
        path=st.sampled_from(PATHS),
        length=st.integers(1, 4),
        split=st.integers(0, 3),
    )
    def put(self, info: NamespaceInfo, path: list[BlockKey], length: int, split: int) -> None:
        keys = path[:length]
        if split < length and all(self.tier.contains(info, path[:split])):
            keys = path[split:length]
        parent = path[path.index(keys[0]) - 1] if keys[0] != path[0] else None
        self.puts += 1
        blocks = [data_of((self.puts, key), info.block_bytes) for key in keys]
        before = self.tier.contains(info, keys)
        outcomes = self.bench.put(self.tier, info, keys, blocks, parent)
        for key, block, was_here, outcome in zip(keys, blocks, before, outcomes, strict=True):
            assert outcome in (OK, PRESENT, NO_SPACE)
            assert (outcome is PRESENT) <= was_here
            if outcome is OK:
                self.stored[info.model, key] = block

    @rule(info=st.sampled_from(INFOS), path=st.sampled_from(PATHS), length=st.integers(1, 4))
    def get(self, info: NamespaceInfo, path: list[BlockKey], length: int) -> None:
        keys = path[:length]
        here = self.tier.contains(info, keys)
        for key, found, result in zip(
            keys, here, self.bench.get(self.tier, info, keys), strict=True
        ):
            assert result == (self.stored[info.model, key] if found else ABSENT)

    @rule(info=st.sampled_from(INFOS), path=st.sampled_from(PATHS), first=st.integers(0, 3))
    def evict(self, info: NamespaceInfo, path: list[BlockKey], first: int) -> None:
        keys = path[first:]
        before = sum(self.tier.contains(info, keys))
        dropped = self.tier.evict(info, keys)
        assert before - dropped == sum(self.tier.contains(info, keys))

    @rule(info=st.sampled_from(INFOS))
    def clear(self, info: NamespaceInfo) -> None:
        here = sum(self.tier.contains(info, KEYS))
        assert self.tier.clear(info) == here
        assert not any(self.tier.contains(info, KEYS))

    @invariant()
    def accounting_is_exact_and_no_block_is_here_without_those_before_it(self) -> None:
        used = blocks = 0
        for info in INFOS:
            here = dict(zip(KEYS, self.tier.contains(info, KEYS), strict=True))
            blocks += sum(here.values())
            used += sum(here.values()) * info.block_bytes
            for path in PATHS:
                present = [here[key] for key in path]
                assert present == sorted(present, reverse=True)
        status = self.tier.status()
        assert (status.blocks, status.used_bytes) == (blocks, used)
        assert used <= status.capacity_bytes


def test_a_tier_agrees_with_a_plain_dict_whatever_is_done_to_it(bench: Bench) -> None:
    machine = type("Machine", (TierMachine,), {"bench": bench})
    examples = 8 if isinstance(bench, RedisBench) else 40
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
