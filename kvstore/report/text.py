"""The report for a terminal: the hit rate first, then why it is what it is.

A pure function of the snapshot. Names come from clients, so every one passes `words.plain`
before it is printed, and none is read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.report import order, words
from kvstore.report.snapshot import Control, Count, Group, Server, Snapshot, Tier

GROUPS_MAX = 10
"""Models, and tenants, that are listed; the JSON has them all."""

WIDTH_MIN = 60
"""Narrower than this, the columns of numbers would not fit; lines run over instead."""

_WINDOWS_S = (60, 600, 3600)


def render(snapshot: Snapshot, width: int, *, color: bool = False) -> str:
    """The report as lines of at most `width` columns (but 60 at least), ending in a newline.

    Plain characters only, unless `color` asks for bold and dim by escape sequences.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, WIDTH_MIN),
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    totals = snapshot["totals"]
    _head(console, snapshot["server"], snapshot["taken_at"])
    _summary(console, snapshot)
    if totals["prompt"]["tokens"]:
        _title(console, "Prompt tokens: reused by tier, computed by reason")
        console.print(_prompt_table(totals))
    if _offered(totals)["blocks"]:
        _title(console, "Blocks offered for storing")
        console.print(_store_table(totals))
    _title(console, "Tiers")
    console.print(_tier_table(snapshot["tiers"]))
    for title, groups in (("Models", snapshot["by_model"]), ("Tenants", snapshot["by_tenant"])):
        if groups:
            _title(console, title)
            console.print(_group_table(groups))
            _, left = order.busiest(groups, GROUPS_MAX)
            if left:
                console.print(Text(f"and {left:,} more, in the JSON", style="dim"))
    _title(console, "Server")
    _control(console, snapshot["control"], len(snapshot["namespaces"]))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _table(*columns: str, last_is_prose: bool = False) -> Table:
    """A borderless table: names to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        prose = last_is_prose and position == len(columns) - 1
        if position == 0:
            table.add_column(column, overflow="fold", min_width=10)
        elif prose:
            table.add_column(column, style="dim", overflow="fold", ratio=1)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(name: str) -> Text:
    return Text(words.plain(name) or '""')


def _head(console: Console, server: Server, taken_at: float) -> None:
    clients = f"{server['clients']:,} client{'' if server['clients'] == 1 else 's'}"
    parts = [
        f"kvstore {words.plain(server['version'])}",
        f"up {words.duration(round(server['uptime_s']))}",
        clients,
        words.moment(taken_at),
    ]
    console.print(Text(" · ".join(parts)))
    if server["targets"]:
        targets = ", ".join(words.plain(target) for target in server["targets"])
        console.print(Text(f"listening on {targets}", style="dim"))


def _summary(console: Console, snapshot: Snapshot) -> None:
    totals = snapshot["totals"]
    prompt, hit = totals["prompt"], order.total(totals["hits"].values())
    console.print()
    if not prompt["tokens"]:
        console.print(Text("No prompt has been reported yet, so there is no hit rate."))
        return
    rate = words.percent(hit["tokens"], prompt["tokens"])
    console.print(
        Text.assemble(
            "Hit rate       ",
            (rate, "bold"),
            f" of prompt tokens: {words.count(hit['tokens'])} of {words.count(prompt['tokens'])}, "
            f"in {words.count(totals['requests'])} requests",
        )
    )
    console.print(Text(f"  lately       {_recent(snapshot)}"))
    console.print(
        Text.assemble(
            "Prefill saved  ",
            (words.duration(totals["prefill_saved_s"]), "bold"),
            f" estimated, net of {words.duration(totals['load_s'])} loading; "
            f"{words.duration(totals['prefill_s'])} spent",
        )
    )
    if totals["prefill_saved_s"] < 0:
        console.print(Text("Loading took longer than computing would have.", style="bold"))


def _recent(snapshot: Snapshot) -> str:
    recent = order.windows(snapshot["history"], snapshot["taken_at"], _WINDOWS_S)
    return ", ".join(
        f"{words.percent(w.hit_tokens, w.prompt_tokens)} in {words.duration(w.seconds)}"
        for w in recent
    )


def _count_cells(count: Count, unit: str, whole: int) -> list[str]:
    part = count["tokens"] if unit == "tokens" else count["blocks"]
    other = count["blocks"] if unit == "tokens" else count["tokens"]
    return [
        words.count(part),
        words.percent(part, whole),
        words.count(other),
        words.size(count["bytes"]),
    ]


def _prompt_table(totals: Group) -> Table:
    table = _table("", "tokens", "share", "blocks", "bytes", "", last_is_prose=True)
    whole = totals["prompt"]["tokens"]

    def add(name: str, count: Count, meaning: str) -> None:
        table.add_row(_name(name), *_count_cells(count, "tokens", whole), meaning)

    for tier, count in order.nearest_first(totals["hits"]):
        add(f"+ {words.label(tier)}", count, words.explain(words.TIERS, tier))
    for reason, count in order.largest_first(totals["misses"]):
        add(f"- {words.label(reason)}", count, words.explain(words.MISSES, reason))
    return table


def _offered(totals: Group) -> Count:
    return order.total([totals["stored"], totals["already_present"], *totals["skipped"].values()])


def _store_table(totals: Group) -> Table:
    table = _table("", "blocks", "share", "tokens", "bytes", "", last_is_prose=True)
    whole = _offered(totals)["blocks"]

    def add(name: str, count: Count, meaning: str) -> None:
        table.add_row(_name(name), *_count_cells(count, "blocks", whole), meaning)

    add("+ stored", totals["stored"], words.STORED)
    if totals["already_present"]["blocks"]:
        add("= already present", totals["already_present"], words.ALREADY_PRESENT)
    for reason, count in order.largest_first(totals["skipped"]):
        add(f"- {words.label(reason)}", count, words.explain(words.SKIPS, reason))
    return table


def _tier_table(tiers: Sequence[Tier]) -> Table:
    table = _table("", "state", "used", "of", "full", "blocks", "counters", last_is_prose=True)
    for tier in tiers:
        if tier["state"] == "absent":
            table.add_row(_name(tier["name"]), "absent", *[words.NOTHING] * 4, "")
            continue
        capacity = tier["capacity_bytes"]
        table.add_row(
            _name(tier["name"]),
            # In capitals, because it is the one cell that must not be overlooked.
            "DOWN" if tier["state"] == "down" else tier["state"],
            words.size(tier["used_bytes"]),
            words.size(capacity) if capacity else words.NOTHING,
            words.percent(tier["used_bytes"], capacity),
            order.blocks_of(tier),
            _pairs(tier["counters"]),
        )
    return table


def _group_table(groups: Mapping[str, Group]) -> Table:
    table = _table("", "hit rate", "prompt tokens", "requests", "saved", "stored")
    for name, group in order.busiest(groups, GROUPS_MAX)[0]:
        hit = order.total(group["hits"].values())
        table.add_row(
            _name(name),
            words.percent(hit["tokens"], group["prompt"]["tokens"]),
            words.count(group["prompt"]["tokens"]),
            words.count(group["requests"]),
            words.duration(group["prefill_saved_s"]),
            words.size(group["stored"]["bytes"]),
        )
    return table


def _pairs(counters: Mapping[str, int]) -> str:
    shown = [f"{words.label(name)} {words.count(n)}" for name, n in counters.items() if n]
    return ", ".join(shown)


def _control(console: Console, control: Control, namespaces: int) -> None:
    console.print(
        Text(
            f"namespaces {namespaces:,}, leases {control['leases']:,}, "
            f"slots reserved {control['reserved_slots']:,}, "
            f"in quarantine {control['quarantined_slots']:,}, "
            f"blocks waiting for a lower tier {control['write_through_queue']:,}"
        )
    )
    if any(control["rpc"].values()):
        console.print(Text(f"calls: {_pairs(control['rpc'])}", style="dim"))
