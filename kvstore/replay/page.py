"""The results as one HTML file that opens offline: curves of hit rate against capacity, tables.

A pure function of the documents, which are embedded as JSON in `<script id="replay">`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from kvstore.replay.sweep import DEFAULT_NAME, OPTIMAL_NAME, Document, Result, Swept, Weight
from kvstore.report import page_html as html
from kvstore.report import page_style, words

_WIDTH, _HEIGHT = 1000, 320
_COLORS = ("blue2", "amber1", "violet1", "red2", "blue1", "amber4", "red6", "violet2", "blue3")
_STYLE = """\
.curves svg{height:320px;overflow:visible}
.curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}
.bound{stroke-dasharray:5 4;stroke:var(--soft)}
.infinite{stroke-dasharray:1 4;stroke:var(--soft)}
.curves .ends{display:flex;justify-content:space-between;font-size:12px;color:var(--soft)}
table{display:table}thead{display:table-header-group}tbody{display:table-row-group}
tr{display:table-row}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(traces: Sequence[Swept], weight: Weight) -> str:
    """The page, complete, as text to be written in UTF-8."""
    data = (
        json.dumps([swept.document for swept in traces], allow_nan=False)
        .replace("<", "\\u003c")
        .replace("&", "\\u0026")
    )
    body = "\n".join(_trace(swept, weight) for swept in traces)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>kvstore replay</title>\n<style>\n{page_style.sheet()}{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<header><h1>kvstore replay</h1></header>\n{body}\n</main>\n"
        f'<script type="application/json" id="replay">{data}</script>\n</body>\n</html>\n'
    )


def _trace(swept: Swept, weight: Weight) -> str:
    document = swept.document
    lead = (
        f"{document['requests']:,} requests, {words.count(document['blocks'])} blocks asked for, "
        f"{words.count(document['unique_blocks'])} different ones. Hit rate of {weight} against "
        "capacity in blocks, on a logarithmic scale. Dashed: the optimal policy, which knows the "
        "future. Dotted: a store without limits."
    )
    return html.section(
        html.text(document["trace"]),
        lead,
        _curves(document, weight),
        _table(swept),
        f'<p class="soft small">{escape(swept.cost_model)}</p>',
    )


def _name(result: Result) -> str:
    if result["policy"] == OPTIMAL_NAME:
        return OPTIMAL_NAME
    return f"{result['policy']}, {result['admission']}"


def _lines(document: Document) -> dict[str, list[Result]]:
    """The results by line of the plot, but for the default's second name."""
    rules = {each["admission"] for each in document["results"]} - {OPTIMAL_NAME}
    lines: dict[str, list[Result]] = {}
    for each in document["results"]:
        if each["policy"] == DEFAULT_NAME:
            continue
        name = _name(each) if len(rules) > 1 else each["policy"]
        lines.setdefault(name, []).append(each)
    return lines


def _curves(document: Document, weight: Weight) -> str:
    rate = "token_hit_rate" if weight == "tokens" else "block_hit_rate"
    capacities = [each["capacity_blocks"] for each in document["results"]]
    low, high = min(capacities), max(capacities)
    infinite = float(document["infinite"][rate])  # type: ignore[literal-required]
    top = math.ceil(max(infinite, 1e-9) * 20) / 20

    def at(capacity: int, share: float) -> str:
        span = math.log(high / low) or 1.0
        return f"{_WIDTH * math.log(capacity / low) / span:.1f},{_HEIGHT * (1 - share / top):.1f}"

    drawn, legend = [], []
    colors = iter(_COLORS * 8)
    for name, results in _lines(document).items():
        points = [at(each["capacity_blocks"], each[rate]) for each in results]  # type: ignore[literal-required]
        path = f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}h{_WIDTH}"
        if name == OPTIMAL_NAME:
            kind = 'class="curve bound"'
        else:
            color = next(colors)
            kind = f'class="curve" style="stroke:var(--{color})"'
            legend.append(f"<li>{html.swatch(color)}{escape(name)}</li>")
        drawn.append(f'<path {kind} d="{path}"><title>{escape(name)}</title></path>')
    level = at(low, infinite)
    drawn.append(
        f'<path class="curve infinite" d="M{level}h{_WIDTH}"><title>infinite</title></path>'
    )
    grid = "".join(f'<path class="grid" d="M0 {y}H{_WIDTH}"/>' for y in range(0, _HEIGHT + 1, 80))
    return (
        f'<div class="plot curves"><div class="ends"><span>{top:.0%}</span></div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>Hit rate of {weight} against capacity</title>{grid}{''.join(drawn)}</svg>"
        f'<div class="ends"><span>0 % · {low:,} blocks</span><span>{high:,} blocks</span></div>'
        f'</div><ul class="legend">{"".join(legend)}</ul>'
    )


def _table(swept: Swept) -> str:
    document = swept.document
    rows = [
        html.row(
            escape(_name(each)),
            html.numbers(
                f"{each['capacity_blocks']:,}",
                f"{each['block_hit_rate']:.4f}",
                f"{each['token_hit_rate']:.4f}",
                f"{each['share_of_optimal']:.1%}",
                f"{each['blocks_written']:,}",
                words.size(each["blocks_written"] * swept.block_bytes),
                words.duration(saved_s),
            ),
        )
        for each, saved_s in zip(document["results"], swept.saved_s, strict=True)
    ]
    infinite = document["infinite"]
    rates = f"{infinite['block_hit_rate']:.4f}", f"{infinite['token_hit_rate']:.4f}"
    rows.append(
        html.row(
            "infinite", html.numbers("", *rates, "", "", "", words.duration(swept.infinite_saved_s))
        )
    )
    columns = (
        "name:Policy, admission",
        "n:Capacity, blocks",
        "n:Hit blocks",
        "n:Hit tokens",
        "n:Of optimal",
        "n:Blocks written",
        "n:Bytes",
        "n:Prefill saved",
    )
    return html.table("Results", columns, rows)
