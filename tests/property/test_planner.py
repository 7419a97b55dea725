"""Whatever is found, decided and delivered, hits and misses are exactly the prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.admission import Override, decide_load
from engine.costs import CostModel, PrefillCost, TierCost
from engine.planner import Counts, Run, account, cut_runs, plan_load
from kvstore.types import BlockCount, MissReason, TierName

RUNS = st.lists(st.tuples(st.sampled_from(TierName), st.integers(0, 12)), max_size=5)
REASONS = st.sampled_from([reason for reason in MissReason if reason is not MissReason.TAIL])
PROMPT_TOKENS = st.integers(0, 200)
BLOCK_TOKENS = st.integers(1, 20)
COSTS = st.builds(
    lambda linear_s, quadratic_s, tiers: CostModel(
        prefill=PrefillCost.of(0.01, linear_s, quadratic_s),
        tiers={tier: TierCost.of(*cost) for tier, cost in tiers.items()},
    ),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
    st.dictionaries(
        st.sampled_from(TierName), st.tuples(st.floats(0, 0.1), st.floats(1e3, 1e9)), max_size=3
    ),
)


def total(counts: Counts) -> BlockCount:
    hits, misses = counts
    return sum([*hits.values(), *misses.values()], BlockCount())


def whole(prompt_tokens: int, block_tokens: int) -> BlockCount:
    full = prompt_tokens // block_tokens
    return BlockCount(prompt_tokens, full, full * 1000)


@given(PROMPT_TOKENS, BLOCK_TOKENS, RUNS, REASONS)
def test_an_account_adds_up_to_the_prompt(
    prompt_tokens: int, block_tokens: int, runs: list[Run], reason: MissReason
) -> None:
    loaded = cut_runs(runs, max(prompt_tokens - 1, 0) // block_tokens)
    counts = account(prompt_tokens, block_tokens, 1000, loaded, reason)
    assert total(counts) == whole(prompt_tokens, block_tokens)
    assert set(counts[1]) <= {reason, MissReason.TAIL}


@given(PROMPT_TOKENS, BLOCK_TOKENS, RUNS, REASONS, COSTS, st.sampled_from(Override))
def test_a_plan_adds_up_and_leaves_a_token_to_compute(
    prompt_tokens: int,
    block_tokens: int,
    runs: list[Run],
    reason: MissReason,
    costs: CostModel,
    override: Override,
) -> None:
    plan = plan_load(prompt_tokens, block_tokens, 1000, runs, reason, costs, override)
    assert total((dict(plan.hits), dict(plan.misses))) == whole(prompt_tokens, block_tokens)
    assert plan.first_computed_token == plan.blocks * block_tokens
    assert prompt_tokens == 0 or plan.first_computed_token < prompt_tokens


@given(PROMPT_TOKENS, BLOCK_TOKENS, RUNS, REASONS, COSTS, REASONS, st.integers(0, 60))
def test_a_plan_settles_to_the_prompt_however_many_blocks_arrive(
    prompt_tokens: int,
    block_tokens: int,
    runs: list[Run],
    reason: MissReason,
    costs: CostModel,
    failed: MissReason,
    arrived: int,
) -> None:
    plan = plan_load(prompt_tokens, block_tokens, 1000, runs, reason, costs)
    loaded = cut_runs(plan.runs, arrived)
    hits, misses = plan.settle(loaded, failed)
    assert total((hits, misses)) == whole(prompt_tokens, block_tokens)
    assert sum(hit.blocks for hit in hits.values()) == min(arrived, plan.blocks)


@given(RUNS, COSTS, st.integers(0, 5000))
def test_no_other_number_of_blocks_would_save_more_time(
    runs: list[Run], costs: CostModel, first_token: int
) -> None:
    known = CostModel(
        prefill=costs.prefill,
        tiers={tier: costs.tiers.get(tier, TierCost.of(0.001, 1e8)) for tier in TierName},
    )
    decision = decide_load(known, runs, 1000, 16, first_token)

    def gain_s(blocks: int) -> float:
        load_s = 0.0
        for tier, count in cut_runs(runs, blocks):
            load_s += known.load_s(tier, count * 1000)
        return known.saved_s(blocks * 16, first_token) - load_s

    best_s = max(gain_s(blocks) for blocks in range(sum(count for _, count in runs) + 1))
    assert abs(gain_s(decision.blocks) - best_s) < 1e-9
    assert abs(decision.prefill_saved_s - decision.load_s - best_s) < 1e-9
