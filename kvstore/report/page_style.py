"""How the page looks: its colours, for light and dark, and its style sheet.

The colours have meanings. Reused tokens are blue, the nearest tier the strongest. Computed
tokens are grey where nothing could be done, amber where room was lacking, violet where kvstore
decided so, and red where something is broken. Within a meaning, shades differ in lightness, which
colour-blind readers see; no plot says anything by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.types import MissReason, SkipReason, TierName


@dataclass(frozen=True, slots=True)
class Color:
    """A fill and the ink that can be read on it, in light and in dark."""

    light: str
    light_ink: str
    dark: str
    dark_ink: str


_WHITE, _BLACK = "#ffffff", "#14181d"

COLORS: Mapping[str, Color] = {
    "blue1": Color("#174ea6", _WHITE, "#93c0ff", _BLACK),
    "blue2": Color("#4a90e2", _BLACK, "#4f8df7", _BLACK),
    "blue3": Color("#a5cdf5", _BLACK, "#2d5cab", _WHITE),
    "grey1": Color("#8b949e", _BLACK, "#6b7480", _WHITE),
    "grey2": Color("#c5cbd3", _BLACK, "#444c56", _WHITE),
    "amber1": Color("#d98200", _BLACK, "#d69a2d", _BLACK),
    "amber2": Color("#efb85c", _BLACK, "#9a6a17", _WHITE),
    "amber3": Color("#f8dca6", _BLACK, "#6b4a18", _WHITE),
    "amber4": Color("#965700", _WHITE, "#f2cf8b", _BLACK),
    "violet1": Color("#6f52b5", _WHITE, "#a58be6", _BLACK),
    "violet2": Color("#ae9adb", _BLACK, "#7a63b8", _WHITE),
    "violet3": Color("#d9cff0", _BLACK, "#56478a", _WHITE),
    "red1": Color("#a51d24", _WHITE, "#f26d6d", _BLACK),
    "red2": Color("#c93f42", _WHITE, "#dc5c5c", _BLACK),
    "red3": Color("#e88380", _BLACK, "#b04545", _WHITE),
    "red4": Color("#f3aeaa", _BLACK, "#8c3838", _WHITE),
    "red5": Color("#f9d3d0", _BLACK, "#672d2d", _WHITE),
    "red6": Color("#7d1016", _WHITE, "#ffb3b3", _BLACK),
}

UNKNOWN = "grey1"
"""The colour of a name that this version doesn't know."""

STORED, ALREADY_PRESENT = "blue1", "blue3"

# Two reasons, to miss and to skip, may share a name; they mean the same and look the same.
FILLS: Mapping[str, str] = {
    TierName.GPU: "blue1",
    TierName.CPU: "blue2",
    TierName.REDIS: "blue3",
    MissReason.NEVER_SEEN: "grey1",
    MissReason.TAIL: "grey2",
    MissReason.EVICTED: "amber1",
    MissReason.EXPIRED: "amber2",
    MissReason.CLEARED: "amber3",
    MissReason.NO_SPACE: "amber4",
    MissReason.REFUSED: "violet1",
    MissReason.NOT_WORTH_LOADING: "violet2",
    MissReason.BY_REQUEST: "violet3",
    MissReason.TIER_DOWN: "red1",
    MissReason.SERVER_DOWN: "red2",
    MissReason.CORRUPT: "red3",
    MissReason.FAILED: "red6",
    MissReason.TOO_SLOW: "red4",
    MissReason.OVERWRITTEN: "red5",
    SkipReason.GAIN_TOO_SMALL: "violet1",
    SkipReason.COSTS_MORE_THAN_IT_SAVES: "violet2",
    SkipReason.DISPLACES_MORE: "amber3",
    SkipReason.QUEUE_FULL: "amber2",
}


def fill(name: str) -> str:
    """The colour of a tier, a miss reason or a skip reason."""
    return FILLS.get(name, UNKNOWN)


def _variables(dark: bool) -> str:
    return "".join(
        f"--{name}:{color.dark};--{name}-ink:{color.dark_ink};"
        if dark
        else f"--{name}:{color.light};--{name}-ink:{color.light_ink};"
        for name, color in COLORS.items()
    )


def _classes() -> str:
    return "\n".join(
        f".{name}{{fill:var(--{name});background-color:var(--{name});color:var(--{name}-ink)}}"
        for name in COLORS
    )


def sheet() -> str:
    """The style sheet."""
    return (
        f":root{{color-scheme:light dark;{_LIGHT}{_variables(dark=False)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{_DARK}{_variables(dark=True)}}}}}\n"
        f"{_classes()}\n{_RULES}"
    )


_LIGHT = (
    "--page:#f6f7f9;--card:#ffffff;--ink:#1b2027;--soft:#5a6472;--line:#e1e5ea;--track:#eceff3;"
    "--alarm:#a51d24;"
)
_DARK = (
    "--page:#0f1216;--card:#171b21;--ink:#e6e9ee;--soft:#9aa5b3;--line:#2a3039;--track:#232931;"
    "--alarm:#ff8a85;"
)

_RULES = """\
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:20px;font-weight:650;letter-spacing:-.01em;margin:0}
h2{font-size:16px;font-weight:650;letter-spacing:-.005em;margin:0}
p{margin:0}
code,.mono{font:.88em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.soft{color:var(--soft)}
.small{font-size:13px}
.alarm{color:var(--alarm);font-weight:600}
header{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 24px;margin-bottom:18px;
 align-items:baseline}
header p{overflow-wrap:anywhere;min-width:0}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px;
 margin-top:16px;min-width:0}
section>h2+p{color:var(--soft);font-size:13px;max-width:96ch}
.all{flex-basis:100%}
.key{margin:0;display:grid;grid-template-columns:1.5fr repeat(3,1fr);gap:16px 28px;
 align-items:start}
.key dt{font-size:13px;color:var(--soft)}
.key dd{margin:0}
.key .number{font-size:24px;font-weight:600;letter-spacing:-.02em;line-height:1.25;
 white-space:nowrap}
.key .first .number{font-size:44px;line-height:1.1}
.key .note{font-size:13px;color:var(--soft)}
.plot{position:relative;margin:16px 0 6px}
.plot svg{display:block;width:100%}
.stack svg{height:40px;border-radius:5px;background:var(--track)}
.stack .on{position:absolute;top:0;height:40px;padding:0 10px;display:flex;align-items:center;
 gap:6px;background:none;font-size:13px;font-weight:600;white-space:nowrap;overflow:hidden;
 pointer-events:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:8px 0 0;padding:0;
 font-size:13px}
.legend b{font-weight:600}
.legend li{white-space:nowrap}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px;flex:none}
.time{display:grid;grid-template-columns:1fr 76px;column-gap:8px}
.time svg{display:block;width:100%;border-bottom:1px solid var(--line);overflow:visible}
.rate svg{height:150px}
.load svg{height:44px}
.load{margin-top:10px}
.time .y{position:relative;font-size:12px;color:var(--soft);line-height:1}
.time .y span{position:absolute;left:0;white-space:nowrap;transform:translateY(-50%)}
.time .y span.low{transform:translateY(-100%)}
.time .y span.top{transform:none}
.time .x{display:flex;justify-content:space-between;font-size:12px;color:var(--soft);
 padding-top:4px;white-space:nowrap}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.hover{fill:transparent}
g:hover>.hover{fill:var(--ink);fill-opacity:.12}
.track{fill:var(--track)}
.bar{width:100%;height:8px;display:block;border-radius:2px;background:var(--track)}
.scroll{overflow-x:auto;margin:12px -20px 0;padding:0 20px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:baseline;padding:6px 0 6px 20px;
 border-top:1px solid var(--line)}
th:first-child,td:first-child{padding-left:0}
thead th{font-size:12px;font-weight:500;color:var(--soft);border-top:0;vertical-align:bottom;
 white-space:nowrap}
tbody th{font-weight:500}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.why{display:block;font-size:13px;font-weight:400;color:var(--soft);max-width:52ch}
.name{overflow-wrap:anywhere;min-width:150px}
.barcell{width:24%;min-width:90px;vertical-align:top;padding-top:13px}
.badge{font-size:13px;font-weight:400;white-space:nowrap;margin-left:8px}
.badge.alarm{font-weight:600}
footer{margin-top:20px;font-size:13px;color:var(--soft)}
footer p{max-width:80ch;overflow-wrap:anywhere}
@media (max-width:640px){
 main{padding:18px 12px 36px}
 section{padding:16px 14px;border-radius:8px}
 .scroll{margin:12px -14px 0;padding:0 14px}
 .key{grid-template-columns:1fr 1fr}
 .key .first{grid-column:1/-1}
 .key .number{font-size:20px}
 .wide,thead .barcell{display:none}
 table,thead,tbody{display:block}
 tr{display:grid;grid-template-columns:minmax(0,1fr) 64px 70px;border-top:1px solid var(--line)}
 thead tr{border-top:0}
 th,td{border-top:0;padding-left:8px}
 .n:nth-child(2):last-child{grid-column:3}
 .barcell{grid-row:2;grid-column:1/-1;width:auto;padding:0 0 9px}
 .why{max-width:none}
 .stack .on i{display:none}
 .stack .on{padding:0 6px}
}
.stack .on i{font-style:normal;font-weight:500}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
