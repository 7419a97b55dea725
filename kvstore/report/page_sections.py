"""The page's sections on requests and stores: each is a plot and the numbers that it shows.

Pure functions of parts of the snapshot, each giving one `<section>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.report import order, page_style, plots, words
from kvstore.report import page_html as html
from kvstore.report.ledger import BUCKET_S, BUCKETS_MAX
from kvstore.report.snapshot import Count, Group, History

ROWS_MAX = 50
"""Models, and tenants, that are listed; the embedded JSON has them all."""

_SPAN_MIN_S = 300
_SPAN_MAX_S = BUCKET_S * BUCKETS_MAX
_WINDOWS_S = (60, 300, 900, 3600)


def _parts(counts: Iterable[tuple[str, Count]], whole: int) -> list[plots.Part]:
    return [
        plots.Part(
            words.label(name),
            count["tokens"],
            words.percent(count["tokens"], whole),
            page_style.fill(name),
        )
        for name, count in counts
    ]


def prompts(totals: Group) -> str:
    """Prompt tokens, stacked: each tier, then each miss reason."""
    title, whole = "Where prompt tokens came from", totals["prompt"]
    if not whole["tokens"]:
        return html.section(title, "No prompt has been reported since the server started.")
    hits = order.nearest_first(totals["hits"])
    parts = _parts([*hits, *order.largest_first(totals["misses"])], whole["tokens"])

    def cells(count: Count) -> str:
        return html.numbers(
            words.percent(count["tokens"], whole["tokens"]),
            words.count(count["tokens"]),
            "~" + words.count(count["blocks"]),
            "~" + words.size(count["bytes"]),
        )

    rows = [
        html.row(
            html.explained(tier, words.explain(words.TIERS, tier), page_style.fill(tier)),
            cells(count),
        )
        for tier, count in hits
    ]
    hit = order.total(totals["hits"].values())
    rates = (
        f"{words.percent(hit['blocks'], whole['blocks'])} of the prompts' full blocks, "
        f"{words.percent(hit['bytes'], whole['bytes'])} of their bytes."
    )
    rows.append(html.row(html.explained("all tiers", rates), cells(hit)))
    return html.section(
        title,
        "Blue was reused, the nearest tier first. The other colours were computed; "
        "the reasons are below.",
        plots.stack("Prompt tokens by tier and by reason for computing them", parts),
        html.legend(parts),
        html.table(
            "Hits by tier",
            [":Reused from", "n:Share", "n:Tokens", "n wide:Blocks", "n wide:Bytes"],
            rows,
        ),
    )


def over_time(history: Sequence[History], taken_at: float) -> str:
    """The last hour: the share of tokens that each tier gave, and the tokens themselves."""
    title = "Hit rate over time"
    # A bucket whose wall time lies outside the hour was recorded before the clock was set.
    points = [p for p in history if taken_at - _SPAN_MAX_S - BUCKET_S < p["t"] <= taken_at]
    if not any(point["prompt_tokens"] for point in points):
        return html.section(title, "No prompt has been reported in the last hour.")
    oldest = min(point["t"] for point in points)
    span_s = min(_SPAN_MAX_S, max(_SPAN_MIN_S, taken_at - oldest))
    rate, load = _columns(points, taken_at - span_s)
    peak = max(column.amount for column in load)
    pattern = "%H:%M" if span_s >= _SPAN_MAX_S else "%H:%M:%S"
    axis = [
        words.moment(taken_at - span_s * (1 - place), pattern) for place in (0, 0.25, 0.5, 0.75, 1)
    ]
    rows = [
        html.row(
            f"last {words.duration(window.seconds)}",
            html.numbers(
                words.percent(window.hit_tokens, window.prompt_tokens),
                words.count(window.prompt_tokens),
                "~" + words.count(window.requests),
            ),
        )
        for window in order.windows(history, taken_at, _WINDOWS_S)
    ]
    return html.section(
        title,
        f"Share of prompt tokens reused in each {BUCKET_S} seconds, and under it how many prompt "
        "tokens there were. Times are UTC.",
        '<div class="plot time rate">'
        + plots.rate_over_time("Share of prompt tokens reused over time", rate, span_s)
        + '<div class="y" aria-hidden="true"><span class="top" style="top:0">100 %</span>'
        '<span style="top:50%">50 %</span><span class="low" style="top:100%">0 %</span></div>'
        "</div>"
        '<div class="time load">'
        + plots.amount_over_time("Prompt tokens over time", load, span_s)
        + f'<div class="y" aria-hidden="true"><span class="top" style="top:0">'
        f"{words.count(round(peak / BUCKET_S))} tok/s</span>"
        f'<span class="low" style="top:100%">0</span></div>{plots.ticks(axis)}</div>',
        html.legend(_tiers_of(points)),
        html.table("Hit rate by window", [":", "n:Hit rate", "n:Tokens", "n wide:Requests"], rows),
    )


def _tiers_of(points: Sequence[History]) -> list[plots.Part]:
    """The tiers that had hits in these buckets, with their shares, as the plot's legend."""
    whole = sum(point["prompt_tokens"] for point in points)
    hits: dict[str, int] = {}
    for point in points:
        for tier, tokens in point["hit_tokens"].items():
            hits[tier] = hits.get(tier, 0) + tokens
    return [
        plots.Part(
            words.label(tier), hits[tier], words.percent(hits[tier], whole), page_style.fill(tier)
        )
        for tier in order.tiers(hits)
    ]


def _columns(
    points: Sequence[History], left: float
) -> tuple[list[plots.Column], list[plots.Column]]:
    """The hit rate's columns and the load's, for a plot that begins at wall time `left`."""
    rate, load = [], []
    for point in points:
        prompt, hits = point["prompt_tokens"], point["hit_tokens"]
        said = (
            f"{words.moment(point['t'], '%H:%M:%S')}: "
            f"{words.percent(sum(hits.values()), prompt)} of {words.count(prompt)} tokens, "
            f"{words.count(point['requests'])} requests"
        )
        tiers = [(page_style.fill(tier), hits[tier]) for tier in order.tiers(hits)]
        start = point["t"] - left
        rate.append(plots.Column(start, BUCKET_S, prompt, tiers, said))
        load.append(plots.Column(start, BUCKET_S, prompt, [("grey1", prompt)], said))
    return rate, load


def misses(totals: Group) -> str:
    """Each reason for computing, its bar and its meaning."""
    reasons = order.largest_first(totals["misses"])
    if not reasons:
        return ""
    whole, largest = totals["prompt"]["tokens"], max(c["tokens"] for _, c in reasons)
    rows = [
        html.row(
            html.explained(reason, words.explain(words.MISSES, reason), part.color),
            f'<td class="barcell">{plots.mini_stack(part.name, [part], largest)}</td>',
            html.numbers(
                part.share,
                words.count(count["tokens"]),
                "~" + words.count(count["blocks"]),
                "~" + words.size(count["bytes"]),
            ),
        )
        for (reason, count), part in zip(reasons, _parts(reasons, whole), strict=True)
    ]
    return html.section(
        "Why tokens were computed",
        "Every prompt token that was not reused has one reason; with the tiers above, "
        "the shares add up to all prompt tokens. "
        "Amber is for lack of room, violet for a decision, red for something broken.",
        html.table(
            "Misses by reason",
            [":Reason", "barcell:", "n:Share", "n:Tokens", "n wide:Blocks", "n wide:Bytes"],
            rows,
        ),
    )


def stores(totals: Group) -> str:
    """Blocks offered for storing, stacked: stored, already there, and skipped by reason."""
    title, skipped = "What was stored, and what was not", order.largest_first(totals["skipped"])
    named = [
        ("stored", totals["stored"], words.STORED, page_style.STORED),
        (
            "already present",
            totals["already_present"],
            words.ALREADY_PRESENT,
            page_style.ALREADY_PRESENT,
        ),
        *(
            (reason, count, words.explain(words.SKIPS, reason), page_style.fill(reason))
            for reason, count in skipped
        ),
    ]
    whole = sum(count["blocks"] for _, count, _, _ in named)
    if not whole:
        return html.section(title, "No block has been offered since the server started.")
    parts = [
        plots.Part(words.label(name), count["blocks"], words.percent(count["blocks"], whole), color)
        for name, count, _, color in named
    ]
    rows = [
        html.row(
            html.explained(name, why, color),
            html.numbers(
                words.percent(count["blocks"], whole),
                words.count(count["blocks"]),
                "~" + words.count(count["tokens"]),
                "~" + words.size(count["bytes"]),
            ),
        )
        for name, count, why, color in named
    ]
    return html.section(
        title,
        "Blocks that requests computed and offered for storing.",
        plots.stack("Blocks offered for storing, by what became of them", parts),
        html.legend(parts),
        html.table(
            "Stores and skips by reason",
            [":Outcome", "n:Share", "n:Blocks", "n wide:Tokens", "n wide:Bytes"],
            rows,
        ),
    )


def groups(title: str, column: str, by_name: Mapping[str, Group]) -> str:
    """Models or tenants, the busiest first, each with its hit rate by tier as a bar."""
    if not by_name:
        return ""
    shown, left = order.busiest(by_name, ROWS_MAX)
    rows = []
    for name, group in shown:
        prompt, hit = group["prompt"]["tokens"], order.total(group["hits"].values())
        rate = words.percent(hit["tokens"], prompt)
        bar = plots.mini_stack(
            f"{rate} reused", _parts(order.nearest_first(group["hits"]), prompt), prompt
        )
        rows.append(
            html.row(
                html.text(name),
                f'<td class="barcell">{bar}</td>',
                html.numbers(
                    rate,
                    words.count(prompt),
                    "~" + words.count(group["requests"]),
                    "~" + words.duration(group["prefill_saved_s"]),
                    "~" + words.size(group["stored"]["bytes"]),
                ),
            )
        )
    return html.section(
        title,
        f"And {left:,} more, in the JSON of this page." if left else "",
        html.table(
            title,
            [
                f":{column}",
                "barcell:",
                "n:Hit rate",
                "n:Tokens",
                "n wide:Requests",
                "n wide:Prefill saved",
                "n wide:Stored",
            ],
            rows,
        ),
    )
