"""The report as one HTML file that opens offline: no request leaves it and no script runs in it.

A pure function of the snapshot, which is embedded as JSON in `<script id="snapshot">`. Every
name that came from a client is escaped, and a content policy in the page's head forbids scripts
and requests all the same, so that a name that got through could do nothing.

This file is the frame; the sections are in `page_sections` and `page_state`, the plots in
`plots`, the looks in `page_style`.
"""

from __future__ import annotations

import json
from html import escape

from kvstore.report import order, page_sections, page_state, page_style, words
from kvstore.report import page_html as html
from kvstore.report.snapshot import Group, Snapshot

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(snapshot: Snapshot) -> str:
    """The page, complete, as text to be written in UTF-8."""
    totals, taken_at = snapshot["totals"], words.moment(snapshot["taken_at"])
    body = "\n".join(
        [
            _header(snapshot),
            _key_numbers(totals),
            page_sections.prompts(totals),
            page_sections.over_time(snapshot["history"], snapshot["taken_at"]),
            page_sections.misses(totals),
            page_sections.stores(totals),
            page_state.tiers(snapshot["tiers"]),
            page_sections.groups("By model", "Model", snapshot["by_model"]),
            page_sections.groups("By tenant", "Tenant", snapshot["by_tenant"]),
            page_state.namespaces(snapshot["namespaces"]),
            page_state.control(snapshot["control"]),
            _footer(snapshot),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>kvstore report, {taken_at}</title>\n"
        f"<style>\n{page_style.sheet()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="snapshot">{embedded(snapshot)}</script>\n'
        "</body>\n</html>\n"
    )


def embedded(snapshot: Snapshot) -> str:
    """The snapshot as JSON that can't end the script element it is put into.

    Reads back equal. Raises ValueError for a number that JSON doesn't have.
    """
    # In JSON these characters occur within strings only, where the escape means the same.
    document = json.dumps(snapshot, allow_nan=False, separators=(",", ":"))
    return document.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _header(snapshot: Snapshot) -> str:
    server = snapshot["server"]
    clients = f"{server['clients']:,} client{'' if server['clients'] == 1 else 's'}"
    targets = ", ".join(f"<code>{html.text(target)}</code>" for target in server["targets"])
    listening = f", listening on {targets}" if targets else ""
    return (
        f'<header><h1>kvstore report</h1><p class="soft small">'
        f"{words.moment(snapshot['taken_at'])}</p>"
        f'<p class="soft small all">Version {html.text(server["version"])}, '
        f"up {words.duration(round(server['uptime_s']))}, {clients}{listening}</p></header>"
    )


def _fact(name: str, number: str, note: str, kind: str = "") -> str:
    return (
        f'<div class="{kind}"><dt>{name}</dt><dd class="number">{escape(number)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
    )


def _key_numbers(totals: Group) -> str:
    hit, prompt = order.total(totals["hits"].values())["tokens"], totals["prompt"]["tokens"]
    reused = f"{words.count(hit)} of {words.count(prompt)} tokens"
    saved = "estimate, loading deducted"
    if totals["prefill_saved_s"] < 0:
        saved = "loading took longer than computing would have"
    facts = [
        _fact(
            "Prompt tokens reused",
            words.percent(hit, prompt),
            reused if prompt else "no prompt reported yet",
            "first",
        ),
        _fact("Prefill saved", words.duration(totals["prefill_saved_s"]), saved),
        _fact(
            "Prefill spent",
            words.duration(totals["prefill_s"]),
            f"of {words.duration(totals['total_s'])} in requests",
        ),
        _fact(
            "Requests",
            words.count(totals["requests"]),
            f"{words.count(totals['output_tokens'])} tokens generated",
        ),
    ]
    return f'<section><dl class="key">{"".join(facts)}</dl></section>'


def _footer(snapshot: Snapshot) -> str:
    server = snapshot["server"]
    return (
        "<footer><p>Sums are since the server started, "
        f"{words.moment(server['started_at'])} (epoch <code>{html.text(server['epoch'])}</code>); "
        "they begin again at 0 when it restarts. The JSON that this page was made of is in it, "
        "in the element <code>#snapshot</code>.</p></footer>"
    )
