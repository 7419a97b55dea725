from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from kvstore.report import plots, words
from kvstore.report.page import render
from kvstore.report.page_style import COLORS, FILLS
from kvstore.report.snapshot import Snapshot
from kvstore.types import MissReason, SkipReason, TierName

_VOID = {"meta", "br", "img", "link", "rect", "path"}


class Reader(HTMLParser):
    """Elements, attributes and the text of the page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(params=["busy", "fresh"])
def either(request: pytest.FixtureRequest) -> Snapshot:
    found: Snapshot = request.getfixturevalue(request.param)
    return found


def test_the_page_asks_for_nothing_from_outside(either: Snapshot) -> None:
    page = render(either)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", page)
    attributes = {name for _, one in Reader(page).elements for name in one}
    assert not attributes & {"src", "href", "srcset", "action", "data", "xlink:href"}
    assert "default-src 'none'" in page


def test_the_embedded_snapshot_reads_back_equal(either: Snapshot) -> None:
    reader = Reader(render(either))
    (script,) = reader.named("script")
    assert script == {"type": "application/json", "id": "snapshot"}
    assert json.loads("".join(reader.scripts)) == either


def test_every_element_is_closed_where_it_should_be(either: Snapshot) -> None:
    assert Reader(render(either)).open == []


def test_a_hostile_name_adds_no_element_and_no_attribute(busy: Snapshot, hostile_name: str) -> None:
    reader = Reader(render(busy))
    assert reader.named("img") == []
    assert len(reader.named("script")) == 1
    assert not [a for _, one in reader.elements for a in one if a.startswith("on")]
    assert reader.text.count(words.plain(hostile_name)) >= 2


def test_hostile_names_of_every_kind_stay_text(busy: Snapshot) -> None:
    attack = "<script>alert(1)</script>"
    busy["server"]["version"] = busy["server"]["targets"][0] = busy["server"]["epoch"] = attack
    busy["control"]["rpc"] = {attack: 1}
    busy["tiers"][1]["counters"] = {attack: 1}
    busy["totals"]["hits"][attack] = busy["totals"]["hits"]["cpu"]
    busy["totals"]["misses"][attack] = busy["totals"]["misses"]["tail"]
    busy["totals"]["skipped"][attack] = busy["totals"]["skipped"]["failed"]
    busy["history"][0]["hit_tokens"][attack] = 1
    reader = Reader(render(busy))
    assert len(reader.named("script")) == 1
    assert json.loads("".join(reader.scripts)) == busy


def test_each_reason_that_appears_is_explained(busy: Snapshot) -> None:
    text = Reader(render(busy)).text
    sentences = [*words.TIERS.values(), *words.MISSES.values(), *words.SKIPS.values()]
    assert [one for one in sentences if one not in text] == []


def test_every_plot_has_a_title_and_every_table_a_name(either: Snapshot) -> None:
    page = render(either)
    assert len(re.findall(r"<svg[^>]*><title>[^<]+</title>", page)) == page.count("<svg")
    tables = [one for one in Reader(page).named("div") if one.get("class") == "scroll"]
    assert len(tables) == page.count("<table>") > 0
    assert all(one["aria-label"] for one in tables)


def test_a_busy_page_has_its_plots(busy: Snapshot) -> None:
    text = Reader(render(busy)).text
    for title in (
        "Prompt tokens by tier and by reason for computing them",
        "Share of prompt tokens reused over time",
        "Prompt tokens over time",
        "Blocks offered for storing, by what became of them",
        "50.0 % full",
    ):
        assert title in text


def test_a_fresh_server_has_a_page_without_a_rate(fresh: Snapshot) -> None:
    text = Reader(render(fresh)).text
    assert "No prompt has been reported since the server started." in text
    assert "No prompt has been reported in the last hour." in text
    assert "No block has been offered since the server started." in text
    assert "NaN" not in text
    assert "None" not in text


def test_a_history_from_before_the_clock_was_set_is_left_out(busy: Snapshot) -> None:
    busy["history"][0]["t"] = busy["taken_at"] + 86_400
    assert "No prompt has been reported in the last hour." in render(busy)


def test_dark_and_light_have_each_their_colours(busy: Snapshot) -> None:
    page = render(busy)
    assert "prefers-color-scheme:dark" in page
    for color in COLORS.values():
        assert color.light in page
        assert color.dark in page


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", COLORS)
def test_labels_can_be_read_on_their_colour(name: str) -> None:
    color = COLORS[name]
    for fill, ink in ((color.light, color.light_ink), (color.dark, color.dark_ink)):
        high, low = sorted((_luminance(fill), _luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_every_tier_and_reason_has_a_colour_of_its_own_in_its_plot() -> None:
    prompt = [FILLS[name] for name in (*TierName, *MissReason)]
    stores = [FILLS[name] for name in SkipReason]
    assert len(set(prompt)) == len(prompt)
    assert len(set(stores)) == len(stores)


def test_parts_fill_the_bar_in_proportion_and_none_is_invisible() -> None:
    widths = plots.widths([1, 0, 999_999, 1_000_000])
    assert sum(widths) == pytest.approx(plots.WIDTH)
    assert widths[0] >= 2
    assert widths[1] == 0
    assert widths[2] == pytest.approx(widths[3], rel=0.01)
