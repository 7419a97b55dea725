"""The few shapes of HTML that the page is made of: text, sections, tables, legends.

What goes in as a name comes out escaped; what goes in as content or a heading is HTML already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from kvstore.report import words
from kvstore.report.plots import Part


def text(name: str) -> str:
    """A name from outside, safe within an element or a quoted attribute."""
    return escape(words.plain(name)) or "&quot;&quot;"


def label(name: str) -> str:
    """An identifier as words, escaped."""
    return escape(words.label(name))


def swatch(color: str) -> str:
    """A small square of a colour of `page_style`."""
    return f'<span class="swatch {color}"></span>'


def section(title: str, lead: str, *content: str) -> str:
    """A card with a heading, a sentence and what follows."""
    paragraph = f"<p>{lead}</p>" if lead else ""
    return f"<section><h2>{title}</h2>{paragraph}\n" + "\n".join(content) + "</section>"


def table(caption: str, columns: Sequence[str], rows: Iterable[str]) -> str:
    """A table in a box of its own that scrolls sideways, so that the page never does.

    Columns are "class:heading".
    """
    heads = []
    for column in columns:
        name, _, heading = column.partition(":")
        heads.append(f'<th scope="col" class="{name}">{heading}</th>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"
        + "\n".join(rows)
        + "</tbody></table></div>"
    )


def row(head: str, *cells: str) -> str:
    """A table's row."""
    return f'<tr><th scope="row" class="name">{head}</th>{"".join(cells)}</tr>'


def numbers(*shown: str) -> str:
    """Cells of numbers; one that begins with "~" is left out on a narrow screen."""
    return "".join(
        f'<td class="n wide">{escape(one[1:])}</td>'
        if one.startswith("~")
        else f'<td class="n">{escape(one)}</td>'
        for one in shown
    )


def explained(name: str, why: str, color: str = "") -> str:
    """A row's head: the name, with its colour, and a sentence under it."""
    mark = swatch(color) if color else ""
    return f'{mark}{label(name)}<span class="why">{escape(why)}</span>'


def legend(parts: Iterable[Part]) -> str:
    """The parts of a plot that are there, with their colours and shares."""
    items = "".join(
        f"<li>{swatch(part.color)}{escape(part.name)} <b>{escape(part.share)}</b></li>"
        for part in parts
        if part.amount
    )
    return f'<ul class="legend">{items}</ul>'
