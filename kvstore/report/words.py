"""How the report says things: percentages, sizes, durations, and what each reason means.

Shared by the text and the page, so that both say the same. Pure functions of numbers and names.
Knows nothing of the snapshot's layout, of terminals or of HTML: `plain` makes a name safe to
print, escaping it for HTML is the page's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction

from kvstore.types import MissReason, SkipReason, TierName

NOTHING = "\N{EN DASH}"
"""Shown where there is no number, which is not the same as the number 0."""

TIERS: Mapping[str, str] = {
    TierName.GPU: "In the engine's own GPU memory.",
    TierName.CPU: "From the host memory that this server manages.",
    TierName.REDIS: "From Redis or Valkey.",
}

MISSES: Mapping[str, str] = {
    MissReason.NEVER_SEEN: "Nobody has stored them, as far as this server remembers.",
    MissReason.EVICTED: "They were stored and then made room for others; more memory may help.",
    MissReason.EXPIRED: "They were stored and their time to live ran out.",
    MissReason.CLEARED: "They were stored and an operator cleared them.",
    MissReason.REFUSED: "Admission had decided that they were not worth storing.",
    MissReason.NOT_WORTH_LOADING: "They were there, but computing them was estimated to be faster.",
    MissReason.BY_REQUEST: "The caller asked not to load.",
    MissReason.TOO_SLOW: "They were there, but did not arrive by the deadline.",
    MissReason.CORRUPT: "What came back failed its checks and was not used.",
    MissReason.OVERWRITTEN: "Their slot was reused while it was being read.",
    MissReason.FAILED: "The engine could not copy them; its own log says why.",
    MissReason.NO_SPACE: "They were in a far tier, and all that could make room was in use.",
    MissReason.TIER_DOWN: "The tier that may hold them could not be asked.",
    MissReason.SERVER_DOWN: "The engine could not reach this server.",
    MissReason.TAIL: "The last token and what follows the last full block: never loadable.",
}

SKIPS: Mapping[str, str] = {
    SkipReason.GAIN_TOO_SMALL: "The prefill saved would be little next to the whole request.",
    SkipReason.COSTS_MORE_THAN_IT_SAVES: "Loading would take longer than computing, in any tier.",
    SkipReason.DISPLACES_MORE: "The memory is full of what is asked for more often.",
    SkipReason.BY_REQUEST: "The caller asked not to store.",
    SkipReason.QUEUE_FULL: "The background store queue was full, and the request did not wait.",
    SkipReason.NO_SPACE: "Every block that could make room was in use.",
    SkipReason.SERVER_DOWN: "The engine could not reach this server.",
    SkipReason.FAILED: "The store was started and could not be finished.",
}

STORED = "Written for later requests."
ALREADY_PRESENT = "In the store already; nothing was written."

_UNEXPLAINED = "This version has no explanation for it."


def explain(words: Mapping[str, str], name: str) -> str:
    """The sentence for a name; a newer server may send a name that isn't in `words`."""
    return words.get(name, _UNEXPLAINED)


def label(name: str) -> str:
    """An identifier as words: `never_seen` is "never seen"."""
    return plain(name.replace("_", " "))


def plain(name: str) -> str:
    """A name from a client with all that could steer a terminal or reorder a line replaced.

    Control, format and surrogate characters become U+FFFD; that covers escape sequences, line
    breaks and bidirectional overrides.
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def percent(part: float, whole: float) -> str:
    """`part` of `whole` with one decimal; never "0 %" or "100 %" unless it is exactly that.

    `NOTHING` when `whole` is 0. A part above the whole is shown as it is ("120.0 %"), since a store
    can hold more than its nominal capacity. Raises ValueError when either is negative.
    """
    if part < 0 or whole < 0:
        raise ValueError(f"percent({part}, {whole}): a share has no sign")
    if whole == 0:
        return NOTHING
    # Exact, because a float quotient of large integers rounds to 0 or 1 just where it matters.
    share = 100 * Fraction(part) / Fraction(whole)
    if share == 0:
        return "0 %"
    if share == 100:
        return "100 %"
    if share < Fraction(1, 10):
        return "<0.1 %"
    if Fraction(999, 10) < share < 100:
        return ">99.9 %"
    if 100 < share < Fraction(1001, 10):
        return ">100 %"
    if share >= 1000:
        return ">999 %"
    return f"{float(share):.1f} %"


def count(n: int) -> str:
    """A count: in full below 100,000, else three digits and a unit ("12.4 M")."""
    if abs(n) < 100_000:
        return f"{n:,}"
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P", "E"))


def size(size_bytes: int) -> str:
    """A number of bytes in binary units: "512 B", "1.50 GiB"."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def _scaled(n: int, step: int, units: tuple[str, ...]) -> str:
    power, value = 0, float(n)
    # 1,048,575 bytes would print as "1024 KiB": what rounds up to a whole unit gets that unit.
    while power < len(units) - 1 and (abs(value) if power == 0 else round(abs(value))) >= step:
        power, value = power + 1, value / step
    if power == 0:
        return f"{n} {units[0]}".rstrip()
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[power]}"


def duration(seconds: float) -> str:
    """A duration in its two largest units: "340 ms", "12.4 s", "3 min 20 s", "2 d 4 h"."""
    if seconds < 0:
        return "\N{MINUS SIGN}" + duration(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 3600:
        return _two_units(whole // 60, "min", whole % 60, "s")
    if whole < 86_400:
        return _two_units(whole // 3600, "h", whole % 3600 // 60, "min")
    return _two_units(whole // 86_400, "d", whole % 86_400 // 3600, "h")


def _two_units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large:,} {large_unit}" + (f" {small} {small_unit}" if small else "")


def moment(wall_s: float, pattern: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """A wall time in UTC, since the reader may sit in another time zone than the server."""
    try:
        return datetime.fromtimestamp(wall_s, UTC).strftime(pattern)
    except (OverflowError, ValueError, OSError):
        return NOTHING
