from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.report import words
from kvstore.types import MissReason, SkipReason, TierName

_amounts = st.one_of(st.integers(0, 1000), st.integers(0, 1 << 70))


@given(_amounts, _amounts)
@example(1, 10**30)
@example(10**30 - 1, 10**30)
@example(10**30 + 1, 10**30)
def test_a_percentage_says_none_or_all_only_when_it_is_exactly_so(part: int, whole: int) -> None:
    shown = words.percent(part, whole)
    if whole == 0:
        assert shown == words.NOTHING
        return
    assert (shown == "0 %") == (part == 0)
    assert (shown == "100 %") == (part == whole)
    assert shown not in {"0.0 %", "100.0 %"}


@given(_amounts, st.integers(1, 1 << 70))
def test_a_percentage_is_true_to_a_twentieth(part: int, whole: int) -> None:
    shown = words.percent(part, whole)
    share = 100 * Fraction(part, whole)
    number = Fraction(shown.strip("<> %"))
    if shown.startswith("<"):
        assert share < number
    elif shown.startswith(">"):
        assert share > number
    elif share < 10**6:
        assert abs(share - number) <= Fraction(1, 20) + Fraction(1, 10**6)


@given(st.floats(0, 1e300), st.floats(0, 1e300))
def test_a_percentage_of_seconds_keeps_the_same_promise(part: float, whole: float) -> None:
    shown = words.percent(part, whole)
    assert (shown == "100 %") == (part == whole != 0)
    assert (shown == "0 %") == (part == 0 != whole)


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (0, 0, words.NOTHING),
        (5, 0, words.NOTHING),
        (1, 2, "50.0 %"),
        (1, 1000, "0.1 %"),
        (1, 1001, "<0.1 %"),
        (999, 1000, "99.9 %"),
        (9991, 10000, ">99.9 %"),
        (6, 5, "120.0 %"),
        (10001, 10000, ">100 %"),
    ],
)
def test_percentages_read_as_documented(part: int, whole: int, shown: str) -> None:
    assert words.percent(part, whole) == shown


@pytest.mark.parametrize(("part", "whole"), [(-1, 5), (1, -5)])
def test_a_share_with_a_sign_is_an_error(part: int, whole: int) -> None:
    with pytest.raises(ValueError, match="no sign"):
        words.percent(part, whole)


def test_every_tier_and_reason_is_explained_in_one_sentence() -> None:
    for names, sentences in (
        (TierName, words.TIERS),
        (MissReason, words.MISSES),
        (SkipReason, words.SKIPS),
    ):
        assert set(sentences) == set(names)
        for sentence in sentences.values():
            assert sentence.endswith(".")
            assert sentence.count(".") == 1


def test_a_name_of_a_newer_server_is_shown_without_an_explanation() -> None:
    assert "no explanation" in words.explain(words.MISSES, "struck_by_lightning")


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (10 << 30, "10.0 GiB"),
        (300 << 40, "300 TiB"),
    ],
)
def test_sizes_have_three_digits_and_a_binary_unit(size_bytes: int, shown: str) -> None:
    assert words.size(size_bytes) == shown


@pytest.mark.parametrize(
    ("n", "shown"), [(0, "0"), (99_999, "99,999"), (100_000, "100 k"), (12_345_678, "12.3 M")]
)
def test_counts_are_in_full_until_they_are_long(n: int, shown: str) -> None:
    assert words.count(n) == shown


@given(st.integers(0, 1 << 70))
def test_sizes_and_counts_of_any_length_stay_short(n: int) -> None:
    assert len(words.size(n)) <= len("1023 KiB")
    assert len(words.count(n)) <= len("99,999")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (0.0001, "<1 ms"),
        (0.34, "340 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (12.0, "12 s"),
        (59.96, "1 min"),
        (200.0, "3 min 20 s"),
        (3599.9, "1 h"),
        (86_400 * 2 + 7200, "2 d 2 h"),
        (-12.34, "\N{MINUS SIGN}12.3 s"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, shown: str) -> None:
    assert words.duration(seconds) == shown


@given(st.text())
def test_a_plain_name_has_nothing_that_steers_a_terminal(name: str) -> None:
    assert words.plain(name).isprintable()
    assert len(words.plain(name)) == len(name)


def test_a_time_that_is_no_time_is_shown_as_nothing() -> None:
    assert words.moment(1e30) == words.NOTHING
    assert words.moment(0.0) == "1970-01-01 00:00:00 UTC"
