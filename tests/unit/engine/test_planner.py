"""Plans: what is loaded, what is computed, what is stored, and why not."""

from __future__ import annotations

import dataclasses

import pytest

from engine.admission import Override
from engine.costs import CostModel, DecodeCost, PrefillCost, StoreCost, TierCost
from engine.planner import LoadPlan, Run, account, plan_load, storable_blocks
from kvstore.errors import InvalidRequest
from kvstore.types import BlockCount, MissReason, TierName

GPU, CPU, REDIS = TierName.GPU, TierName.CPU, TierName.REDIS
COSTS = CostModel(
    PrefillCost.of(0.0, 1e-3, 0.0),
    DecodeCost.of(0.025),
    StoreCost.of(0.0, 4e9),
    {CPU: TierCost.of(0.0, 4e9), REDIS: TierCost.of(0.0, 0.7e9)},
)
SLOW_REDIS = dataclasses.replace(
    COSTS, tiers={CPU: TierCost.of(0.0, 4e9), REDIS: TierCost.of(9.0, 1e9)}
)


def blocks(count: int) -> BlockCount:
    return BlockCount(16 * count, count, 1000 * count)


def plan(
    prompt_tokens: int,
    runs: list[Run],
    reason: MissReason | None = MissReason.NEVER_SEEN,
    costs: CostModel = COSTS,
    override: Override = Override.DEFAULT,
) -> LoadPlan:
    return plan_load(prompt_tokens, 16, 1000, runs, reason, costs, override)


def test_a_found_prefix_is_loaded_and_the_rest_computed() -> None:
    found = plan(200, [(GPU, 3), (CPU, 5), (REDIS, 2)])
    assert found.runs == ((GPU, 3), (CPU, 5), (REDIS, 2))
    assert found.first_computed_token == 160
    assert found.hits == {GPU: blocks(3), CPU: blocks(5), REDIS: blocks(2)}
    assert found.misses == {
        MissReason.NEVER_SEEN: blocks(2),
        MissReason.TAIL: BlockCount(tokens=8),
    }


@pytest.mark.parametrize(
    ("prompt_tokens", "loaded"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (48, 2), (49, 3)]
)
def test_at_least_one_prompt_token_is_always_computed(prompt_tokens: int, loaded: int) -> None:
    found = plan(prompt_tokens, [(CPU, 5)], None)
    assert found.blocks == loaded
    assert found.first_computed_token == 16 * loaded
    assert found.decision.reason is None


def test_a_last_full_block_that_can_not_be_loaded_is_a_block_of_tail() -> None:
    assert plan(48, [(CPU, 3)], None).misses == {MissReason.TAIL: blocks(1)}


def test_a_far_run_that_is_not_worth_loading_is_told_from_what_is_not_there() -> None:
    found = plan(200, [(CPU, 5), (REDIS, 2)], MissReason.EVICTED, SLOW_REDIS)
    assert found.runs == ((CPU, 5),)
    assert found.first_computed_token == 80
    assert found.misses == {
        MissReason.NOT_WORTH_LOADING: blocks(2),
        MissReason.EVICTED: blocks(5),
        MissReason.TAIL: BlockCount(tokens=8),
    }


def test_an_override_reaches_the_decision() -> None:
    found = plan(200, [(CPU, 5), (REDIS, 2)], costs=SLOW_REDIS, override=Override.ALWAYS)
    assert found.blocks == 7


def test_nothing_found_computes_everything() -> None:
    found = plan(40, [], MissReason.SERVER_DOWN)
    assert (found.runs, found.first_computed_token, found.hits) == ((), 0, {})
    assert found.misses == {
        MissReason.SERVER_DOWN: blocks(2),
        MissReason.TAIL: BlockCount(tokens=8),
    }


def test_a_plan_that_went_well_settles_as_planned() -> None:
    found = plan(200, [(CPU, 5), (REDIS, 2)], costs=SLOW_REDIS)
    assert found.settle(found.runs) == (found.hits, found.misses)


def test_blocks_that_did_not_arrive_miss_for_the_failure_and_the_rest_for_its_own_reason() -> None:
    found = plan(200, [(CPU, 5), (REDIS, 2)], MissReason.EXPIRED)
    hits, misses = found.settle([(CPU, 3)], MissReason.CORRUPT)
    assert hits == {CPU: blocks(3)}
    assert misses == {
        MissReason.CORRUPT: blocks(4),
        MissReason.EXPIRED: blocks(5),
        MissReason.TAIL: BlockCount(tokens=8),
    }


def test_a_failure_is_ignored_if_all_planned_blocks_arrived() -> None:
    found = plan(200, [(CPU, 5), (REDIS, 2)], costs=SLOW_REDIS)
    assert found.settle(found.runs, MissReason.TOO_SLOW) == (found.hits, found.misses)


@pytest.mark.parametrize(("found", "never_seen"), [(0, 2), (1, 2), (2, 2), (3, 1), (4, 0), (99, 0)])
def test_found_blocks_lie_between_the_loaded_and_the_loadable_ones(
    found: int, never_seen: int
) -> None:
    _, misses = account(
        65,
        16,
        1000,
        [(CPU, 2)],
        MissReason.CORRUPT,
        found_blocks=found,
        beyond=MissReason.NEVER_SEEN,
    )
    assert misses.get(MissReason.NEVER_SEEN, BlockCount()) == blocks(never_seen)
    assert misses.get(MissReason.CORRUPT, BlockCount()) == blocks(2 - never_seen)


def test_blocks_that_did_not_arrive_need_a_reason() -> None:
    with pytest.raises(InvalidRequest, match="no reason is given"):
        plan(200, [(CPU, 5)]).settle([(CPU, 3)])


def test_missing_blocks_need_a_reason() -> None:
    with pytest.raises(InvalidRequest, match="2 blocks were not loaded"):
        account(33, 16, 1000, [], None)


def test_more_hits_than_are_loadable_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="more blocks loaded than the 2"):
        account(48, 16, 1000, [(CPU, 3)], None)


@pytest.mark.parametrize("sizes", [(-1, 16, 1), (5, 0, 1), (5, 16, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="impossible sizes"):
        account(*sizes, [], MissReason.NEVER_SEEN)


def test_a_negative_run_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a run of -1 blocks"):
        plan(200, [(CPU, -1)])


@pytest.mark.parametrize(
    ("sequence", "computed_from", "present", "expected"),
    [
        (100, 0, 0, (0, 6)),
        (100, 48, 3, (3, 3)),
        (96, 48, 3, (3, 3)),
        (95, 48, 3, (3, 2)),
        (100, 80, 3, (3, 3)),  # the engine's own memory had two blocks more than the store
        (100, 32, 5, (2, 4)),  # the store had three blocks more than it could deliver
        (100, 96, 6, (6, 0)),
        (10, 0, 0, (0, 0)),
        (40, 32, 9, (2, 0)),
    ],
)
def test_new_full_blocks_are_storable(
    sequence: int, computed_from: int, present: int, expected: tuple[int, int]
) -> None:
    assert storable_blocks(sequence, computed_from, present, 16) == expected


def test_impossible_sequences_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="impossible sizes"):
        storable_blocks(-1, 0, 0, 16)


@pytest.mark.parametrize(
    ("pool_tokens", "runs", "hits", "misses"),
    [
        # 100 tokens are 6 loadable blocks and 4 tokens more. The pool ends 8 tokens into block 2,
        (40, [(GPU, 2), (CPU, 4)], {GPU: 40, CPU: 56}, {MissReason.TAIL: 4}),  # which is loaded,
        (40, [(GPU, 2)], {GPU: 40}, {MissReason.NEVER_SEEN: 56, MissReason.TAIL: 4}),  # or isn't,
        (98, [(GPU, 6)], {GPU: 98}, {MissReason.TAIL: 2}),  # or into what can't be loaded.
        (32, [(GPU, 2), (CPU, 4)], {GPU: 32, CPU: 64}, {MissReason.TAIL: 4}),
    ],
)
def test_a_pool_of_smaller_blocks_counts_to_the_token(
    pool_tokens: int,
    runs: list[Run],
    hits: dict[TierName, int],
    misses: dict[MissReason, int],
) -> None:
    made = plan_load(
        100, 16, 1000, runs, MissReason.NEVER_SEEN, COSTS, pool_tokens=pool_tokens, settled_blocks=2
    )
    assert {tier: count.tokens for tier, count in made.hits.items()} == hits
    assert {reason: count.tokens for reason, count in made.misses.items()} == misses
    assert made.settle(made.runs) == (made.hits, made.misses)


def test_what_needs_no_copying_is_not_up_for_decision() -> None:
    for override in Override:
        made = plan_load(
            100, 16, 1000, [(GPU, 2), (REDIS, 4)], None, SLOW_REDIS, override, settled_blocks=2
        )
        assert made.blocks == (6 if override is Override.ALWAYS else 2)
        assert made.hits[GPU].blocks == 2
