"""The page's sections on what is there now: tiers, namespaces and the control plane.

Pure functions of parts of the snapshot, each giving one `<section>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kvstore.report import order, page_style, plots, words
from kvstore.report import page_html as html
from kvstore.report.snapshot import Control, Namespace, Tier

ROWS_MAX = 50
"""Namespaces that are listed; the embedded JSON has them all."""

_STATES = {
    "up": '<span class="badge soft">up</span>',
    "down": '<span class="badge alarm">down</span>',
    "absent": '<span class="badge soft">not configured</span>',
}


def tiers(listed: Sequence[Tier]) -> str:
    """Each tier's state, and how full it is."""
    if not listed:
        return ""
    return html.section(
        "Capacity",
        "How full each tier is now, nearest first.",
        html.table(
            "Capacity used by tier",
            [":Tier", "barcell:", "n:Full", "n:Used", "n wide:Of", "n wide:Blocks"],
            [_tier(tier) for tier in listed],
        ),
    )


def _tier(tier: Tier) -> str:
    color = page_style.fill(tier["name"])
    state = _STATES.get(tier["state"], html.text(tier["state"]))
    head = f"{html.swatch(color)}{html.label(tier['name'])}{state}"
    if tier["state"] == "absent":
        dash = words.NOTHING
        cells = html.numbers(dash, dash, "~" + dash, "~" + dash)
        return html.row(head, '<td class="barcell"></td>', cells)
    used, capacity = tier["used_bytes"], tier["capacity_bytes"]
    full = words.percent(used, capacity)
    # A bar can't show how full a tier without a limit is, nor more than full.
    part = plots.Part(tier["name"], min(used, capacity), full, color)
    bar = plots.mini_stack(f"{full} full", [part], capacity) if capacity else ""
    counters = pairs(tier["counters"])
    return html.row(
        head + (f'<span class="why">{escape(counters)}</span>' if counters else ""),
        f'<td class="barcell">{bar}</td>',
        html.numbers(
            full,
            words.size(used),
            "~" + (words.size(capacity) if capacity else "no limit known"),
            "~" + order.blocks_of(tier),
        ),
    )


def pairs(counters: Mapping[str, int]) -> str:
    """Counters that aren't 0, in a line."""
    return ", ".join(f"{words.label(name)} {words.count(n)}" for name, n in counters.items() if n)


def namespaces(listed: Sequence[Namespace]) -> str:
    """Each namespace and what it holds, the largest first."""
    if not listed:
        return ""
    ranked = sorted(listed, key=lambda one: (-one["bytes"], one["fingerprint"]))
    rows = [
        html.row(
            f'{html.text(one["model"])}<span class="why">tenant {html.text(one["tenant"])}, '
            f"<code>{html.text(one['fingerprint'][:12])}</code></span>",
            html.numbers(
                words.count(one["blocks"]),
                words.size(one["bytes"]),
                f"~{words.count(one['block_tokens'])} tokens, {words.size(one['block_bytes'])}",
            ),
        )
        for one in ranked[:ROWS_MAX]
    ]
    left = len(ranked) - len(rows)
    return html.section(
        "Namespaces",
        "What the arena holds, by namespace: blocks of one never serve another."
        + (f" And {left:,} more, in the JSON of this page." if left else ""),
        html.table(
            "Namespaces",
            [":Model", "n:Blocks", "n:Bytes", "n wide:One block"],
            rows,
        ),
    )


def control(now: Control) -> str:
    """Leases, slots, queue and calls."""
    facts = [
        ("Leases held", now["leases"], "Pinned runs of blocks, being read or written."),
        ("Slots reserved", now["reserved_slots"], "For stores that aren't committed yet."),
        (
            "Slots in quarantine",
            now["quarantined_slots"],
            "Kept out of use, because a client may still write to them.",
        ),
        (
            "Write-through queue",
            now["write_through_queue"],
            "Blocks waiting to be copied to a lower tier.",
        ),
    ]
    rows = [
        html.row(f'{name}<span class="why">{why}</span>', html.numbers(words.count(n)))
        for name, n, why in facts
    ]
    rows += [
        html.row(f"<code>{html.text(method)}</code> calls", html.numbers(words.count(n)))
        for method, n in sorted(now["rpc"].items(), key=lambda call: (-call[1], call[0]))
        if n
    ]
    return html.section("Control plane", "", html.table("Control plane", [":", "n:Now"], rows))
