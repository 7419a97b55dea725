from __future__ import annotations

import re

import pytest

from kvstore.report import words
from kvstore.report.snapshot import Snapshot
from kvstore.report.text import GROUPS_MAX, WIDTH_MIN, render
from kvstore.types import MissReason, SkipReason


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_asked(busy: Snapshot, width: int) -> None:
    lines = render(busy, width).splitlines()
    assert max(len(line) for line in lines) <= width


def test_a_width_too_small_for_the_numbers_is_not_obeyed(busy: Snapshot) -> None:
    assert render(busy, 1) == render(busy, WIDTH_MIN)


def test_the_hit_rate_comes_before_everything_that_explains_it(busy: Snapshot) -> None:
    shown = render(busy, 120)
    hit = sum(count["tokens"] for count in busy["totals"]["hits"].values())
    rate = words.percent(hit, busy["totals"]["prompt"]["tokens"])
    assert 0 < shown.index(rate) < shown.index("never seen") < shown.index("gain too small")


def test_each_reason_that_appears_is_explained_and_no_other(busy: Snapshot) -> None:
    def explained(shown: str, sentence: str) -> bool:
        return sentence in shown

    shown = render(busy, 250)
    for reason in MissReason:
        assert explained(shown, words.MISSES[reason])
    for skip in SkipReason:
        assert explained(shown, words.SKIPS[skip])
    del busy["totals"]["misses"]["corrupt"]
    assert not explained(render(busy, 250), words.MISSES[MissReason.CORRUPT])


def test_a_tier_that_is_down_stands_out(busy: Snapshot) -> None:
    assert re.search(r"redis +DOWN", render(busy, 100))
    assert re.search(r"gpu +absent", render(busy, 100))
    assert re.search(r"cpu +up +512 MiB +1\.00 GiB +50\.0 %", render(busy, 100))


def test_a_hostile_name_can_neither_steer_the_terminal_nor_add_lines(busy: Snapshot) -> None:
    busy["by_model"] = {"[bold]x[/]\x1b]0;owned\x07\nHit rate 100 %": busy["totals"]}
    shown = render(busy, 120)
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "[bold]x[/]" in shown
    assert not re.search(r"^Hit rate 100 %", shown, re.MULTILINE)


def test_only_the_busiest_models_are_listed(busy: Snapshot) -> None:
    busy["by_model"] = {f"model {n}": busy["totals"] for n in range(GROUPS_MAX + 3)}
    shown = render(busy, 100)
    assert shown.count("model ") == GROUPS_MAX
    assert "and 3 more" in shown


def test_colour_is_written_only_when_asked_for(busy: Snapshot) -> None:
    assert "\x1b[" not in render(busy, 100)
    assert "\x1b[1m" in render(busy, 100, color=True)


def test_loading_that_cost_more_than_it_saved_is_said_plainly(busy: Snapshot) -> None:
    assert "longer than computing would" not in render(busy, 100)
    busy["totals"]["prefill_saved_s"] = -2.0
    assert "longer than computing would" in render(busy, 100)


def test_a_fresh_server_says_that_there_is_no_hit_rate_yet(fresh: Snapshot) -> None:
    shown = render(fresh, 80)
    assert "No prompt has been reported yet" in shown
    assert "Hit rate" not in shown
    assert "Models" not in shown
    assert re.search(r"cpu +up +0 B +1\.00 GiB +0 %", shown)


def test_stores_are_shown_even_before_the_first_prompt(fresh: Snapshot) -> None:
    fresh["totals"]["stored"] = {"tokens": 16, "blocks": 1, "bytes": 4096}
    assert re.search(r"stored +1 +100 % +16 +4\.00 KiB", render(fresh, 100))
