"""The cost model finds the constants of synthetic engines, and survives what real ones do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.costs import CostModel, DecodeCost, PrefillCost, StoreCost, TierCost
from engine.estimate import KEPT_MAX, OBSERVATIONS_TO_KNOW
from kvstore.errors import InvalidRequest
from kvstore.types import TierName

SMALL_CPU = PrefillCost.of(0.01, 1e-3, 1e-7)
LARGE_GPU = PrefillCost.of(0.005, 5e-5, 4e-9)
FLAT = PrefillCost.of(0.05, 1e-5, 1e-8)
ENGINES = [SMALL_CPU, LARGE_GPU, FLAT]
POINTS = [(64, 0), (200, 0), (1000, 0), (4000, 0), (64, 4000), (500, 2000)]
SEEDS = range(5)


def any_length(random_: random.Random) -> int:
    return int(2 ** random_.uniform(5, 12))


def learn(
    cost: PrefillCost,
    engine: PrefillCost,
    calls: int,
    seed: int,
    noise: float = 0.03,
    outliers: float = 0.0,
    length: Callable[[random.Random], int] = any_length,
) -> PrefillCost:
    """The cost after `calls` of an engine, whose very first call is fifty times too slow."""
    random_ = random.Random(seed)
    for _ in range(calls):
        tokens, context = length(random_), random_.choice([0, 0, random_.randrange(4000)])
        seconds = engine.seconds(tokens, context) * random_.lognormvariate(0, noise)
        if cost.estimate.seen == 0:
            seconds *= 50
        elif random_.random() < outliers:
            seconds *= random_.uniform(3, 30)
        cost = cost.observe(tokens, context, seconds)
    return cost


def worst_error(cost: PrefillCost, engine: PrefillCost) -> float:
    return max(abs(cost.seconds(*point) / engine.seconds(*point) - 1) for point in POINTS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_is_found_within_a_tenth(engine: PrefillCost, seed: int) -> None:
    assert worst_error(learn(PrefillCost(), engine, 60, seed), engine) < 0.1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_call_in_ten_does_not_matter(engine: PrefillCost, seed: int) -> None:
    cost = learn(PrefillCost(), engine, 60, seed, outliers=0.1)
    assert worst_error(cost, engine) < 0.1


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_engine_that_changes_its_speed_is_followed(factor: float, seed: int) -> None:
    fixed_s, quadratic_s, linear_s = SMALL_CPU.estimate.coefficients
    changed = PrefillCost.of(fixed_s * factor, linear_s * factor, quadratic_s * factor)
    cost = learn(PrefillCost(), SMALL_CPU, 50, seed, outliers=0.05)
    cost = learn(cost, changed, 50, seed + 100, outliers=0.05)
    assert worst_error(cost, changed) < 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_day_of_short_prompts_does_not_forget_the_long_ones(seed: int) -> None:
    random_ = random.Random(seed)
    cost = learn(PrefillCost(), SMALL_CPU, 60, seed)
    for call in range(500):
        tokens = random_.randrange(60, 70)
        slow = 20 if call % 17 == 3 else 1
        cost = cost.observe(
            tokens, 0, SMALL_CPU.seconds(tokens, 0) * slow * random_.uniform(1, 1.1)
        )
    assert cost.seconds(4000, 0) == pytest.approx(SMALL_CPU.seconds(4000, 0), rel=0.2)


@pytest.mark.parametrize("call_s", [0.02, 0.1, 5.0])
def test_prompts_of_one_length_scale_the_shape_that_was_assumed(call_s: float) -> None:
    cost = PrefillCost()
    for _ in range(20):
        cost = cost.observe(100, 0, call_s)
    assert cost.seconds(100, 0) == pytest.approx(call_s, rel=0.01)
    assert cost.seconds(1000, 0) == pytest.approx(10 * call_s, rel=0.05)


def test_the_first_call_of_an_engine_is_thrown_away() -> None:
    cost = PrefillCost().observe(100, 0, 100.0)
    assert cost.seconds(100, 0) == PrefillCost().seconds(100, 0)
    cost = cost.observe(100, 0, 0.02)
    assert cost.seconds(100, 0) == pytest.approx(0.02, rel=0.01)


def test_a_cost_is_known_after_a_few_calls() -> None:
    cost = PrefillCost()
    for _ in range(OBSERVATIONS_TO_KNOW):
        assert not cost.known
        cost = cost.observe(100, 0, 0.1)
    assert cost.known


def test_coefficients_are_never_negative() -> None:
    cost = PrefillCost()
    for _ in range(10):
        cost = cost.observe(1000, 0, 0.01).observe(10, 0, 0.1)
    assert min(cost.estimate.coefficients) >= 0
    assert cost.seconds(0, 0) == 0


def test_observing_leaves_the_old_value_as_it_was() -> None:
    before = learn(PrefillCost(), SMALL_CPU, 10, 1)
    copy = PrefillCost(before.estimate)
    before.observe(100, 0, 5.0)
    assert before == copy


def test_memory_is_bounded() -> None:
    cost = learn(PrefillCost(), SMALL_CPU, 300, 1, length=lambda r: int(2 ** r.uniform(0, 20)))
    assert 32 < len(cost.estimate.kept) <= KEPT_MAX


def test_costs_of_nothing_can_be_corrected() -> None:
    cost = PrefillCost.of(0.0, 0.0, 0.0)
    for tokens in (100, 200, 400, 800):
        cost = cost.observe(tokens, 0, tokens * 1e-3)
    assert cost.seconds(400, 0) == pytest.approx(0.4, rel=0.1)


def test_a_clock_that_says_zero_is_survived() -> None:
    cost = DecodeCost.of(0.02).observe(10, 0.0)
    assert cost.seconds(10) >= 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="a duration is finite"):
        PrefillCost().observe(1, 0, seconds)


@pytest.mark.parametrize("tokens", [0, -5])
def test_calls_without_work_are_refused(tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="positive size"):
        PrefillCost().observe(tokens, 0, 1.0)


def test_tokens_that_are_there_already_save_all_but_the_call_itself() -> None:
    whole, rest = SMALL_CPU.seconds(1000, 0), SMALL_CPU.seconds(400, 600)
    assert SMALL_CPU.marginal_s(600, 0) == pytest.approx(whole - rest)


@pytest.mark.parametrize("seed", SEEDS)
def test_latency_and_bandwidth_of_a_tier_are_found(seed: int) -> None:
    random_, model = random.Random(seed), CostModel()
    tier = TierCost.of(0.003, 1.3e9)
    for _ in range(40):
        size_bytes = int(2 ** random_.uniform(16, 27))
        seconds = tier.seconds(size_bytes) * random_.lognormvariate(0, 0.05)
        seconds *= 20 if random_.random() < 0.1 else 1
        model = model.observe_load(TierName.REDIS, size_bytes, seconds)
    latency_s, byte_s = model.tier(TierName.REDIS).estimate.coefficients
    assert latency_s == pytest.approx(0.003, rel=0.1)
    assert 1 / byte_s == pytest.approx(1.3e9, rel=0.1)


def test_decode_and_store_are_found() -> None:
    model = CostModel()
    for count in range(1, 30):
        model = model.observe_decode(count, 0.025 * count)
        model = model.observe_store(count * 1_000_000, 0.001 + count * 1e-3)
    assert model.decode_s(60) == pytest.approx(1.5, rel=0.01)
    assert model.store_s(10_000_000) == pytest.approx(0.011, rel=0.02)
    assert model.store_s(0) == 0


def test_an_observation_changes_only_its_own_cost() -> None:
    cold = CostModel()
    model = cold.observe_load(TierName.CPU, 10, 9.0).observe_load(TierName.CPU, 10, 9.0)
    assert model.load_s(TierName.CPU, 10) > 1
    assert model.tier(TierName.REDIS) == cold.tier(TierName.REDIS)
    assert (model.prefill, model.decode, model.store) == (cold.prefill, cold.decode, cold.store)


def test_at_cold_start_every_tier_is_assumed_to_beat_computing() -> None:
    model, block_bytes = CostModel(), 64 * 46_080
    for tier in TierName:
        assert not model.tier(tier).known
        assert model.load_s(tier, block_bytes) < model.saved_s(64, 0)


def test_a_refused_tier_comes_back_step_by_step_towards_its_prior() -> None:
    model = CostModel(tiers={TierName.REDIS: TierCost.of(10.0, 1e6)})
    slow_s = model.load_s(TierName.REDIS, 1000)
    once = model.after_refused_load(TierName.REDIS)
    assert 0.9 * slow_s < once.load_s(TierName.REDIS, 1000) < slow_s
    for _ in range(300):
        model = model.after_refused_load(TierName.REDIS)
    prior_s = CostModel().load_s(TierName.REDIS, 1000)
    assert model.load_s(TierName.REDIS, 1000) == pytest.approx(prior_s, rel=0.01)


def test_a_tier_quicker_than_its_prior_is_not_made_slower_by_refusals() -> None:
    model = CostModel(tiers={TierName.REDIS: TierCost.of(0.0, 1e12)})
    assert model.after_refused_load(TierName.REDIS) == model


def test_a_refused_store_comes_back_too() -> None:
    model = CostModel(store=StoreCost.of(10.0, 1e6))
    assert model.after_refused_store().store_s(1000) < model.store_s(1000)


def learnt_model() -> CostModel:
    model = CostModel(prefill=learn(PrefillCost(), SMALL_CPU, 20, 3))
    for count in range(1, 9):
        model = model.observe_decode(count, 0.03 * count).observe_store(count, 0.1)
        model = model.observe_load(TierName.CPU, count * 1000, 0.2)
    return model


def test_a_model_comes_back_from_json_as_it_was_and_learns_on() -> None:
    model = learnt_model()
    back = CostModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert back == model
    assert back.observe_prefill(70, 0, 0.3) == model.observe_prefill(70, 0, 0.3)


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(learnt_model().to_dict()))
    change(data)
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(version=2),
        lambda data: data.update(surprise=1),
        lambda data: data.pop("decode"),
        lambda data: data["tiers"].update(tape=data["tiers"]["cpu"]),
        lambda data: data.update(tiers=[]),
        lambda data: data["prefill"].pop("seen"),
        lambda data: data["prefill"].update(seen=-1),
        lambda data: data["prefill"].update(seen=2),
        lambda data: data["prefill"].update(coefficients=[1.0, 2.0]),
        lambda data: data["prefill"].update(coefficients=[1.0, 2.0, -1e-9]),
        lambda data: data["prefill"].update(coefficients=[1.0, 2.0, float("nan")]),
        lambda data: data["prefill"].update(coefficients=[1.0, 2.0, "3"]),
        lambda data: data["prefill"].update(kept=data["prefill"]["kept"] * 10),
        lambda data: data["prefill"]["kept"].reverse(),
        lambda data: data["prefill"]["kept"][0].pop(),
        lambda data: data["prefill"]["kept"][0].__setitem__(1, 0.0),
        lambda data: data["prefill"].update(kept=None),
    ],
)
def test_a_damaged_model_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(InvalidRequest):
        CostModel.from_dict(broken(change))


@pytest.mark.parametrize("data", [None, [], "model", 3])
def test_what_is_no_model_is_refused(data: object) -> None:
    with pytest.raises(InvalidRequest):
        CostModel.from_dict(data)
