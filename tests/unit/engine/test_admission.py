"""Load or recompute, store or skip: the decisions and their reasons."""

from __future__ import annotations

import dataclasses

import pytest

from engine.admission import (
    GAIN_SHARE_MIN,
    Override,
    StoreDecision,
    StorePolicy,
    decide_load,
    decide_store,
    expected_request_s,
)
from engine.costs import CostModel, DecodeCost, PrefillCost, StoreCost, TierCost
from engine.reuse import ANSWER_PRIOR, PROMPT_PRIOR, reuse_of
from kvstore.errors import InvalidRequest
from kvstore.types import MissReason, SkipReason, TierName

GPU, CPU, REDIS = TierName.GPU, TierName.CPU, TierName.REDIS
TOKEN_BYTES = 46_080
SMALL_CPU_MODEL = CostModel(
    PrefillCost.of(0.0, 1e-3, 0.0),
    DecodeCost.of(0.025),
    StoreCost.of(0.0005, 4e9),
    {CPU: TierCost.of(0.0005, 4e9), REDIS: TierCost.of(0.001, 0.7e9)},
)
SLOW_REDIS = dataclasses.replace(
    SMALL_CPU_MODEL, tiers={CPU: TierCost.of(0.0005, 4e9), REDIS: TierCost.of(0.001, 10e6)}
)
BLOCK = 64 * TOKEN_BYTES


def store_of(
    prompt_tokens: int,
    answer_tokens: int,
    context: int = 0,
    block_tokens: int = 64,
    policy: StorePolicy | None = None,
    costs: CostModel = SMALL_CPU_MODEL,
) -> StoreDecision:
    """The decision for a request whose first `context` tokens came from the store."""
    first, end = context // block_tokens, (prompt_tokens + answer_tokens) // block_tokens
    return decide_store(
        costs,
        policy or StorePolicy(),
        reuse_of(first, end, prompt_tokens, block_tokens, (), 0, ANSWER_PRIOR),
        context=context,
        block_bytes=block_tokens * TOKEN_BYTES,
        block_tokens=block_tokens,
        request_s=expected_request_s(costs, prompt_tokens, answer_tokens, context),
    )


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_a_long_document_with_a_short_answer_is_stored(block_tokens: int) -> None:
    decision = store_of(2000, 20, block_tokens=block_tokens)
    assert decision.blocks
    assert decision.reason is None
    assert decision.expected_gain_s > 10 * GAIN_SHARE_MIN * decision.request_s


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_every_turn_of_a_chat_with_short_answers_is_stored(block_tokens: int) -> None:
    stored, prompt_tokens = 0, 40
    for _ in range(6):
        assert store_of(prompt_tokens, 60, stored, block_tokens).blocks
        stored = (prompt_tokens + 60) // block_tokens * block_tokens
        prompt_tokens += 100


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize("answer_tokens", [200, 1000, 10_000])
def test_a_short_prompt_with_a_long_answer_is_skipped(
    answer_tokens: int, block_tokens: int
) -> None:
    decision = store_of(40, answer_tokens, block_tokens=block_tokens)
    assert not decision.blocks
    assert decision.reason is SkipReason.GAIN_TOO_SMALL
    assert decision.expected_gain_s < 0.75 * GAIN_SHARE_MIN * decision.request_s


def test_the_next_turn_after_a_long_answer_is_stored() -> None:
    assert store_of(280, 200).blocks


def test_a_store_decision_carries_its_numbers() -> None:
    decision = store_of(1024, 0)
    load_s = 0.0005 + 16 * BLOCK / 4e9
    assert decision.gain_s == pytest.approx(1.024 - load_s)
    assert decision.cost_s == pytest.approx(0.0005 + 16 * BLOCK / 4e9)
    assert decision.request_s == pytest.approx(1.024)
    assert decision.expected_gain_s == pytest.approx(decision.gain_s * PROMPT_PRIOR)


def test_less_than_a_block_is_skipped() -> None:
    assert store_of(50, 10).reason is SkipReason.GAIN_TOO_SMALL


def test_blocks_that_no_tier_loads_faster_than_computing_are_skipped() -> None:
    slow = dataclasses.replace(
        SMALL_CPU_MODEL, tiers={CPU: TierCost.of(0.0, 1e6), REDIS: TierCost.of(0.0, 1e6)}
    )
    decision = store_of(2000, 20, costs=slow)
    assert decision.reason is SkipReason.COSTS_MORE_THAN_IT_SAVES
    assert decision.gain_s == 0


def test_the_quickest_tier_counts() -> None:
    assert store_of(2000, 20, costs=SLOW_REDIS).blocks
    decision = decide_store(SLOW_REDIS, StorePolicy(), [0.5] * 16, 0, BLOCK, 64, 1.0, tiers=[REDIS])
    assert decision.reason is SkipReason.COSTS_MORE_THAN_IT_SAVES


def test_a_store_that_the_request_waits_for_too_long_is_skipped() -> None:
    slow = dataclasses.replace(SMALL_CPU_MODEL, store=StoreCost.of(5.0, 1e9))
    assert store_of(2000, 20, costs=slow).reason is SkipReason.COSTS_MORE_THAN_IT_SAVES


def test_the_gain_threshold_is_a_setting() -> None:
    assert store_of(40, 200, policy=StorePolicy(gain_share_min=0.001)).blocks
    assert not store_of(2000, 20, policy=StorePolicy(gain_share_min=0.9)).blocks


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="gain_share_min"):
        StorePolicy(gain_share_min=share)


def test_a_request_can_insist_on_storing() -> None:
    decision = store_of(40, 200, policy=StorePolicy(Override.ALWAYS))
    assert decision.blocks
    assert decision.reason is None


def test_a_request_can_forbid_storing_even_at_cold_start() -> None:
    policy = StorePolicy(Override.NEVER)
    assert store_of(2000, 20, policy=policy).reason is SkipReason.BY_REQUEST
    assert store_of(2000, 20, policy=policy, costs=CostModel()).reason is SkipReason.BY_REQUEST


def test_what_was_never_measured_is_stored() -> None:
    unknown = dataclasses.replace(SMALL_CPU_MODEL, prefill=PrefillCost())
    assert store_of(40, 200, costs=unknown).blocks


def of(*reuse: float, crowded: bool = False, request_s: float = 1.0) -> StoreDecision:
    """The decision for blocks of these probabilities, which save 64 ms of prefill each."""
    return decide_store(
        SMALL_CPU_MODEL, StorePolicy(), reuse, 0, BLOCK, 64, request_s, crowded=crowded
    )


def test_while_there_is_room_all_is_stored_that_may_come_back() -> None:
    decision = of(0.9, 0.9, 0.1, 0.1)
    assert (decision.blocks, decision.reason) == (4, None)
    assert decision.reuse == pytest.approx(0.5, abs=0.01)


def test_in_a_crowded_arena_only_what_is_worth_more_than_what_it_displaces() -> None:
    decision = of(0.9, 0.9, 0.0, 0.0, crowded=True)
    assert (decision.blocks, decision.reason) == (2, SkipReason.DISPLACES_MORE)
    assert decision.reuse == pytest.approx(0.9)
    nothing = of(0.0, 0.0, crowded=True)
    assert (nothing.blocks, nothing.reason) == (0, SkipReason.DISPLACES_MORE)


def test_blocks_that_pay_take_along_those_before_them() -> None:
    """A block is of no use without those before it."""
    assert of(0.0, 0.9, 0.0, crowded=True).blocks == 2


def test_what_never_comes_back_is_not_stored() -> None:
    assert of(0.0, 0.0).reason is SkipReason.GAIN_TOO_SMALL


def test_no_block_is_no_decision() -> None:
    assert (of().blocks, of().reason) == (0, SkipReason.GAIN_TOO_SMALL)


def test_reuse_is_what_is_known_of_prompts_and_of_answers() -> None:
    # Blocks of 64 tokens; the prompt ends in the middle of the third.
    assert reuse_of(0, 4, 160, 64, (), 0, 0.1) == [0.5, 0.5, pytest.approx(0.3), 0.1]
    assert reuse_of(0, 4, 160, 64, (0.8, 0.2), 0, 0.0) == [0.8, 0.2, pytest.approx(0.1), 0.0]
    # Those that were found are not spoken of.
    assert reuse_of(1, 4, 256, 64, (0.9,), 2, 0.0) == [PROMPT_PRIOR, 0.9, 0.9]
    assert reuse_of(2, 2, 128, 64, (), 0, 0.0) == []


def test_a_request_takes_its_prefill_and_its_answer() -> None:
    assert expected_request_s(SMALL_CPU_MODEL, 40, 200) == pytest.approx(5.04)
    assert expected_request_s(SMALL_CPU_MODEL, 40, 200, context=30) == pytest.approx(5.01)


def test_all_is_loaded_where_all_tiers_beat_computing() -> None:
    decision = decide_load(SMALL_CPU_MODEL, [(GPU, 3), (CPU, 5), (REDIS, 2)], BLOCK, 64)
    assert (decision.blocks, decision.reason) == (10, None)
    assert decision.prefill_saved_s == pytest.approx(0.64)
    expected_s = 3 * BLOCK / 1e12 + 0.0005 + 5 * BLOCK / 4e9 + 0.001 + 2 * BLOCK / 0.7e9
    assert decision.load_s == pytest.approx(expected_s)


def test_near_tiers_are_loaded_and_a_far_one_is_recomputed() -> None:
    decision = decide_load(SLOW_REDIS, [(GPU, 3), (CPU, 5), (REDIS, 2)], BLOCK, 64)
    assert (decision.blocks, decision.reason) == (8, MissReason.NOT_WORTH_LOADING)
    assert decision.prefill_saved_s == pytest.approx(8 * 0.064)


def test_a_near_run_behind_a_far_one_is_loaded_if_it_pays_for_both() -> None:
    assert decide_load(SLOW_REDIS, [(REDIS, 1), (CPU, 50)], BLOCK, 64).blocks == 51
    assert decide_load(SLOW_REDIS, [(REDIS, 1), (CPU, 1)], BLOCK, 64).blocks == 0


def test_latency_makes_a_short_run_not_worth_loading() -> None:
    costs = dataclasses.replace(SMALL_CPU_MODEL, tiers={REDIS: TierCost.of(0.1, 1e9)})
    assert decide_load(costs, [(REDIS, 1)], BLOCK, 64).blocks == 0
    assert decide_load(costs, [(REDIS, 2)], BLOCK, 64).blocks == 2


def test_the_fixed_cost_of_a_call_is_not_saved_by_loading() -> None:
    costs = dataclasses.replace(SLOW_REDIS, prefill=PrefillCost.of(10.0, 1e-3, 0.0))
    assert decide_load(costs, [(REDIS, 5)], BLOCK, 64).blocks == 0


def test_late_blocks_are_worth_more_than_early_ones() -> None:
    costs = dataclasses.replace(SLOW_REDIS, prefill=PrefillCost.of(0.0, 1e-3, 1e-6))
    assert decide_load(costs, [(REDIS, 5)], BLOCK, 64, first_token=0).blocks == 0
    assert decide_load(costs, [(REDIS, 5)], BLOCK, 64, first_token=10_000).blocks == 5


@pytest.mark.parametrize(
    "costs",
    [
        dataclasses.replace(SLOW_REDIS, prefill=PrefillCost()),
        dataclasses.replace(SMALL_CPU_MODEL, tiers={}, prefill=PrefillCost.of(0.0, 1e-9, 0.0)),
    ],
    ids=["prefill unknown", "tier unknown"],
)
def test_what_was_never_measured_is_loaded(costs: CostModel) -> None:
    assert decide_load(costs, [(REDIS, 5)], BLOCK, 64).blocks == 5


def test_a_request_can_insist_on_loading_or_forbid_it() -> None:
    runs = [(CPU, 5), (REDIS, 2)]
    always = decide_load(SLOW_REDIS, runs, BLOCK, 64, override=Override.ALWAYS)
    never = decide_load(SLOW_REDIS, runs, BLOCK, 64, override=Override.NEVER)
    assert (always.blocks, always.reason) == (7, None)
    assert (never.blocks, never.load_s, never.prefill_saved_s) == (0, 0.0, 0.0)
    assert never.reason is MissReason.BY_REQUEST


def test_nothing_found_is_nothing_to_load() -> None:
    assert decide_load(SMALL_CPU_MODEL, [], BLOCK, 64).reason is None


def test_a_long_prefill_that_was_never_measured_does_not_look_free_after_many_short_ones() -> None:
    costs = CostModel()
    for turn in range(30):
        # An engine whose prompts all hit computes few tokens a call, which mostly cost the call.
        costs = costs.observe_prefill(25 if turn % 2 else 40, 1856, 0.5)
        costs = costs.observe_load(TierName.CPU, 29 * BLOCK, 1.0)
    decision = decide_load(costs, [(TierName.CPU, 29)], BLOCK, 64)
    assert costs.saved_s(1856, 0) < 1.0
    assert decision.blocks == 29
