from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.report.ledger import BUCKET_S, BUCKETS_MAX, NAME_CHARS_MAX, NAMES_MAX, OTHER, Ledger
from kvstore.types import (
    BlockCount,
    Fingerprint,
    MissReason,
    NamespaceInfo,
    SkipReason,
    TierName,
    Usage,
)


class HandClock:
    def __init__(self) -> None:
        self.monotonic, self.wall = 1000.0, 1_700_000_000.0

    def monotonic_s(self) -> float:
        return self.monotonic

    def wall_s(self) -> float:
        return self.wall

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


def info(model: str = "llama", tenant: str = "search") -> NamespaceInfo:
    return NamespaceInfo(Fingerprint(bytes(32)), 4096, 16, model, tenant)


GOOD = Usage(
    requests=1,
    prompt=BlockCount(100, 6, 600),
    output_tokens=5,
    hits={TierName.CPU: BlockCount(64, 4, 400)},
    misses={MissReason.NEVER_SEEN: BlockCount(32, 2, 200), MissReason.TAIL: BlockCount(4, 0, 0)},
    stored=BlockCount(32, 2, 200),
    skipped={SkipReason.NO_SPACE: BlockCount(16, 1, 100)},
    prefill_saved_s=0.5,
    load_s=0.25,
    prefill_s=1.0,
    total_s=2.0,
)

_numbers = st.integers(0, 1 << 40)
_counts = st.builds(BlockCount, _numbers, _numbers, _numbers)
# Eighths add up exactly in binary, so that the order of the additions can't matter.
_seconds = st.integers(0, 1 << 20).map(lambda n: n / 8)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    hits = draw(st.dictionaries(st.sampled_from(TierName), _counts))
    misses = draw(st.dictionaries(st.sampled_from(MissReason), _counts, max_size=3))
    return Usage(
        draw(_numbers),
        sum([*hits.values(), *misses.values()], BlockCount()),
        draw(_numbers),
        hits,
        misses,
        draw(_counts),
        draw(_counts),
        draw(st.dictionaries(st.sampled_from(SkipReason), _counts, max_size=3)),
        -draw(_seconds),
        draw(_seconds),
        draw(_seconds),
        draw(_seconds),
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), usages()), max_size=6))
def test_totals_models_and_tenants_are_each_the_sum_of_all_usages(
    records: list[tuple[str, str, Usage]],
) -> None:
    ledger = Ledger(HandClock())
    for model, tenant, usage in records:
        ledger.record(info(model, tenant), usage)
    reading = ledger.read()
    assert reading.totals == sum((u for _, _, u in records), Usage())
    for position, groups in ((0, reading.by_model), (1, reading.by_tenant)):
        assert set(groups) == {record[position] for record in records}
        for name, group in groups.items():
            assert group == sum((r[2] for r in records if r[position] == name), Usage())


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, requests=-1),
        replace(GOOD, output_tokens=-1),
        replace(GOOD, prompt=BlockCount(101, 6, 600)),
        replace(GOOD, prompt=BlockCount(99, 6, 600)),
        replace(GOOD, prompt=BlockCount(100, 3, 600)),
        replace(GOOD, prompt=BlockCount(100, 6, 399)),
        replace(GOOD, hits={}),
        replace(GOOD, hits={TierName.CPU: BlockCount(96, 4, 400), TierName.GPU: BlockCount(-32)}),
        replace(GOOD, misses={MissReason.TAIL: BlockCount(36, -1, 0)}),
        replace(GOOD, stored=BlockCount(0, 0, -1)),
        replace(GOOD, already_present=BlockCount(0, -1, 0)),
        replace(GOOD, skipped={SkipReason.FAILED: BlockCount(-1, 0, 0)}),
        replace(GOOD, prefill_saved_s=math.nan),
        replace(GOOD, prefill_saved_s=1e300),
        replace(GOOD, load_s=math.inf),
        replace(GOOD, load_s=-0.1),
        replace(GOOD, prefill_s=-math.inf),
        replace(GOOD, total_s=math.nan),
    ],
)
def test_a_usage_that_cannot_be_true_is_refused_and_changes_nothing(wrong: Usage) -> None:
    ledger = Ledger(HandClock())
    ledger.record(info(), GOOD)
    before = ledger.read()
    with pytest.raises(InvalidRequest):
        ledger.record(info("new model", "new tenant"), wrong)
    assert ledger.read() == before


def test_loading_that_took_longer_than_it_saved_is_believed() -> None:
    ledger = Ledger(HandClock())
    ledger.record(info(), replace(GOOD, prefill_saved_s=-3.0))
    assert ledger.read().totals.prefill_saved_s == -3.0


def test_stores_may_be_reported_without_their_request() -> None:
    ledger = Ledger(HandClock())
    ledger.record(info(), Usage(stored=BlockCount(16, 1, 100)))
    assert ledger.read().totals.stored.blocks == 1


def test_names_beyond_the_limit_are_counted_together() -> None:
    ledger = Ledger(HandClock())
    for n in range(NAMES_MAX + 5):
        ledger.record(info(f"model {n}", f"tenant {n}"), GOOD)
    reading = ledger.read()
    for groups in (reading.by_model, reading.by_tenant):
        assert len(groups) == NAMES_MAX + 1
        assert groups[OTHER].requests == 5
    ledger.record(info("model 0"), GOOD)
    assert ledger.read().by_model["model 0"].requests == 2


def test_a_long_name_is_cut() -> None:
    ledger = Ledger(HandClock())
    ledger.record(info("x" * 100_000), GOOD)
    (name,) = ledger.read().by_model
    assert len(name) == NAME_CHARS_MAX


def test_usages_within_ten_seconds_share_a_bucket() -> None:
    clock = HandClock()
    ledger = Ledger(clock)
    ledger.record(info(), GOOD)
    clock.pass_s(BUCKET_S - 0.5)
    ledger.record(info(), GOOD)
    clock.pass_s(0.5)
    ledger.record(info(), GOOD)
    first, second = ledger.read().history
    assert (first.requests, first.prompt_tokens, first.hit_tokens) == (
        2,
        200,
        {TierName.CPU: 128},
    )
    assert (second.requests, second.t - first.t) == (1, BUCKET_S)


def test_history_keeps_the_last_hour_and_totals_keep_everything() -> None:
    clock = HandClock()
    ledger = Ledger(clock)
    for _ in range(BUCKETS_MAX * 3):
        ledger.record(info(), GOOD)
        clock.pass_s(BUCKET_S)
    clock.pass_s(-BUCKET_S)
    reading = ledger.read()
    assert len(reading.history) == BUCKETS_MAX
    assert reading.taken_at - reading.history[0].t < BUCKET_S * BUCKETS_MAX
    assert reading.totals.requests == BUCKETS_MAX * 3


def test_history_of_an_idle_server_grows_old_without_records() -> None:
    clock = HandClock()
    ledger = Ledger(clock)
    ledger.record(info(), GOOD)
    clock.pass_s(BUCKET_S * BUCKETS_MAX)
    assert ledger.read().history == ()


def test_history_moves_on_when_the_wall_clock_steps_back() -> None:
    clock = HandClock()
    ledger = Ledger(clock)
    ledger.record(info(), GOOD)
    clock.wall -= 86_400
    clock.pass_s(BUCKET_S)
    ledger.record(info(), GOOD)
    assert [point.requests for point in ledger.read().history] == [1, 1]


def test_a_reading_does_not_change_afterwards() -> None:
    ledger = Ledger(HandClock())
    ledger.record(info(), GOOD)
    reading = ledger.read()
    ledger.record(info(), GOOD)
    assert reading.totals.requests == 1
    assert reading.by_model["llama"].requests == 1
    assert reading.history[0].hit_tokens == {TierName.CPU: 64}
