"""The page's plots: inline SVG that stretches to its box, with labels in HTML beside it.

A drawing is stretched (`preserveAspectRatio="none"`) so that it fills a phone and a desk screen
alike; text would be stretched with it, so text is never in the SVG, except for the titles that
browsers show on hover and screen readers speak. Knows nothing of the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1000
"""Drawings are this many units wide, whatever they measure on the screen."""

_SLIVER = 3.0
"""Width of the smallest part: what is not zero must be seen."""

_GAP = 2.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar."""

    name: str
    amount: int
    share: str
    """The share in words."""
    color: str
    """A class of `page_style`."""


def _svg(height: int, title: str, body: str, name: str = "") -> str:
    named = f' class="{name}"' if name else ""
    return (
        f'<svg{named} viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _rect(color: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{color}" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"/>'
    )


def widths(amounts: Sequence[int]) -> list[float]:
    """Widths that fill the drawing in proportion, but for slivers, which the others pay for."""
    whole = sum(amounts)
    raw = [WIDTH * amount / whole if whole else 0.0 for amount in amounts]
    small = [0 < width < _SLIVER for width in raw]
    room = WIDTH - _SLIVER * sum(small)
    large = sum(width for width, is_small in zip(raw, small, strict=True) if not is_small)
    scale = room / large if large else 1.0
    return [
        _SLIVER if is_small else width * scale for width, is_small in zip(raw, small, strict=True)
    ]


def stack(title: str, parts: Sequence[Part], *, labels: bool = True) -> str:
    """A stacked bar of the whole, its larger parts labelled on the bar itself."""
    x, marks, texts = 0.0, [], []
    for part, width in zip(parts, widths([part.amount for part in parts]), strict=True):
        if not width:
            continue
        gap = _GAP if width > 3 * _GAP else 0
        marks.append(
            f"<g><title>{escape(part.name)}: {escape(part.share)}</title>"
            f"{_rect(part.color, x, 0, width - gap, 40)}</g>"
        )
        if labels and width >= 0.17 * WIDTH:
            texts.append(
                f'<span class="on {part.color}" aria-hidden="true" '
                f'style="left:{x / 10:.2f}%;width:{width / 10:.2f}%">'
                f"<i>{escape(part.name)}</i>{escape(part.share)}</span>"
            )
        x += width
    return f'<div class="plot stack">{_svg(40, title, "".join(marks))}{"".join(texts)}</div>'


def mini_stack(title: str, parts: Sequence[Part], whole: int) -> str:
    """A bar for a table's cell: the parts of `whole`, and the rest as an empty track."""
    x, marks = 0.0, []
    for part in parts:
        width = min(WIDTH - x, max(_SLIVER, WIDTH * part.amount / whole)) if part.amount else 0.0
        marks.append(_rect(part.color, x, 0, width, 8))
        x += width
    return _svg(8, title, "".join(marks), "bar")


@dataclass(frozen=True, slots=True)
class Column:
    """What happened between two moments of a time plot."""

    start: float
    """Seconds from the plot's left edge."""
    seconds: float
    amount: int
    """The whole of it."""
    parts: Sequence[tuple[str, int]]
    """Colours and their amounts, the lowest first."""
    words: str


def rate_over_time(title: str, columns: Sequence[Column], span_s: float) -> str:
    """Each column's parts as shares of its amount, from 0 at the bottom to 100 % at the top."""
    grid = "".join(f'<path class="grid" d="M0 {y}H{WIDTH}"/>' for y in (0, 50, 100, 150))
    return _svg(200, title, grid + _columns(columns, span_s, 200, None))


def amount_over_time(title: str, columns: Sequence[Column], span_s: float) -> str:
    """Each column's amount, the largest filling the height."""
    largest = max((column.amount for column in columns), default=0)
    return _svg(40, title, _columns(columns, span_s, 40, largest))


def _columns(columns: Sequence[Column], span_s: float, height: int, largest: int | None) -> str:
    drawn = []
    unit = WIDTH / span_s
    for column in columns:
        if not column.amount:
            continue
        x = max(0.0, column.start * unit)
        width = min(WIDTH, (column.start + column.seconds) * unit) - x
        marks, y = [], float(height)
        for color, amount in column.parts:
            part = height * amount / (largest or column.amount)
            y -= part
            marks.append(_rect(color, x, y, width, part))
        marks.append(_rect("hover", x, 0, width, height))
        drawn.append(f"<g><title>{escape(column.words)}</title>{''.join(marks)}</g>")
    return "".join(drawn)


def ticks(labels: Sequence[str]) -> str:
    """Labels spread evenly under a drawing, the first and last flush with its edges."""
    return (
        '<div class="x" aria-hidden="true">'
        + "".join(f"<span>{escape(label)}</span>" for label in labels)
        + "</div>"
    )
