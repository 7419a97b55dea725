"""A page of line plots, as one HTML file that needs nothing else.

Both axes are logarithmic, so that what grows in proportion is a line at 45 degrees and what does
not grow is a level one, whatever the units. Knows nothing of what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 40
COLORS = ("#2563a8", "#c2571a", "#3c8440", "#7b4fa3")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
       color: #1c1c1c; background: #fff }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 2em }
figure { margin: 0 } svg { width: 100% } h2 { font-size: 1.1em; margin: 0 }
text { font-size: 11px; fill: currentColor } .grid { stroke: currentColor; opacity: .15 }
.line { fill: none; stroke-width: 2 } figcaption { font-size: .9em }
i { display: inline-block; width: 1em; height: .6em; margin: 0 .3em 0 .8em }
@media (prefers-color-scheme: dark) { body { color: #e4e4e4; background: #161616 } }
"""


@dataclass(frozen=True)
class Plot:
    """Lines over one axis. All numbers are above zero."""

    name: str
    title: str
    x: str
    y: str
    xs: Sequence[float]
    series: Mapping[str, Sequence[float]]
    """One number for each of `xs`, by the line's name."""

    def document(self) -> dict[str, Any]:
        """What JSON says of it."""
        return asdict(self)


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis, from a value at one place to a value at another."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value is."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, and 2 and 5 times them where there are few."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if math.log10(self.high / self.low) < 2.5 else (1,)
        marks = [step * 10.0**decade for decade in decades for step in steps]
        return [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]


def page(document: Mapping[str, Any], plots: Sequence[Plot]) -> str:
    """The page: what it was measured on, and the plots."""
    machine = document["machine"]
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}, commit {document['commit']}, "
        f"{document['date']}"
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>How cost grows</title><style>{_STYLE}</style><h1>How cost grows</h1>"
        f"<p>{escape(where)}. Both axes are logarithmic: a level line does not grow.</p>"
        f"<main>{''.join(map(_figure, plots))}</main></html>\n"
    )


def _figure(plot: Plot) -> str:
    values = [value for line in plot.series.values() for value in line]
    across = _Axis(plot.xs[0], plot.xs[-1], LEFT, WIDTH - RIGHT)
    up = _Axis(min(values) / 1.5, max(values) * 1.5, HEIGHT - BOTTOM, TOP)
    marks = [_grid(plot, across, up)]
    keys = []
    for color, (name, line) in zip(COLORS, plot.series.items(), strict=False):
        points = [(across.at(x), up.at(y)) for x, y in zip(plot.xs, line, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline class="line" stroke="{color}" points="{path}"/>')
        for (x, y), size, value in zip(points, plot.xs, line, strict=True):
            marks.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
                f"<title>{escape(name)}, {_text(size)}: {value:.3g} {escape(plot.y)}</title>"
                "</circle>"
            )
        keys.append(f'<i style="background:{color}"></i>{escape(name)}')
    return (
        f'<figure><h2>{escape(plot.title)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(plot.y)} by {escape(plot.x)}</title>{''.join(marks)}</svg>"
        f"<figcaption>{''.join(keys)}</figcaption></figure>"
    )


def _grid(plot: Plot, across: _Axis, up: _Axis) -> str:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(tick)}</text>'
        )
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{_text(tick)}</text>"
        )
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(plot.x)}</text>"
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y)}</text>"
    )
    return "".join(parts)


def _text(value: float) -> str:
    """`0.2`, `50`, `20k`, `1M`."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
